// Package watchdog reports requests that failed or do not end.
//
// Pumps count: Failures has the failed requests of one device on one pump, by
// stage and errno, and Recent the latest of them. Each has one writer, the
// pump, and takes no lock. At intervals of Pause, off the data path, the daemon
// reads both, and looks for requests that are older than a limit; a Reporter
// decides which of that is logged, and keeps what hangs now for commands and
// metrics.
package watchdog
