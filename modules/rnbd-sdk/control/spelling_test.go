package control_test

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

const foreign = "s\xff\x1b\n" + `\x41`

// foreignDaemon has names of any bytes. It has no device of another name.
type foreignDaemon struct {
	controlpb.UnimplementedClientDaemonServer
	list *controlpb.ClientDeviceList
}

func (d foreignDaemon) ListDevices(context.Context, *controlpb.ListRequest) (*controlpb.ClientDeviceList, error) {
	return d.list, nil
}

func (foreignDaemon) Unmap(_ context.Context, r *controlpb.UnmapRequest) (*controlpb.Empty, error) {
	if r.Device != foreign {
		return nil, fmt.Errorf("no device \x1b%s: %w", r.Device, syscall.ENOENT)
	}
	return &controlpb.Empty{}, nil
}

func (foreignDaemon) Map(_ context.Context, r *controlpb.MapRequest) (*controlpb.ClientDevice, error) {
	return &controlpb.ClientDevice{Path: r.Path, LastError: "a\\b\x1b", Options: r.Options}, nil
}

// Names pass the edge of a daemon spelled, in replies, requests and errors, and the
// daemon's own messages stay as they are.
func TestNamesAreSpelledAtTheEdge(t *testing.T) {
	d := foreignDaemon{list: &controlpb.ClientDeviceList{Devices: []*controlpb.ClientDevice{
		{Name: foreign, Hung: []*controlpb.HungRequests{{Session: foreign}}, Options: map[string]string{"export": foreign}, LastError: `"s\xff" has gone`},
	}}}
	before := proto.Clone(d.list)
	path := filepath.Join(t.TempDir(), "client.sock")
	l, err := control.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	s := control.NewServer()
	controlpb.RegisterClientDaemonServer(s, d)
	go s.Serve(l)
	t.Cleanup(s.Stop)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	c, conn, err := control.DialClient(ctx, path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })

	const spelled = `s\xff\x1b\x0a\\x41`
	list, err := c.ListDevices(ctx, &controlpb.ListRequest{})
	if err != nil {
		t.Fatal(err)
	}
	one := list.Devices[0]
	if one.Name != spelled || one.Hung[0].Session != spelled || one.Options["export"] != spelled || one.LastError != `"s\xff" has gone` {
		t.Errorf("the list has %v", one)
	}
	if !proto.Equal(d.list, before) {
		t.Error("the daemon's own message has changed")
	}
	for _, name := range []string{spelled, foreign[:4] + `\\x41`} {
		if _, err := c.Unmap(ctx, &controlpb.UnmapRequest{Device: name}); err != nil {
			t.Errorf("%q is not taken back: %v", name, err)
		}
	}
	_, err = c.Unmap(ctx, &controlpb.UnmapRequest{Device: `other\xff`})
	if err == nil || !utf8.ValidString(err.Error()) || !strings.HasPrefix(err.Error(), `no device \x1bother\xff`) {
		t.Errorf("the error is %q", err)
	}
	dev, err := c.Map(ctx, &controlpb.MapRequest{Path: "caf\xe9", Options: map[string]string{"export": "\xff"}})
	if err != nil || dev.Path != `caf\xe9` || dev.Options["export"] != `\xff` || dev.LastError != `a\b\x1b` {
		t.Errorf("mapped as %v, %v", dev, err)
	}
	view := control.ViewClient(d)
	if list, err = view.ListDevices(ctx, &controlpb.ListRequest{}); err != nil || list.Devices[0].Name != spelled {
		t.Errorf("a caller in the process sees %v, %v", list, err)
	}
}
