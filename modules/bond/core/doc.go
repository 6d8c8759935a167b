// Package core is the state machine of an active-backup bond, as Linux's
// bonding driver has it: the slaves, the state of the link of each, and the
// active slave. It does no I/O and has no clock; every call that needs the time
// takes it. docs/extend/protocol/bonding.md has the rules.
//
// The caller reports carriers and received frames, calls Poll when Next says
// so, and carries out the events that Events returns, in their order:
//
//	m.SetCarrier("ib0", false)
//	m.Poll(now)
//	for _, e := range m.Events() { ... }
//	wake, ok := m.Next()
//
// A Machine is not safe for concurrent use.
package core
