package loopdev

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestMain makes the test program its own tool.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == Argument {
		Main(os.Args[2:])
	}
	os.Exit(m.Run())
}

var tool = Tool{"/proc/self/exe", Argument}

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// loopOn makes a loop device of a new file of 1 MiB.
func loopOn(t *testing.T, d Device) (node, file string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("loop devices need root")
	}
	if _, err := os.Stat(controlNode); err != nil {
		t.Skip("no loop devices here: ", err)
	}
	d.File = filepath.Join(t.TempDir(), "disk")
	if err := os.WriteFile(d.File, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	node, err := tool.Attach(testContext(t), d)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tool.Detach(context.Background(), d.File, true) })
	return node, d.File
}

func sysfs(t *testing.T, node, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(sysBlock, filepath.Base(node), name))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(text))
}

func TestAttach(t *testing.T) {
	node, file := loopOn(t, Device{BlockSize: 4096})
	if got := Of(file); !slices.Equal(got, []string{node}) {
		t.Errorf("devices of the file: %q, want %s", got, node)
	}
	for name, want := range map[string]string{"queue/logical_block_size": "4096", "ro": "0", "loop/autoclear": "0", "size": "2048"} {
		if got := sysfs(t, node, name); got != want {
			t.Errorf("%s is %s, want %s", name, got, want)
		}
	}
}

func TestAttach_ReadOnly(t *testing.T) {
	node, _ := loopOn(t, Device{BlockSize: 512, ReadOnly: true})
	if got := sysfs(t, node, "ro"); got != "1" {
		t.Errorf("ro is %s", got)
	}
}

func TestDetach_IsRefusedWhileTheDeviceIsOpen(t *testing.T) {
	node, file := loopOn(t, Device{BlockSize: 512})
	user, err := os.Open(node)
	if err != nil {
		t.Fatal(err)
	}
	if err := tool.Detach(testContext(t), file, false); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("detach of an open device: %v", err)
	}
	if len(Of(file)) != 1 || sysfs(t, node, "loop/autoclear") != "0" {
		t.Error("a refused detach has changed the device")
	}
	user.Close()
	for range 2 { // nothing is left for the second one
		if err := tool.Detach(testContext(t), file, false); err != nil {
			t.Error(err)
		}
	}
	if got := Of(file); len(got) != 0 {
		t.Errorf("devices after the detach: %q", got)
	}
}

func TestDetach_ByForceEndsWithTheLastUser(t *testing.T) {
	node, file := loopOn(t, Device{BlockSize: 512})
	user, err := os.Open(node)
	if err != nil {
		t.Fatal(err)
	}
	if err := tool.Detach(testContext(t), file, true); err != nil {
		t.Error(err)
	}
	if len(Of(file)) != 1 {
		t.Error("the device of a user is gone")
	}
	user.Close()
	for end := time.Now().Add(10 * time.Second); len(Of(file)) != 0; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the device stays after its last user")
		}
	}
}

func TestResize(t *testing.T) {
	node, file := loopOn(t, Device{BlockSize: 512})
	if err := os.Truncate(file, 2<<20); err != nil {
		t.Fatal(err)
	}
	if err := tool.Resize(testContext(t), file, 2<<20); err != nil {
		t.Fatal(err)
	}
	if got := sysfs(t, node, "size"); got != "4096" {
		t.Errorf("size is %s sectors", got)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := tool.Resize(ctx, file, 3<<20); err == nil {
		t.Error("a size that the file does not have")
	}
}

func TestErrors(t *testing.T) {
	if _, err := tool.Attach(testContext(t), Device{File: filepath.Join(t.TempDir(), "none")}); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("a file that is not there: %v", err)
	}
	if _, err := (Tool)(nil).Attach(testContext(t), Device{}); !errors.Is(err, syscall.ENODEV) {
		t.Errorf("no tool: %v", err)
	}
	if _, err := (Tool{"/bin/false"}).Attach(testContext(t), Device{}); err == nil {
		t.Error("a tool that says nothing")
	}
	for _, args := range [][]string{nil, {"{"}, {`{"Do":"other"}`}} {
		if _, err := do(testContext(t), args); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("arguments %q: %v", args, err)
		}
	}
}

func TestOf_ReadsTheKernelsFiles(t *testing.T) {
	sys := t.TempDir()
	for name, file := range map[string]string{"loop0": "/a\n", "loop1": "/b\n", "loop12": "/a\n"} {
		dir := filepath.Join(sys, name, "loop")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "backing_file"), []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got := nodesOf(sys, "/a"); !slices.Equal(got, []string{"/dev/loop0", "/dev/loop12"}) {
		t.Errorf("devices %q", got)
	}
}
