package nbdclient

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
)

// serveQemu serves a file by qemu-nbd, a server that is not ours.
func serveQemu(t *testing.T, export string) (socket, file string) {
	t.Helper()
	qemu, err := exec.LookPath("qemu-nbd")
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal("qemu-nbd is not installed")
		}
		t.Skip("qemu-nbd is not installed")
	}
	dir := t.TempDir()
	socket, file = filepath.Join(dir, "nbd.sock"), filepath.Join(dir, "image")
	if err := os.WriteFile(file, make([]byte, 2<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(qemu, "-f", "raw", "-k", socket, "-x", export, "-e", "8", "-t", "--discard=unmap", file)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	for range 3000 {
		if c, err := net.Dial("unix", socket); err == nil {
			c.Close()
			return socket, file
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Fatal("qemu-nbd does not listen")
	return "", ""
}

func TestAgainstQemu(t *testing.T) {
	socket, file := serveQemu(t, "disk")
	names, err := List(t.Context(), "unix", socket)
	if err != nil || len(names) != 1 || names[0] != "disk" {
		t.Errorf("list: %q, %v", names, err)
	}
	if _, err := Dial(t.Context(), "unix", socket, Options{Export: "other"}); err == nil {
		t.Error("an unknown export opens")
	}
	for _, simple := range []bool{true, false} {
		t.Run(fmt.Sprintf("simple=%v", simple), func(t *testing.T) {
			c, err := Dial(t.Context(), "unix", socket, Options{Export: "disk", Simple: simple})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if i := c.Info(); i.Size != 2<<20 || i.Flags&nbdwire.SendFlush == 0 || i.Structured == simple {
				t.Errorf("%+v", i)
			}
			exercise(t, c, file)
		})
	}
}

// exercise runs every command, at depth.
func exercise(t *testing.T, c *Client, file string) {
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			want, got := bytes.Repeat([]byte{byte(i + 1)}, 70000), make([]byte, 70000)
			off := int64(i) * 128 << 10
			if _, err := c.WriteAt(want, off); err != nil {
				t.Errorf("write: %v", err)
			}
			if _, err := c.ReadAt(got, off); err != nil || !bytes.Equal(got, want) {
				t.Errorf("read: %v, or data differ", err)
			}
		}()
	}
	wg.Wait()
	_, werr := c.Write([]byte("fua"), 1, FUA)
	err := errors.Join(werr, c.Flush(), c.WriteZeroes(128<<10, 4096, NoHole), c.Trim(256<<10, 4096))
	if err != nil {
		t.Error(err)
	}
	image, err := os.ReadFile(file)
	if err != nil || string(image[1:4]) != "fua" || image[128<<10] != 0 || image[128<<10+4096] != 2 {
		t.Errorf("the image differs, %v", err)
	}
	if _, err := c.ReadAt(make([]byte, 10), 2<<20); err == nil {
		t.Error("a read beyond the end succeeds")
	}
	if _, err := c.ReadAt(make([]byte, 10), 0); err != nil {
		t.Errorf("the connection does not survive: %v", err)
	}
}

func TestCallsAfterCloseFail(t *testing.T) {
	socket, _ := serveQemu(t, "disk")
	c, err := Dial(t.Context(), "unix", socket, Options{Export: "disk"})
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if err := c.Flush(); !errors.Is(err, ErrClosed) {
		t.Errorf("flush: %v", err)
	}
}

// answer starts a client after the server's side of the negotiation, and
// answers its first request with b. The cookie of that request is 1.
func answer(t *testing.T, b []byte) *Client {
	t.Helper()
	ours, theirs := net.Pipe()
	c := &Client{conn: ours, pending: map[uint64]*call{}, over: make(chan struct{})}
	go c.run()
	go func() {
		io.ReadFull(theirs, make([]byte, 28))
		theirs.Write(b)
		theirs.Close()
	}()
	t.Cleanup(func() { ours.Close(); <-c.over })
	return c
}

func chunk(flags, kind uint16, cookie uint64, data ...byte) []byte {
	b := binary.BigEndian.AppendUint32(nil, nbdwire.MagicChunk)
	b = binary.BigEndian.AppendUint16(b, flags)
	b = binary.BigEndian.AppendUint16(b, kind)
	b = binary.BigEndian.AppendUint64(b, cookie)
	b = binary.BigEndian.AppendUint32(b, uint32(len(data)))
	return append(b, data...)
}

func at(off uint64, data ...byte) []byte {
	return append(binary.BigEndian.AppendUint64(nil, off), data...)
}

func simple(code uint32, cookie uint64, data ...byte) []byte {
	b := binary.BigEndian.AppendUint32(nil, nbdwire.MagicSimple)
	b = binary.BigEndian.AppendUint32(b, code)
	b = binary.BigEndian.AppendUint64(b, cookie)
	return append(b, data...)
}

func TestReplies(t *testing.T) {
	for _, v := range []struct {
		name  string
		reply []byte
		data  string // read; empty: an error
		err   error
	}{
		{"simple", simple(0, 1, 'a', 'b', 'c', 'd'), "abcd", nil},
		{"simple error", simple(5, 1), "", syscall.EIO},
		{"one chunk", chunk(1, 1, 1, at(100, 'a', 'b', 'c', 'd')...), "abcd", nil},
		{"chunks out of order", append(chunk(0, 1, 1, at(102, 'c', 'd')...), chunk(1, 1, 1, at(100, 'a', 'b')...)...), "abcd", nil},
		{"a hole, and an end without data", append(append(chunk(0, 1, 1, at(102, 'c', 'd')...), chunk(0, 2, 1, at(100, 0, 0, 0, 2)...)...), chunk(1, 0, 1)...), "\x00\x00cd", nil},
		{"error chunk", chunk(1, 1<<15+1, 1, 0, 0, 0, 28, 0, 0), "", syscall.ENOSPC},
		{"error chunk, then the end", append(chunk(0, 1<<15+1, 1, 0, 0, 0, 5, 0, 0), chunk(1, 0, 1)...), "", syscall.EIO},
		{"garbage", bytes.Repeat([]byte{'x'}, 20), "", ErrClosed},
		{"another cookie", simple(0, 2), "", ErrClosed},
		{"chunk before the range", chunk(1, 1, 1, at(99, 'a')...), "", ErrClosed},
		{"chunk beyond the range", chunk(1, 1, 1, at(103, 'a', 'b')...), "", ErrClosed},
		{"chunk without an offset", chunk(1, 1, 1, 0, 0), "", ErrClosed},
		{"hole beyond the range", chunk(1, 2, 1, at(100, 255, 255, 255, 255)...), "", ErrClosed},
		{"error chunk without an error", chunk(1, 1<<15+1, 1, 0, 0, 0, 0, 0, 0), "", ErrClosed},
		{"unknown chunk", chunk(1, 77, 1), "", ErrClosed},
		{"the end", nil, "", ErrClosed},
		{"half a reply", simple(0, 1, 'a', 'b'), "", ErrClosed},
	} {
		t.Run(v.name, func(t *testing.T) {
			p := []byte("....")
			n, err := answer(t, v.reply).ReadAt(p, 100)
			if !errors.Is(err, v.err) {
				t.Errorf("error %v, want %v", err, v.err)
			}
			if v.err == nil && (n != 4 || string(p) != v.data) {
				t.Errorf("reads %d bytes, %q", n, p)
			}
		})
	}
}

func TestDialEndsWithItsContext(t *testing.T) {
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "silent"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := Dial(ctx, "unix", l.Addr().String(), Options{}); !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
}
