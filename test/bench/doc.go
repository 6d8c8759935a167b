// Command bench compares rnbd with other NBD servers on this machine, in one
// run in which everybody takes turns, and judges the rows by their targets.
//
// What is compared, what of it is fair and how noise is treated is in
// docs/benchmarking.md. Files: main.go (flags), claims.go (the rows and their
// targets), bench.go (phases and rounds), workload.go and metric.go (what is
// measured), ours.go, peers.go, paths.go, disks.go, idle.go and
// isolation.go (who is measured), fio.go, iperf.go and worker.go (who makes the load), verify.go
// (the same load with data that is checked), costs.go (what is counted per
// I/O), proc.go and machine.go (CPU time, foreign load), report.go, markdown.go
// and plot.go (results).
//
// The program starts itself again as a load generator (-worker), so that the
// CPU time of the client library is that of a process.
package main
