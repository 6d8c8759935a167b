// Command frontend-ublk is the front-end plugin that makes a client's devices
// block devices of its host, /dev/ublkbN, by the kernel's ublk driver. The
// daemon starts it; README.md is for its users.
//
// # Shape
//
// The driver has a character device per block device, and this process serves
// its hardware queues: for each tag one command is always with the driver. The
// command completes when a request has come; its answer fetches the next one.
//
//	block layer ── FETCH done ──► tag ──► ring ──► daemon
//	            ◄── COMMIT ────── tag ◄── ring ◄──
//
// queue.go is the data path, in the order of a request. The buffer of a tag is
// its slot in the arena that is shared with the daemon: the driver copies
// between the slot and the pages of the request, and there is no other copy.
// pages.go serves disks with registered pages. The driver does not copy these.
//
// wire.go has the driver's structures, ctrl.go its commands, settings.go the
// settings of a device, device.go its life, recover.go the take-over from a dead
// process, resize.go the change of its size.
//
// # Threads and ownership
//
// Hardware queue i of every device belongs to queue i mod P of this process and
// its thread: the driver accepts the commands of a hardware queue from one task
// only. Control commands run on goroutines, each on its own io_uring and bounded
// in time. A slot belongs to the driver while its tag is fetched, to the daemon
// while the request is in the ring.
//
// # Hazards
//
// When a thread ends, the driver fails its hardware queues, so Serve returns
// only when the process exits. Deleting a device waits for every opener of its
// character device, so the character device is closed first.
package main
