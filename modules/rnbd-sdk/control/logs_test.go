package control

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/logs"
)

func TestLogControl(t *testing.T) {
	l := logs.New(slog.DiscardHandler, slog.LevelInfo)
	l.Logger("rtrs")
	l.Logger("client")
	l.Logger("plugins")
	var told []slog.Level
	logControl := LogControl{Logs: l, Plugins: func(_ context.Context, level slog.Level) { told = append(told, level) }}
	text := func() (s string) {
		r, err := logControl.Levels()
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range r.Levels {
			s += v.Subsystem + "=" + v.Level + " "
		}
		return s
	}
	level := func(subsystem, level string) *controlpb.LogLevel {
		return &controlpb.LogLevel{Subsystem: subsystem, Level: level}
	}
	for _, c := range []struct {
		name string
		set  []*controlpb.LogLevel
		err  error
		want string
	}{
		{"nothing", nil, nil, "client=info plugins=info rtrs=info "},
		{"one", []*controlpb.LogLevel{level("rtrs", "debug")}, nil, "client=info plugins=info rtrs=debug "},
		{"a level that is not there changes nothing", []*controlpb.LogLevel{level("all", "warn"), level("rtrs", "loud")}, syscall.EINVAL, "client=info plugins=info rtrs=debug "},
		{"a subsystem that is not there changes nothing", []*controlpb.LogLevel{level("all", "warn"), level("rdma", "warn")}, syscall.ENOENT, "client=info plugins=info rtrs=debug "},
		{"all and one", []*controlpb.LogLevel{level("all", "warn"), level("rtrs", "error")}, nil, "client=warn plugins=warn rtrs=error "},
	} {
		if _, err := logControl.Set(t.Context(), c.set); !errors.Is(err, c.err) {
			t.Errorf("%s: %v", c.name, err)
		}
		if got := text(); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
	if err := logControl.SetOne(t.Context(), "plugins", slog.LevelError); err != nil {
		t.Error(err)
	}
	if !slices.Equal(told, []slog.Level{slog.LevelWarn, slog.LevelError}) {
		t.Errorf("plugins were told %v", told)
	}
	if _, err := (LogControl{}).Levels(); !errors.Is(err, syscall.EOPNOTSUPP) {
		t.Errorf("levels of a daemon without: %v", err)
	}
	if _, err := (LogControl{}).Set(t.Context(), nil); !errors.Is(err, syscall.EOPNOTSUPP) {
		t.Errorf("set of a daemon without: %v", err)
	}
}

func TestLogCalls(t *testing.T) {
	var out bytes.Buffer
	l := logs.New(slog.NewTextHandler(&out, logs.Everything), slog.LevelInfo)
	call := LogCalls(l.Logger("control"))
	run := func() {
		_, err := call(context.Background(), nil, &grpc.UnaryServerInfo{FullMethod: "/rnbd.control.v1.X/Map"},
			func(context.Context, any) (any, error) { return nil, syscall.EBUSY })
		if err != syscall.EBUSY {
			t.Errorf("the error became %v", err)
		}
	}
	if run(); out.Len() > 0 {
		t.Errorf("at level info: %s", out.String())
	}
	if err := l.SetLevel("control", slog.LevelDebug); err != nil {
		t.Fatal(err)
	}
	if run(); !strings.Contains(out.String(), "call=Map ") || !strings.Contains(out.String(), "busy") {
		t.Errorf("at level debug: %s", out.String())
	}
}
