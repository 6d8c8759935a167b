// Package metrics shows a daemon to Prometheus.
//
// A scrape asks the daemon's control API, in this process, as a command does;
// nothing is counted here, and nothing runs between scrapes. The number of
// series is bounded: of sessions and devices beyond the first hundred, sorted
// by name, the sum is shown under the name "_other".
//
// The page has no access control: let it listen only where all may know the
// names of devices and addresses.
package metrics
