// Package ifctl reads and sets attributes of network interfaces by ioctl and
// hears of their changes by rtnetlink. A Control stays with the network
// namespace of the thread that opened it, whichever thread uses it later.
package ifctl
