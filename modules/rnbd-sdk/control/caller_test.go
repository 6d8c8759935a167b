package control_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/audit"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// serveAudited serves a daemon that records calls until stop, on a listener.
func serveAudited(t *testing.T, l net.Listener, file string) (stop func()) {
	t.Helper()
	log, err := audit.Open(file, "client", audit.Continue, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	s := control.NewServer(control.AuditCalls(log))
	controlpb.RegisterClientDaemonServer(s, daemon{})
	go s.Serve(l)
	return func() {
		s.Stop()
		if err := log.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestCallsAreRecordedWithTheirCaller(t *testing.T) {
	dir := t.TempDir()
	socket, file := filepath.Join(dir, "d", "client.sock"), filepath.Join(dir, "audit.log")
	l, err := control.Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	stop := serveAudited(t, l, file)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	c, conn, err := control.DialClient(ctx, socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, _ = c.Unmap(ctx, &controlpb.UnmapRequest{Device: "busy"})
	_, _ = c.Unmap(ctx, &controlpb.UnmapRequest{Device: strings.Repeat("x", 5000)})
	_, _ = c.ListDevices(ctx, &controlpb.ListRequest{})
	_, _ = c.SetLogLevels(ctx, &controlpb.SetLogLevelsRequest{})
	stop()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var records []audit.Record
	for line := range strings.Lines(string(text)) {
		var r audit.Record
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatal(err)
		}
		records = append(records, r)
	}
	if len(records) != 2 {
		t.Fatalf("%d records, want those of the calls that change something: %s", len(records), text)
	}
	r := records[0]
	if r.Call != "Unmap" || !strings.Contains(r.Args, "busy") || !strings.Contains(r.Result, "2 connections are open") || r.UID == nil || *r.UID != os.Getuid() || *r.PID != os.Getpid() {
		t.Errorf("got %s", text)
	}
	if n := len(records[1].Args); n > 1024 {
		t.Errorf("%d bytes of arguments", n)
	}
}
