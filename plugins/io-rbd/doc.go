// Io-rbd is the storage plugin for images of Ceph clusters. It needs librbd and cgo, and is
// built with the tag librbd: `make io-rbd`. Without the tag it is a program that says so.
// See README.md.
package main
