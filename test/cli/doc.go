// Package cli tests the command line against real daemons. Scripts in testdata
// have the typed commands and their expected output; go test -update writes
// the output into them.
package cli
