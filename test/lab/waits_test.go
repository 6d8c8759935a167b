package lab

import (
	"strings"
	"testing"
)

// A test that fails shows the threads of a daemon and of its plugins.
func TestWaits(t *testing.T) {
	l := New(t)
	s := l.Server(ServerOptions{SearchPath: l.Image("a.img", 1<<20), Plugins: []string{"fileio"}})
	got := l.waits()
	t.Log(got)
	for _, want := range []string{"rnbd (", "io-fileio (", "S futex"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is missing", want)
		}
	}
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	if got := l.waits(); got != "" {
		t.Errorf("after its end: %s", got)
	}
}
