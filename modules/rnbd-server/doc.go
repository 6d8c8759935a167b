// Package server exports files and block devices of this host over RTRS.
//
// A Server owns P pumps. RTRS connections belong to a pump for life; each pump
// has one ring to every io plugin process. A request runs from the wire to the
// ring and back on its pump, without a lock (queue.go and ring.go are the way
// there, answer.go the way back). Everything else, such as opening, access rules
// and the life of plugins, happens on ordinary goroutines and reaches a pump
// through pump.Do.
//
// The server does not touch payload: the chunk that a client wrote to is a
// slice of a memfd arena, and the io plugin has mapped the same arena.
//
// Names sent by clients are resolved inside a jail (jail.go). rules.go and
// writers.go decide about access. restart.go, failing.go and reopen.go handle the
// death of a plugin.
//
// # Files
//
// A file uses what files further on in this list declare, and nothing of the files
// before it.
//
//	tree*, devicestats, pathstats, control*
//	                         the control files and the control API
//	recheck                  identities that are no longer proved
//	handover                 another process goes on with the clients
//	server                   begin and end of a server
//	ioplugin, restart, reopen, failing, hold, pause, unpark
//	                         the life of a plugin's process, and its devices
//	handler, list, writer_notice
//	                         sessions, and the messages of clients
//	open, node_locks, limits
//	                         OPEN and CLOSE, and what they wait for
//	extents, device, rule_use, size
//	                         devices, their rules, their sizes and their holes
//	arenas, plugin_open, durable, guard, events, published, rules, audit, watch
//	                         what the above ask of a plugin, a client, the rules
//	queue, replay, ring, answer, budget, window, flusherrors, writer_history
//	                         DATA PATH: requests from the wire to a ring and back
//	session, devstate, record, plugin_info
//	                         what all of these ask a session, a device and a plugin
//	model                    the structs of all of these
//	writers, config, jail, identity, incarnation, index_allocator, session_owners,
//	rate_limits, pacer, reason, flusherror
//	                         values, names, and small machines of their own
package server
