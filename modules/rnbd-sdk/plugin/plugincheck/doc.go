// Package plugincheck judges a storage plugin from outside: it starts the finished
// program, in whatever language it is written, behind the control path and the rings
// that the server uses, and compares what it does with docs/abi/plugin-v1.md.
//
//	r := plugincheck.New(plugincheck.Options{Executable: "./io-foo"})
//	for _, c := range plugincheck.Checks() {
//		result := r.Run(ctx, c)
//		...
//	}
//
// A check has an id that stays the same from release to release, and a title that says
// what a plugin must do. A check that builds on another one is left out when that one has
// failed, so that one fault gives one failure. docs/extend/plugin-test.md explains each.
//
// The disks are the kit's own: files in a temporary folder, or on a medium that loses what
// was not synced, delays, hangs and fails (package medium). For a plugin with names of its
// own the word {dir} in a setting stands for such a folder; without it those checks that
// need the medium are left out.
package plugincheck
