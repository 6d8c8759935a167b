package main

import (
	"os"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/plugincheck"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/plugintest"
)

func TestMain(m *testing.M) { plugintest.Main(m, main) }

func newBackend() *backend {
	return &backend{size: 8 << 20, disks: map[string]disk{}}
}

func TestConformance(t *testing.T) {
	plugintest.RunIO(t, newBackend(), plugintest.Options{})
}

func TestConformance_RingWatchedByRaceDetector(t *testing.T) {
	plugintest.RunIO(t, newBackend(), plugintest.Options{HeapRing: true})
}

func TestConformance_AsProcess(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	plugintest.RunIO(t, nil, plugintest.Options{Executable: exe, Configure: map[string]string{"size": "0x800000"}})
}

func TestChecks(t *testing.T) {
	plugintest.RunChecks(t, plugincheck.Options{Backend: newBackend(), HeapRing: true, Quick: true})
}
