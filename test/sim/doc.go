// Package sim runs servers, clients, plugins and disks in one process, under
// virtual time, and lets faults meet.
//
// A schedule is a topology, a load and a list of faults, drawn from a seed. A
// run of a schedule takes some 20 seconds of virtual time in a bubble of
// testing/synctest, and 0.1 s of one CPU: "make check" runs 1,000 of them. The
// product itself runs: both daemons as libraries, RTRS, plugins behind the
// plugin API, rings and pumps. Simulated are the fabric
// (rtrs/provider/loopback), the storage plugin and its disks (storage.go,
// disk.go), the front end and its users (front.go, users.go), and time.
//
// # The judge
//
//   - Data: each block has a history of writes (history.go). A read returns the last
//     acknowledged write or one that was begun later; nothing older comes back. After
//     the power of a server failed that holds for flushed writes.
//   - Errors: with loss=queue a request fails only if its disk was made to fail, or
//     its users were told that it may: its device was unmapped, or came back as
//     something else.
//   - Isolation: a request takes more than 5 s only if a fault reaches its device
//     (isolation.go).
//   - Liveness: once the faults have ended each device answers, within a minute of
//     virtual time.
//   - Memory: the memory of a request belongs to it until the disk has finished. Two
//     requests never share a byte, and data being written by a disk does not change.
//
// docs/inside/simulator.md lists the faults that are drawn, and the known findings.
//
// # Seeds
//
// The same seed draws the same schedule. The order in which goroutines run is
// the scheduler's: a run with GOMAXPROCS=1 repeats itself nearly always, but a
// failure that depends on a race of goroutines may need several runs of its
// seed.
package sim
