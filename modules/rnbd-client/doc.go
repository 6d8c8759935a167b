// Package client maps devices of RNBD servers and serves them to front ends.
//
// A Client owns P pumps. Each front-end process has one ring per pump; a
// request is taken from the ring, sent over RTRS and answered in the ring, all
// on one pump and without a lock (queue.go, then answer.go). Sessions,
// mapping, reconnects and the life of front-end processes are control: they run
// on ordinary goroutines and steer the pumps through each device's gate.
//
// The memory of a device is one arena of slots. The front end writes payload
// into a slot, and RTRS sends it from there. The fabric places the answer to
// a read into the slot.
//
//	         OPEN ok                last path lost
//	init ---------------> open ---------------------> closed
//	                       ^  \                        |  |
//	                       |   \ unmap           unmap |  |
//	                       |    `-----> unmapped <-----'  |
//	                       |                              |
//	                       `------ session is back, ------'
//	                               OPEN ok; or remap
//
// # Files
//
//	queue, answer, lane, again
//	                         DATA PATH: requests from a ring to RTRS and back
//	direct                   the library's own way to a device, without a front end
//	client, map, unmap, open, join
//	                         mapping of a device, and its state at the server
//	session, paths, events   sessions, their paths, and news of the server
//	frontend, host, attach*  front ends: processes, and the devices that they serve
//	state, known, leftover   the files for the next daemon
//	api*, tree*              the control API and the control files
//	internal/mapline         the text of lines and paths, without state
package client
