// Package plugin is the ABI between the daemons and their plugins: storage
// behind the server (io plugins), and ways for devices to appear at the client
// (front ends). Each plugin is a process of its own.
//
// # Authors
//
// A storage plugin is a Backend and a main function:
//
//	func main() { plugin.ServeIO(&backend{}) }
//
// The heart of a Backend is Serve. It answers the requests of one queue:
//
//	func (b *backend) Serve(q *plugin.Queue) error {
//		batch := make([]plugin.Request, 64)
//		for !q.Closed() {
//			n := q.Next(batch)
//			for _, r := range batch[:n] {
//				q.Complete(r.Tag, do(r))
//			}
//			q.Publish()
//			if n == 0 {
//				q.Wait()
//			}
//		}
//		return nil
//	}
//
// docs/extend/writing-a-plugin.md is the tutorial, examples/io-memory the example,
// package plugintest the conformance suite. Plugins that wait for descriptors
// of their own drive their queue in a pump (package pump): a Queue has the
// methods of a pump.Source.
//
// # Hosts
//
// Launch starts a plugin and checks that it fits. Then, in order: AttachQueue
// once per pump, AttachArena and OpenDisk (or AddDevice) as often as needed,
// their opposites, Stop. Requests and payload travel through package shm, not
// through this one. Process.Exited reports a death; the reaction is the
// host's business.
//
// # Threads
//
// Calls of the control path run on goroutines and may overlap. Each queue has
// a locked thread. It takes no lock and allocates nothing per request.
//
// # Hazards
//
// The end of a plugin's process does not end its I/O: see package fence. A
// plugin must not write to standard output before its host has connected: the
// first line is the handshake. Signals of the terminal and of systemd are
// ignored by plugins: their host stops them.
//
// The ABI is docs/extend/abi/plugin-v1.md; the rings are docs/extend/abi/ring-v1.md.
package plugin
