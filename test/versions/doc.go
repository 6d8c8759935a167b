// Package versions tests this version with the last release: the daemons of one with
// those of the other over each fabric, their plugins, the command line, and the files
// that one leaves to the other.
//
// The last release is the newest tag of cmd/rnbd. While there is none it is a commit of
// the history. Its programs are built for the test, from git, or are those in the
// folder RNBD_OLD_BIN. Both forms need RNBD_LONG=1: `make test-versions`.
package versions
