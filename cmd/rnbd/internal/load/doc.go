// Package load makes load on block devices and measures how long its requests
// take.
//
// A Workload says what is asked for, a Device is what is asked: a file or block
// device of this host (OpenFile), or whatever else opens Queues. Run has a
// goroutine for each job of each device. It owns one Queue, keeps Depth requests
// in flight and stays on its thread, as queues demand.
//
// With a Pattern every sector written tells its place and how often it was
// written, and every sector read is compared.
//
// Hazard: writes are not undone. Whoever calls Run with a workload that writes
// has asked its user.
package load
