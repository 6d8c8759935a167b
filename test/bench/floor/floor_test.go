package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/test/nbdclient"
)

// asFloor has the test program be the command.
const asFloor = "RNBD_TEST_FLOOR"

func TestMain(m *testing.M) {
	if os.Getenv(asFloor) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

func TestServesADisk(t *testing.T) {
	for _, flag := range []string{"-sums=false", "-sums", "-in-server", "-datagrams", "-datagrams -sums"} {
		t.Run(flag, func(t *testing.T) { serveADisk(t, strings.Fields(flag)) })
	}
}

func serveADisk(t *testing.T, flags []string) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "floor") // a short path
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	socket := filepath.Join(dir, "s")
	cmd := exec.Command(exe, append([]string{"-socket", socket, "-size", "16777216"}, flags...)...)
	cmd.Env = append(os.Environ(), asFloor+"=1")
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var c *nbdclient.Client
	for {
		if c, err = nbdclient.Dial(ctx, "unix", socket, nbdclient.Options{}); err == nil {
			break
		}
		if ctx.Err() != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Millisecond)
	}
	writeAndRead(t, c, 20)
	c.Close()
	if err := errors.Join(cmd.Process.Signal(syscall.SIGTERM), cmd.Wait()); err != nil {
		t.Error(err)
	}
	if _, err := nbdclient.Dial(ctx, "unix", socket, nbdclient.Options{}); err == nil {
		t.Error("a child is still there")
	}
}

// TestServesADiskOfUblk needs the kernel's driver: test/kernelvm has it.
func TestServesADiskOfUblk(t *testing.T) {
	if _, err := os.Stat("/dev/ublk-control"); err != nil {
		t.Skip("no ublk here: ", err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), exe, "-ublk", "-sums", "-size", "16777216")
	cmd.Env = append(os.Environ(), asFloor+"=1")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	node, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("no disk: %v", err)
	}
	f, err := os.OpenFile(strings.TrimSpace(node), os.O_RDWR|syscall.O_SYNC, 0)
	if err != nil {
		t.Fatal(err)
	}
	writeAndRead(t, uncached{f}, 6) // in an emulated machine
	f.Close()
	if err := errors.Join(cmd.Process.Signal(syscall.SIGTERM), cmd.Wait()); err != nil {
		t.Error(err)
	}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		left, _ := filepath.Glob("/dev/ublkc*") // fails for a bad pattern only
		if len(left) == 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("left behind: %v", left)
		}
	}
}

// uncached reads a device past the page cache of whoever wrote it.
type uncached struct{ *os.File }

func (u uncached) ReadAt(p []byte, off int64) (int, error) {
	if err := unix.Fadvise(int(u.Fd()), off, int64(len(p)), unix.FADV_DONTNEED); err != nil {
		return 0, err
	}
	return u.File.ReadAt(p, off)
}

// TestMakesLoad has each kind of disk and of load, with more requests than a job has
// in flight.
func TestMakesLoad(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "disk")
	if err := os.WriteFile(file, make([]byte, 16<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if f, err := os.OpenFile(file, os.O_RDWR|syscall.O_DIRECT, 0); err != nil {
		t.Skip("no I/O past the page cache here: ", err)
	} else {
		f.Close()
	}
	loads := []string{"--rw randread --bs=4096 --depth=16 --jobs=1", "--rw randwrite --bs=4096 --depth=1 --jobs=32", "--rw write --bs=1048576 --depth=4 --jobs=2"}
	for _, flags := range [][]string{nil, {"-sums"}, {"-datagrams", "-sums"}, {"-file", file}, {"-file", file, "-direct", "-sums"}} {
		cmd := exec.CommandContext(t.Context(), exe, append([]string{"-library", "-size", "16777216"}, flags...)...)
		cmd.Env = append(os.Environ(), asFloor+"=1")
		cmd.Stderr = os.Stderr
		cmd.Stdin = strings.NewReader("disk " + strings.Join(loads, " --time=50ms\ndisk ") + " --time=50ms\n")
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%v: %v", flags, err)
		}
		answers := json.NewDecoder(bytes.NewReader(out))
		for line := range len(loads) + 1 {
			var a struct {
				Line    int
				Results []result
			}
			if err := answers.Decode(&a); err != nil || a.Line != line {
				t.Fatalf("%v: answer %d: %v, %+v", flags, line, err, a)
			}
			if line > 0 && (len(a.Results) != 1 || a.Results[0].Requests == 0 || a.Results[0].P50 <= 0 || a.Results[0].Elapsed < 50e6) {
				t.Errorf("%v, %s: %+v", flags, loads[line-1], a.Results)
			}
		}
	}
}

// disk16M is a disk of 16 MiB.
type disk16M interface {
	io.ReaderAt
	io.WriterAt
}

// writeAndRead moves blocks of all kinds of sizes, many at once, so many turns.
func writeAndRead(t *testing.T, c disk16M, turns int) {
	t.Helper()
	sizes := []int{4096, 1 << 20, 124 << 10, 8192, 256 << 10, 512}
	errs := make(chan error)
	for i := range 12 {
		go func() {
			errs <- func() error {
				for turn := range turns {
					at, n := int64(i)<<20, sizes[(i+turn)%len(sizes)]
					want := bytes.Repeat([]byte{byte(i), byte(turn), byte(turn >> 3), 7}, n/4)
					if _, err := c.WriteAt(want, at); err != nil {
						return err
					}
					got := make([]byte, n)
					if _, err := c.ReadAt(got, at); err != nil {
						return err
					}
					if !bytes.Equal(got, want) {
						t.Errorf("block %d of %d bytes, turn %d: not what was written", i, n, turn)
					}
				}
				return nil
			}()
		}()
	}
	for range 12 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}
