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
// A file uses what files further on in this list declare, and nothing of the files
// before it.
//
//	tree*, api*              the control files and the control API
//	client, takeover, remap_force, restore, leave_steps, client_handover
//	                         begin and end of a client; disks that outlive one, and
//	                         what is handed over to the next process; devices that are
//	                         tried until they are mapped again
//	map, unmap, remap, resize, reservation, join, waiting
//	                         mapping of a device, and its way back
//	discover, probe          questions to a server without a mapping
//	session*, paths          sessions, their paths, their losses
//	reopen, events, handover, open, closing, refusal
//	                         a device's state at the server, and its events
//	frontend_choice, frontend, protect
//	                         front ends: which one, its life, and the TLS of its sockets
//	attachment_*             one device at one front end: worker, steps, requests to it
//	frontend_process, direct, watch
//	                         one process of a front end; the library's own way to a
//	                         device, without a front end; requests that hang
//	queue*, answer, lane, again
//	                         DATA PATH: requests from a ring to RTRS and back
//	extents, durable         data and holes of a device; writes that a power cut may lose
//	links, state, leftover, attachment, keptfile, names, pathspec, fabrics
//	                         links to disks; the file for the next daemon; what
//	                         attachments share; names of disks and sessions; addresses
//	                         and fabrics
//	device, session, record  what all of these ask a device and a session
//	model                    the structs of all of these
//	request, config, device_state, state_file, attachment_next, device_facts, tuning,
//	spelling, sockets, mountfile, path_watch
//	                         values and pure functions
//	internal/mapline         the text of lines and paths, without state
package client
