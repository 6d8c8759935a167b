package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// Real clients of block status.

const dataFrom, dataTo = 1 << 20, 3 << 19 // of sparseRig's disk; the rest are holes

// sparseRig has a disk of 4 MiB, most of which are holes.
func sparseRig(t *testing.T) (*rig, string) {
	r := newRig(t, rigConfig{queues: 2, slots: 64})
	r.disks[0].with(func() {
		r.disks[0].keep = true
		copy(r.disks[0].mem[dataFrom:dataTo], pattern(dataTo-dataFrom, 11))
	})
	return r, "nbd+unix:///disk0?socket=" + r.addr
}

// mapped is a range as the tools print it.
type mapped struct {
	Offset, Length, Start uint64
	Type                  int
	Data, Zero            bool
}

func unmarshal(t *testing.T, out string) (list []mapped) {
	t.Helper()
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return list
}

func TestNbdinfoMap(t *testing.T) {
	r, uri := sparseRig(t)
	want := []mapped{
		{Offset: 0, Length: dataFrom, Type: 3},
		{Offset: dataFrom, Length: dataTo - dataFrom, Type: 0},
		{Offset: dataTo, Length: 4<<20 - dataTo, Type: 3},
	}
	if got := unmarshal(t, run(t, "nbdinfo", "--map", "--json", uri)); !slices.Equal(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	if out := run(t, "nbdinfo", "--json", uri); !bytes.Contains([]byte(out), []byte(`"base:allocation"`)) {
		t.Errorf("the context is not listed: %s", out)
	}
	r.disks[0].telling(func(*shm.SQE, []byte) blk.Errno { return blk.EOPNOTSUPP })
	if got := unmarshal(t, run(t, "nbdinfo", "--map", "--json", uri)); !slices.Equal(got, []mapped{{Length: 4 << 20}}) {
		t.Errorf("%+v of a host that knows nothing", got)
	}
}

func TestQemuImgMap(t *testing.T) {
	_, uri := sparseRig(t)
	got := unmarshal(t, run(t, "qemu-img", "map", "--output=json", "-f", "raw", uri))
	at := uint64(0)
	for _, m := range got {
		inData := m.Start >= dataFrom && m.Start < dataTo
		if m.Start != at || m.Data != inData || m.Zero == inData {
			t.Errorf("%+v", m)
		}
		at += m.Length
	}
	if len(got) != 3 || at != 4<<20 {
		t.Errorf("%+v", got)
	}
}

// A copy reads the data alone, and is equal all the same.
func TestCopiesSkipHoles(t *testing.T) {
	for name, tool := range map[string]func(uri, file string) []string{
		"nbdcopy": func(uri, file string) []string { return []string{"nbdcopy", uri, file} },
		"qemu-img": func(uri, file string) []string {
			return []string{"qemu-img", "convert", "-f", "raw", "-O", "raw", uri, file}
		},
	} {
		t.Run(name, func(t *testing.T) {
			r, uri := sparseRig(t)
			file := filepath.Join(t.TempDir(), "image")
			args := tool(uri, file)
			run(t, args[0], args[1:]...)
			if got, err := os.ReadFile(file); err != nil || !bytes.Equal(got, r.disks[0].at(0, 4<<20)) {
				t.Error("the copy differs", err)
			}
			read := uint64(0)
			for _, e := range r.disks[0].requests() {
				if e.Op == blk.Read {
					read += uint64(e.Len)
				}
			}
			if read > dataTo-dataFrom+256<<10 { // tools probe the beginning
				t.Errorf("%d bytes are read, %d are data", read, dataTo-dataFrom)
			}
		})
	}
}
