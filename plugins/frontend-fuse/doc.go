// Command frontend-fuse is the front-end plugin that shows a client's devices as
// files. The daemon starts it. README.md is for its users.
//
// # Shape
//
// Each device is a FUSE file system of its own whose root is a regular file of the
// device's size. The daemon mounts it and passes the descriptor of /dev/fuse as the
// device's channel (plugin.DeviceSpec.Channel). The descriptor belongs to one queue
// for life:
//
//	user ── kernel ── /dev/fuse ──► request ──► ops (slots) ──► ring ──► daemon
//	                 ◄── writev ── reply    ◄──────────────── ring ◄──
//
// A mount for each device keeps devices apart: the kernel queues the requests of a
// device that does not answer behind its own descriptor.
//
// request.go and reply.go are the data path in the order of a request. control.go answers requests
// about the file itself. wire.go has the messages of the kernel.
//
// # Threads and ownership
//
// A queue, its devices and all of their slots belong to the thread that serves the
// queue. Device i belongs to queue i mod P. Other goroutines reach a queue by do.
//
// # The death of a process
//
// The daemon keeps the descriptor. The next process asks the kernel to send requests
// without a reply again (FUSE_NOTIFY_RESEND, Linux 6.9). The daemon shows a device to
// the next process only after the requests of the dead one have ended, so a repeated
// write is never overtaken by its first copy.
//
// # Hazards
//
// The process must not open a file that it serves: its own thread would have to answer.
package main
