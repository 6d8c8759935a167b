// Package faults tests the death or failure of plugins, daemons, paths and
// disks in the middle of I/O, with real processes.
//
// Most tests keep a load on a mapped device and judge every answer with a
// [History]. The default forms are short; RNBD_LONG=1 asks for the long ones.
package faults
