// Package selfstats lets a running process write its Go runtime's metrics to a
// file when it is asked to.
//
// Nothing happens unless RNBD_METRICS_FILE is set. Then each SIGUSR1 writes
// the file $RNBD_METRICS_FILE.PID, whole or not at all: one metric of
// runtime/metrics per line, its name, a space and its value. Plugins get the
// variable from their host, and write files of their own. Count adds a metric
// of the process's own.
package selfstats
