// Package ceph tests the storage plugin for Ceph with a cluster of one monitor and one
// OSD in memory, which it starts. `make test-ceph` unpacks Debian's packages, without
// installing them, and sets RNBD_CEPH to their folder; without it the tests are left out.
package ceph
