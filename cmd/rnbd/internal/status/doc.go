// Package status shows a daemon to people: a page for browsers, and its values as
// JSON, on the port of the metrics.
//
// Every five seconds a Page asks the daemon's control API, in this process, and
// keeps what happened in the last 15 minutes: totals, and the few busiest devices
// of each interval. A reader gets values that are a second old at most; more
// readers do not ask the daemon more often. The lists are bounded: those in trouble
// come first, then the busiest.
//
// Names come from other hosts. The script of the page puts them into text nodes
// alone, and the policy of the page refuses scripts, styles and connections
// elsewhere. The page changes nothing.
package status
