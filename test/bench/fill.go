package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strings"

	"github.com/rnbd-go/rnbd/test/nbdclient"
)

// fillExport writes every byte of the export of an NBD server at addr. A path is a
// unix socket.
func fillExport(ctx context.Context, addr, export string) error {
	network := "tcp"
	if strings.HasPrefix(addr, "/") {
		network = "unix"
	}
	n, err := nbdclient.Dial(ctx, network, addr, nbdclient.Options{Export: export})
	if err != nil {
		return err
	}
	defer n.Close()
	buf := make([]byte, 1<<20)
	for off := int64(0); off < n.Size(); off += int64(len(buf)) {
		noise(buf, uint64(off>>20))
		if _, err := n.WriteAt(buf[:min(int64(len(buf)), n.Size()-off)], off); err != nil {
			return fmt.Errorf("fill at %d: %w", off, err)
		}
	}
	return nil
}

// fillFile makes a file with every byte written.
func fillFile(path string, size int64) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	f.Close()
	return fillOpen(path, size)
}

// fillOpen writes every byte of a file or device that is there.
func fillOpen(path string, size int64) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	buf := make([]byte, 1<<20)
	for off := int64(0); off < size; off += int64(len(buf)) {
		noise(buf, uint64(off>>20))
		if _, err := f.Write(buf); err != nil {
			return fmt.Errorf("fill: %w", err)
		}
	}
	return f.Sync()
}

// noise fills b with bytes that do not compress and are not zero.
func noise(b []byte, seed uint64) {
	var key [32]byte
	key[0], key[1] = byte(seed), byte(seed>>8)
	rand.NewChaCha8(key).Read(b)
}

func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, err
}
