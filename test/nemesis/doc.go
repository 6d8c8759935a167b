// Package nemesis runs the daemons as processes under faults drawn from a
// seed, and judges the answers that users of the disks got.
//
//	schedule (data: a set-up and timed faults, from a seed or from a file)
//	    -> world (namespaces, wires, server, client, plugins, disks)
//	    -> load (requests over NBD, noted in a blockhistory.History)
//	    -> verdict
//
// A schedule fails when
//
//   - a block's reads and writes have no order that explains them;
//   - a request fails that the schedule gives no reason to fail;
//   - a device or a path is not back within 30 s after the last fault has ended;
//   - a daemon does not end on request, or leaves its sockets.
//
// Then the seed, the schedule, and the folder of the daemons' logs are printed.
//
//	make faults SCHEDULES=300            300 schedules of 20 s
//	make faults SEED=17                  the one of seed 17
//	make faults SCHEDULE=failed.json     one from a file, as a failure prints it
//	make faults SCHEDULES=9 KINDS='flap,disk hang'
//
// MINIMISE=1 leaves out faults of one that fails as long as it fails.
//
// In two namespaces the networks between client and server are pairs of TUN
// devices that the test joins: it drops, delays, repeats and spoils packets
// itself. Without root everything is on loopback addresses, and the faults of
// networks and disks are left out.
package nemesis
