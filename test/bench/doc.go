// Command bench compares rnbd with other NBD servers on this machine, in one
// run in which everybody takes turns.
//
// What is compared, what of it is fair and how noise is treated is in
// docs/benchmarking.md. Files: main.go (flags), bench.go (the rounds),
// workload.go (what is measured), ours.go and peers.go (who is measured),
// fio.go and worker.go (who makes the load), proc.go and machine.go (CPU time,
// foreign load), report.go and markdown.go (results).
//
// The program starts itself again as a load generator (-worker), so that the
// CPU time of the client library is that of a process.
package main
