// Package metrics shows a daemon to Prometheus.
//
// A scrape asks the daemon's control API, in this process, as a command does;
// nothing is counted here, and nothing runs between scrapes. The number of
// series is bounded: of sessions and devices beyond the first hundred, sorted
// by name, the sum is shown under the name "_other".
//
// A Guard protects the page by TLS and a token. The two pages for health have no
// names on them and need no token.
package metrics
