package ctltree

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/logs"
)

func TestLogLevelsAreFiles(t *testing.T) {
	l := logs.New(slog.DiscardHandler, slog.LevelInfo)
	l.Logger("rtrs")
	dir := LogLevels(l, func(_ context.Context, subsystem string, level slog.Level) error { return l.SetLevel(subsystem, level) })
	l.Logger("plugins") // later
	if got := dir.List(); !slices.Equal(got, []string{"plugins", "rtrs"}) {
		t.Errorf("files %q", got)
	}
	if dir.Lookup("all") != nil || dir.Lookup("x") != nil {
		t.Error("a file of a subsystem that is not there")
	}
	f := dir.Lookup("rtrs").(*File)
	if err := f.Store(t.Context(), []byte("debug\n")); err != nil {
		t.Fatal(err)
	}
	if got, err := f.Show(); got != "debug\n" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	for _, bad := range []string{"", "1", "debug info", "DEBUG\n"} {
		if err := f.Store(t.Context(), []byte(bad)); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%q: %v, want EINVAL", bad, err)
		}
	}
	if got := l.Level("plugins"); got != slog.LevelInfo {
		t.Errorf("plugins are at %v", got)
	}
}
