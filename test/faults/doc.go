// Package faults tests what happens when something dies or fails in the
// middle of I/O: plugins, daemons, paths and disks, with real processes.
//
// Most tests keep a load on a mapped device and judge every answer with a
// [History]. The default forms are short; RNBD_LONG=1 asks for the long ones.
package faults
