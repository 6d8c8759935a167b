package control

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/logs"
)

func TestSetLogLevels(t *testing.T) {
	l := logs.New(slog.DiscardHandler, slog.LevelInfo)
	l.Logger("rtrs")
	l.Logger("client")
	text := func() (s string) {
		for _, v := range LogLevels(l).Levels {
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
		{"nothing", nil, nil, "client=info rtrs=info "},
		{"one", []*controlpb.LogLevel{level("rtrs", "debug")}, nil, "client=info rtrs=debug "},
		{"a level that is not there changes nothing", []*controlpb.LogLevel{level("all", "warn"), level("rtrs", "loud")}, syscall.EINVAL, "client=info rtrs=debug "},
		{"a subsystem that is not there changes nothing", []*controlpb.LogLevel{level("all", "warn"), level("rdma", "warn")}, syscall.ENOENT, "client=info rtrs=debug "},
		{"all and one", []*controlpb.LogLevel{level("all", "warn"), level("rtrs", "error")}, nil, "client=warn rtrs=error "},
	} {
		if err := SetLogLevels(l, c.set); !errors.Is(err, c.err) {
			t.Errorf("%s: %v", c.name, err)
		}
		if got := text(); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
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
