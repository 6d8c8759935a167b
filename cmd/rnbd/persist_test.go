package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// readClient reads a configuration as the client does.
func readClient(t *testing.T, path string) (*clientOptions, error) {
	t.Helper()
	cmd, o := clientRun()
	if err := cmd.ParseFlags([]string{"--config", path, "--config-dir", configNone}); err != nil {
		t.Fatal(err)
	}
	return o, o.load(cmd)
}

// persistReadOnly writes down a mapping that is read-only.
func persistReadOnly(file string) error {
	dev := mappedDevice(&controlpb.ClientDevice{Name: "rnbd0", Path: "disk.img", Session: "s1", AccessMode: "ro"}, "")
	return persist(file, &inventory{}, dev, &controlpb.MapRequest{Paths: []string{"10.0.0.1", "10.1.0.1"}, Session: "s1", Loss: "queue:30s"})
}

// A file of map --persist that was cut anywhere is refused with the reason, or it
// asks for nothing: half of it would be a mapping with other rights.
func TestAPersistedMappingThatIsCut(t *testing.T) {
	file := filepath.Join(t.TempDir(), "rnbd0.yaml")
	if err := persistReadOnly(file); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	refused := 0
	for n := range whole[:len(whole)-1] { // the last byte is the end of the last line
		if err := os.WriteFile(file, whole[:n], 0o600); err != nil {
			t.Fatal(err)
		}
		o, err := readClient(t, file)
		switch {
		case err == nil && len(o.Mappings) > 0:
			t.Errorf("%d bytes are read as %+v", n, o.Mappings)
		case err != nil && (exitCode(err) != exitUsage || !strings.Contains(err.Error(), file+": the file is cut") || !strings.Contains(err.Error(), `"# end", is missing`)):
			t.Errorf("%d bytes: %v", n, err)
		case err != nil:
			refused++
		}
	}
	if refused < len(whole)/2 {
		t.Errorf("%d of %d cut files are refused", refused, len(whole))
	}
	for _, text := range []string{string(whole), strings.TrimSpace(string(whole)), string(whole) + "\n\n"} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if o, err := readClient(t, file); err != nil || len(o.Mappings) != 1 || o.Mappings[0].Access != "ro" {
			t.Errorf("the whole file: %v, %+v", err, o.Mappings)
		}
	}
}

// Files of the administrator that end anywhere are read as far as they go, or
// refused with their name.
func TestConfigurationsThatEndAnywhere(t *testing.T) {
	client := "policy: round-robin\nmappings:\n  - device: vg0/db\n    server: [10.0.0.1, 10.1.0.1]\n    name: db\n    access: ro\n    loss: queue:5m\n"
	server := "search-path: /srv\nlisten: [\"127.0.0.1:1\"]\nlimit:\n  - sessions=64\naccess:\n  - identity: [\"psk:a\"]\n    device: [\"db/**\"]\n    allow: rw\n    iops: 200\n"
	path := filepath.Join(t.TempDir(), "client.yaml")
	for n := range client {
		if err := os.WriteFile(path, []byte(client[:n]), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := readClient(t, path); err != nil && (exitCode(err) != exitUsage || !strings.Contains(err.Error(), path)) {
			t.Errorf("%d bytes of the client's: %v", n, err)
		}
	}
	for n := range server {
		if _, err := readServer(t, server[:n]); err != nil && (exitCode(err) != exitUsage || !strings.Contains(err.Error(), "server.yaml")) {
			t.Errorf("%d bytes of the server's: %v", n, err)
		}
	}
}

// A disk that is full leaves what was written down before.
func TestPersistOnAFullDisk(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, for a small file system")
	}
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=16k"); err != nil {
		t.Skipf("no file system of its own: %v", err)
	}
	defer syscall.Unmount(dir, 0)
	file := filepath.Join(dir, "rnbd0.yaml")
	if err := persistReadOnly(file); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "filler"), make([]byte, 1<<20), 0o600); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("the disk is not full: %v", err)
	}
	err = persistReadOnly(file)
	if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "rnbd0 is mapped, and is not written down") || hintOf(err) == "" {
		t.Errorf("got %v", err)
	}
	if now, err := os.ReadFile(file); err != nil || string(now) != string(before) {
		t.Errorf("the file has %q, %v", now, err)
	}
	if left, _ := filepath.Glob(file + ".*"); len(left) > 0 {
		t.Errorf("half a file is left: %q", left)
	}
}
