// Package dev is the bond as an interface: it enslaves and releases devices
// with the rules, errnos and words of Linux's bonding driver, takes its
// attributes from its slaves, carries frames between its upper side and the
// active slave, and carries out a fail-over.
//
// A Slave is a device below a bond; other modules implement it. An Upper is the
// interface for the bond's users, such as a TAP; a bond can go without one when
// only the resolver is used. A Net is the set of interfaces that know each
// other by name.
//
// Methods may be called from any goroutine, but not from a function that a
// Slave or an Upper is calling: a bond calls them with its lock held. The callbacks
// that they are given do not block and may be called from anywhere.
package dev
