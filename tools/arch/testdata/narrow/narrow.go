// Package narrow has a value of 64 bits on amd64 and of 32 bits on arm64.
package narrow

import "syscall"

// Block returns the size of blocks.
func Block(st *syscall.Stat_t) int64 { return st.Blksize }
