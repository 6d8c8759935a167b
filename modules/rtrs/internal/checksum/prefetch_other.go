//go:build !amd64

package checksum

func prefetch(*byte, int) {}
