// Package load makes load on block devices and measures how long its requests
// take.
//
// A Workload is the load, a Device is its object: a file or block device of
// this host (OpenFile), or anything else that opens Queues. Run has a goroutine
// for each job of each device. It owns one Queue and keeps Depth requests in
// flight.
//
// With a Pattern, every sector written has its position and the number of its
// writes, and every sector read is compared.
//
// Hazard: writes are not undone. The caller of Run must have asked its user
// before a workload that writes.
package load
