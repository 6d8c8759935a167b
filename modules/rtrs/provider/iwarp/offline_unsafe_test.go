package iwarp

import "unsafe"

// bytes returns the memory that entry i describes.
func (v *vec) bytes(i int) []byte { return unsafe.Slice(v.iov[i].Base, v.iov[i].Len) }
