package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/plugintest"
)

func TestMain(m *testing.M) { plugintest.Main(m, main) }

func TestConformance(t *testing.T) {
	for name, change := range map[string]func(*server){
		"structured replies":           func(*server) {},
		"replies in pieces":            func(s *server) { s.pieces = true },
		"simple replies":               func(s *server) { s.structured = false },
		"one connection":               func(s *server) { s.flags &^= 1 << 8 },
		"blocks of 4096 bytes":         func(s *server) { s.blocks = [3]uint32{4096, 65536, 1 << 20} },
		"a server that offers nothing": func(s *server) { s.flags = 1 },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newServer(8 << 20)
			change(s)
			plugintest.RunIO(t, newBackend(), plugintest.Options{Configure: map[string]string{"uri": s.serve(t).uri()}})
		})
	}
}

// program returns the path of a program that Debian has, or skips the test.
func program(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("%s is not installed", name)
	}
	return path
}

// TestConformance_Captive runs the suite on nbdkit, and kills the process.
func TestConformance_Captive(t *testing.T) {
	program(t, "nbdkit")
	image := filepath.Join(t.TempDir(), "image")
	if err := os.WriteFile(image, make([]byte, 8<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	plugintest.RunIO(t, nil, plugintest.Options{Executable: self, Configure: map[string]string{
		"run": "nbdkit file " + image, "lock": image, "keeps": "acknowledged",
	}})
}
