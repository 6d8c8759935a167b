// Package plugintest runs a storage plugin in a test: behind real gRPC, real
// descriptor passing and real rings, but in the test's own process.
//
//	func TestConformance(t *testing.T) {
//		plugintest.RunIO(t, newBackend(), plugintest.Options{Name: "disk0"})
//	}
//
// RunIO is the contract of docs/extend/abi/plugin-v1.md as a test suite; every
// storage plugin should pass it. StartIO gives a raw submitter, for tests and
// benchmarks of one's own.
//
// With Main in TestMain and Options.Executable set to os.Executable, the same
// suite runs against the plugin as a process.
package plugintest
