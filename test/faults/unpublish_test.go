package faults

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/nbdclient"
)

// nodes are a server with a pool, and two clients with certificates of their own.
type nodes struct {
	t      *testing.T
	server *lab.Server
	api    controlpb.ServerDaemonClient
	first  *lab.Client // the identity cn:first
	second *lab.Client // the identity cn:second
}

func newNodes(t *testing.T) *nodes {
	t.Helper()
	l := lab.New(t)
	ca, err := lab.NewAuthority(t.TempDir(), "example")
	if err != nil {
		t.Fatal(err)
	}
	flags := func(name string) []string {
		cert, key, err := ca.Issue(name, nil)
		if err != nil {
			t.Fatal(err)
		}
		return []string{"--tls", "require", "--tls-ca", ca.CA(), "--tls-cert", cert, "--tls-key", key}
	}
	pool, config := filepath.Join(l.Dir, "pool"), filepath.Join(l.Dir, "pools.yaml")
	if err := os.Mkdir(pool, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(config, []byte("pools:\n  - {name: fast, kind: files, path: "+pool+"}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	n := &nodes{t: t, server: l.Server(lab.ServerOptions{Plugins: []string{"fileio"}, Extra: append(flags("server"), "--config", config)})}
	n.first, n.second = l.Client(lab.ClientOptions{Extra: flags("first")}), l.Client(lab.ClientOptions{Extra: flags("second")})
	api, conn, err := control.DialServer(t.Context(), n.server.Socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	n.api = api
	if _, err := api.InitPool(t.Context(), &controlpb.PoolRequest{Pool: "fast"}); err != nil {
		t.Fatal(err)
	}
	return n
}

// Sizes of a volume, and the time in which Unpublish has to return.
const (
	unpublishedSize = 1 << 20
	unpublishTime   = 15 * time.Second
)

// TestUnpublishFences: a client stops with writes in flight, its volume is unpublished and
// written by another client, and the first one wakes up. None of its writes lands.
func TestUnpublishFences(t *testing.T) {
	n := newNodes(t)
	runs := 20
	if long() {
		runs = 200
	}
	var longest time.Duration
	for run := range runs {
		longest = max(longest, n.fence(fmt.Sprint("v", run)))
	}
	t.Logf("%d runs, the longest Unpublish took %v", runs, longest)
}

// fence makes one run with a volume of its own, and returns how long Unpublish took.
func (n *nodes) fence(name string) time.Duration {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), enough)
	defer cancel()
	must := func(_ any, err error) {
		n.t.Helper()
		if err != nil {
			n.t.Fatalf("%s: %v", name, err)
		}
	}
	must(n.api.CreateVolume(ctx, &controlpb.CreateVolumeRequest{Pool: "fast", Name: name, Size: unpublishedSize, Private: true}))
	publish := func(identity string) {
		n.t.Helper()
		must(n.api.PublishVolume(ctx, &controlpb.PublishVolumeRequest{Pool: "fast", Name: name, Identity: identity, Access: "rw"}))
	}
	publish("cn:first")
	lost, err := n.first.Map("fast/"+name, n.server)
	must(nil, err)
	awaitEnd := n.writeUntilItFails(n.first, lost.Name)
	must(nil, n.first.Signal(syscall.SIGSTOP))
	began := time.Now()
	limited, stop := context.WithTimeout(ctx, unpublishTime)
	_, err = n.api.UnpublishVolume(limited, &controlpb.UnpublishVolumeRequest{Pool: "fast", Name: name, Identity: "cn:first"})
	took := time.Since(began)
	stop()
	must(nil, err)

	publish("cn:second")
	dev, err := n.second.Map("fast/"+name, n.server)
	must(nil, err)
	user, err := nbdclient.Dial(ctx, "unix", n.second.NBD, nbdclient.Options{Export: dev.Name})
	must(nil, err)
	defer user.Close()
	want := bytes.Repeat([]byte{'2'}, unpublishedSize)
	must(user.WriteAt(want, 0))
	must(nil, n.first.Signal(syscall.SIGCONT))
	awaitEnd()
	got := make([]byte, unpublishedSize)
	must(user.ReadAt(got, 0))
	if !bytes.Equal(got, want) {
		n.t.Fatalf("%s: a write of the first client landed at byte %d", name, bytes.IndexByte(got, '1'))
	}
	must(nil, user.Close())
	must(nil, n.second.Unmap(dev.Name, true))
	must(nil, n.first.Unmap(lost.Name, true))
	must(n.api.DeleteVolume(ctx, &controlpb.DeleteVolumeRequest{Pool: "fast", Name: name}))
	return took
}

// writeUntilItFails has many writes in flight from when it returns on. The function that it
// returns waits until they have failed.
func (n *nodes) writeUntilItFails(c *lab.Client, device string) (awaitEnd func()) {
	n.t.Helper()
	const writers = 8
	var done sync.WaitGroup
	var written atomic.Int64
	for i := range writers {
		user, err := nbdclient.Dial(n.t.Context(), "unix", c.NBD, nbdclient.Options{Export: device})
		if err != nil {
			n.t.Fatal(err)
		}
		done.Go(func() {
			defer user.Close()
			data := bytes.Repeat([]byte{'1'}, unpublishedSize/writers)
			for {
				if _, err := user.WriteAt(data, int64(i)*unpublishedSize/writers); err != nil {
					return
				}
				written.Add(1)
			}
		})
	}
	for written.Load() < writers && n.t.Context().Err() == nil {
		time.Sleep(time.Millisecond)
	}
	return done.Wait
}
