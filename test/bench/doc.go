// Command bench compares rnbd with other NBD servers on this machine, in one
// run in which all take turns, and judges the rows by their targets.
//
// Comparisons, their fairness and the treatment of noise are in docs/results/benchmarking.md. Files:
// main.go (flags), claims.go (the rows and their targets), bench.go (phases and rounds),
// workload.go and metric.go (loads and figures), users.go (rows of a socket and a disk, and their
// busy neighbour), ours.go, peers.go, floors.go, paths.go, disks.go, idle.go
// and isolation.go (targets), generator.go, fio.go and iperf.go (load generators), fill.go
// (contents), verify.go (the same load with data that is checked), costs.go (counts per I/O),
// proc.go and machine.go (CPU time, foreign load), report.go, markdown.go and plot.go (results).
//
// Command floor is the skeleton of the paths through the NBD front end and from the library.
//
// With -net networks are compared in the same way: netclaims.go (rows), net.go and wireguard.go
// (targets), netmarkdown.go (tables). Command netpeer has wireguard-go and the round trips.
//
// The load on targets of ours is a process of `rnbd bench`, which takes orders: what
// users measure with is what is compared here, and the CPU time of the client
// library is that of a process.
package main
