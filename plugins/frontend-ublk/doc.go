// Command frontend-ublk is the front-end plugin that makes a client's devices
// block devices of its host, /dev/ublkbN, by the kernel's ublk driver. The
// daemon starts it; README.md is for its users.
//
// # Shape
//
// The driver has a character device per block device, with hardware queues
// that we serve: for each tag one command is always with the driver. It
// completes when a request has come, and answering it asks for the next.
//
//	block layer ── FETCH done ──► tag ──► ring ──► daemon
//	            ◄── COMMIT ────── tag ◄── ring ◄──
//
// queue.go is the data path, in the order of a request. The buffer of a tag is
// its slot in the arena that we share with the daemon: the driver copies
// between it and the pages of the request, and nobody else does. pages.go is for
// disks of which the driver registers the pages instead.
//
// wire.go has the driver's structures, ctrl.go its commands, settings.go what
// users may say, device.go the life of a device, recover.go how the next
// process takes over from a dead one, resize.go how a disk gets another size.
//
// # Threads and ownership
//
// Hardware queue i of every device belongs to queue i mod P of this process and
// its thread: the driver takes the commands of a hardware queue from one task
// only. Control commands run on goroutines, each on an io_uring of its own and
// bounded in time. A slot belongs to the driver while its tag is fetched, to
// the daemon while the request is in the ring.
//
// # Hazards
//
// A thread that ends takes its hardware queues with it: Serve returns only when
// the process is on its way out. Deleting a device waits for every opener of
// its character device, so that is closed first.
package main
