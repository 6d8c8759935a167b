// Package handover starts the next process of a daemon, and hands sockets over to
// it.
//
// The running process, the predecessor, starts the next one with a socket pair as
// descriptor 3, the sockets behind it, and their names in the environment. Both
// send lines over the pair:
//
//	next -> predecessor   ready VERSION    prepared, nothing is served yet
//	predecessor -> next   state TEXT       of daemons with a state to hand over
//	predecessor -> next   go DEVICES       serve; so many devices were open
//	next -> predecessor   serving          the clients are served, or could be
//	predecessor -> next   yours            after a state: it takes nothing back
//	next -> predecessor   failed "WHY"     in place of ready or serving; it ends
//
// The end of file tells each that the other has ended. A next process that ends
// before it serves has changed nothing that the predecessor cannot take back: the
// sockets stay open in both. docs/extend/abi/handover-v1.md is the contract between
// versions.
package handover
