// Package cli tests the command line against real daemons. Scripts in testdata
// say what is typed and what must be printed; go test -update writes what is
// printed into them.
package cli
