// Package mapline parses the text that names a device and the paths to its
// server: map_device lines and paths. It has no state and does no I/O.
package mapline
