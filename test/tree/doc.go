// Package tree runs the daemons with their trees of control files and works on
// these with a shell: cat, echo, ls. Tests need root, to mount.
package tree
