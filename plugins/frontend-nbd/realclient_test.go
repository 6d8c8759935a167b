package main

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Real NBD clients against the front end. They are skipped where they are not
// installed, except in CI.

func tool(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err == nil {
		return path
	}
	if os.Getenv("CI") == "true" {
		t.Fatalf("%s is not installed", name)
	}
	t.Skipf("%s is not installed", name)
	return ""
}

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, tool(t, name), args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func realRig(t *testing.T) (*rig, string) {
	r := newRig(t, rigConfig{queues: 2, slots: 64})
	r.disks[0].with(func() { copy(r.disks[0].mem, pattern(4<<20, 11)) })
	return r, "nbd+unix:///disk0?socket=" + r.addr
}

func TestNbdinfo(t *testing.T) {
	_, uri := realRig(t)
	out := run(t, "nbdinfo", uri)
	for _, want := range []string{
		"export-size: 4194304", "protocol: newstyle-fixed without TLS, using structured packets",
		"can_flush: true", "can_fua: true", "can_multi_conn: true", "can_trim: true", "can_zero: true",
		"is_read_only: false", "is_rotational: false", "can_fast_zero: false",
		"block_size_minimum: 1", "block_size_preferred: 4096", "block_size_maximum: 33554432",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("nbdinfo does not say %q:\n%s", want, out)
		}
	}
}

func TestNbdinfoList(t *testing.T) {
	r, _ := realRig(t)
	if out := run(t, "nbdinfo", "--list", "nbd+unix:///?socket="+r.addr); !strings.Contains(out, `export="disk0"`) {
		t.Error(out)
	}
}

func TestNbdcopyBothWays(t *testing.T) {
	r, uri := realRig(t)
	file := filepath.Join(t.TempDir(), "image")
	run(t, "nbdcopy", uri, file)
	got, err := os.ReadFile(file)
	if err != nil || !bytes.Equal(got, r.disks[0].at(0, 4<<20)) {
		t.Fatal("copy out differs", err)
	}
	want := pattern(4<<20, 12)
	if err := os.WriteFile(file, want, 0o600); err != nil {
		t.Fatal(err)
	}
	run(t, "nbdcopy", "--flush", file, uri)
	if !bytes.Equal(want, r.disks[0].at(0, 4<<20)) {
		t.Error("copy in differs")
	}
	if r.disks[0].flushed() == 0 {
		t.Error("no flush reached the device")
	}
}

func TestQemuImg(t *testing.T) {
	r, uri := realRig(t)
	if out := run(t, "qemu-img", "info", uri); !strings.Contains(out, "4 MiB") {
		t.Error(out)
	}
	file := filepath.Join(t.TempDir(), "image")
	run(t, "qemu-img", "convert", "-f", "raw", "-O", "raw", uri, file)
	if got, err := os.ReadFile(file); err != nil || !bytes.Equal(got, r.disks[0].at(0, 4<<20)) {
		t.Error("image differs", err)
	}
	run(t, "qemu-img", "compare", "-f", "raw", "-F", "raw", uri, file)
}

func TestQemuIO(t *testing.T) {
	r, uri := realRig(t)
	out := run(t, "qemu-io", "-f", "raw",
		"-c", "write -P 0xaa 0 64k", "-c", "read -P 0xaa 0 64k",
		"-c", "write -P 0xbb 1000 77", "-c", "read -P 0xbb 1000 77", "-c", "read -P 0xaa 0 1000",
		"-c", "write -f -P 0xcc 128k 1M", "-c", "flush", "-c", "read -P 0xcc 128k 1M",
		"-c", "write -z 192k 64k", "-c", "read -P 0 192k 64k", "-c", "write -z -u 130k 100", "-c", "discard 1M 128k",
		uri)
	if strings.Contains(out, "failed") {
		t.Error(out)
	}
	if !bytes.Equal(r.disks[0].at(1000, 77), bytes.Repeat([]byte{0xbb}, 77)) {
		t.Error("unaligned write is not on the device")
	}
}

func TestFio(t *testing.T) {
	_, uri := realRig(t)
	if !strings.Contains(run(t, "fio", "--enghelp"), "nbd") {
		if os.Getenv("CI") == "true" {
			t.Fatal("fio has no nbd engine")
		}
		t.Skip("fio has no nbd engine")
	}
	run(t, "fio", "--name=v", "--ioengine=nbd", "--uri="+uri, "--rw=randrw", "--bs=4k", "--iodepth=32",
		"--size=4m", "--io_size=8m", "--verify=crc32c", "--verify_state_save=0", "--fsync=64", "--output="+filepath.Join(t.TempDir(), "out"))
}

func TestTCP(t *testing.T) {
	r, _ := realRig(t)
	addr := r.listenOn("tcp", "127.0.0.1:0")
	if out := run(t, "nbdinfo", "--size", "nbd://"+addr+"/disk0"); strings.TrimSpace(out) != "4194304" {
		t.Error(out)
	}
}
