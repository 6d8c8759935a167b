package faults

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/nbdclient"
)

// Sizes of the device. Each resize is to another one: resizeStep more than the last one
// of its kind. The load is below the smallest.
const (
	resizeSmall = 8 << 20
	resizeLarge = 32 << 20
	resizeStep  = 64 << 10
)

// resizing is a device that is resized while a process of its path is killed.
type resizing struct {
	t      *testing.T
	image  string
	server *lab.Server
	client *lab.Client
	load   *load
	size   int64
	ends   map[int64]byte // what was written to blocks at former ends, by offset
	took   time.Duration  // a resize without a kill
	done   int

	fails   bool        // a smaller device may not be taken
	refused int         // resizes to a smaller device that were not taken
	mayFail atomic.Bool // requests, by EIO
}

// newResizing maps a device by the configuration of a client with sockets that outlive
// it, so that users may come back.
func newResizing(t *testing.T) *resizing {
	t.Helper()
	l := lab.New(t)
	r := &resizing{t: t, size: resizeSmall, ends: map[int64]byte{}, took: enough}
	dir := l.Image("d0.img", resizeSmall)
	r.image = filepath.Join(dir, "d0.img")
	r.server = l.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"}, Extra: []string{"--crash-limit", "1000"}})
	r.client = l.Client(lab.ClientOptions{Held: true, Extra: []string{"--config-dir", keepAll(t, l, r.server, 1)}})
	awaitOpen(t, r.client, 1)
	r.load = startLoad(t, r.client, "d0", loadOptions{workers: 4, blocks: 64, maxBlocks: 8, reconnect: true, allow: func(err error) bool {
		return r.mayFail.Load() && errors.Is(err, syscall.EIO)
	}})
	for range 3 {
		at := time.Now()
		r.begin(r.next(!r.isLarge()))
		for end := at.Add(2 * enough); !r.hasSize() && time.Now().Before(end); { // closer than awaitSize
			time.Sleep(100 * time.Microsecond)
		}
		r.took = min(r.took, time.Since(at))
	}
	r.check()
	return r
}

func (r *resizing) isLarge() bool { return r.size >= resizeLarge }

// next returns another size.
func (r *resizing) next(large bool) int64 {
	r.done++
	size := int64(resizeSmall)
	if large {
		size = resizeLarge
	}
	return size + int64(r.done)*resizeStep
}

// begin resizes the file, and has the server look at it.
func (r *resizing) begin(size int64) {
	r.t.Helper()
	if err := os.Truncate(r.image, size); err != nil {
		r.t.Fatal(err)
	}
	for at := range r.ends {
		if at >= size {
			delete(r.ends, at)
		}
	}
	r.size = size
	api := r.server.API
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), enough)
		defer cancel()
		_, _ = api.ResizeDevice(ctx, &controlpb.DeviceRequest{Device: "d0.img"}) // the server may be killed
	}()
}

// cut resizes, and calls kill a part of the time later that a resize takes.
func (r *resizing) cut(large bool, part float64, kill func()) {
	r.t.Helper()
	r.load.still(func() { r.mayFail.Store(r.fails && !large) })
	r.load.awaitProgress(20)
	r.begin(r.next(large))
	time.Sleep(time.Duration(part * float64(r.took)))
	kill()
}

// clientSize returns the size that the client has, and reports whether the device is open.
func (r *resizing) clientSize() (size int64, open bool) {
	d, err := r.client.Device("d0")
	if err != nil {
		return 0, false
	}
	return int64(d.Limits.GetSize()), d.State == "open"
}

func (r *resizing) hasSize() bool {
	size, open := r.clientSize()
	return open && size == r.size
}

func (r *resizing) awaitSize() {
	r.t.Helper()
	eventually(r.t, 2*enough, "the client has the size of now", r.hasSize)
}

// check judges the device after a resize: its size at all of its places, what was
// written to former ends, its new end, and that nothing is there twice.
func (r *resizing) check() {
	r.t.Helper()
	r.awaitSize()
	var user *nbdclient.Client
	eventually(r.t, 2*enough, "a user sees the size of now", func() bool {
		c, err := dialDevice(r.client, "d0")
		if err != nil {
			return false
		}
		if c.Size() != r.size {
			c.Close()
			return false
		}
		user = c
		return true
	})
	defer user.Close()
	for at, fill := range r.ends {
		r.want(user, at, fill)
	}
	end := r.size - loadBlock
	r.want(user, end, r.ends[end]) // 0: the file grew
	fill := byte(r.done%255 + 1)
	if _, err := user.WriteAt(bytes.Repeat([]byte{fill}, loadBlock), end); err != nil {
		r.t.Errorf("write to the last block: %v", err)
	}
	if _, err := user.WriteAt(make([]byte, loadBlock), r.size); err == nil {
		r.t.Error("a write behind the end succeeds")
	}
	r.ends[end] = fill
	r.want(user, end, fill)
	if st, err := os.Stat(r.image); err != nil || st.Size() != r.size {
		r.t.Errorf("the file has %v, %v; want %d bytes", st, err, r.size)
	}
	r.checkRest()
}

func (r *resizing) want(user *nbdclient.Client, at int64, fill byte) {
	r.t.Helper()
	got := make([]byte, loadBlock)
	if _, err := user.ReadAt(got, at); err != nil || !bytes.Equal(got, bytes.Repeat([]byte{fill}, loadBlock)) {
		r.t.Errorf("block at %d of %d: %#x, %v; want %#x", at, r.size, got[0], err, fill)
	}
}

// checkRest waits until there is one device in one session, at both ends, and one
// process of each plugin.
func (r *resizing) checkRest() {
	r.t.Helper()
	all := &controlpb.ListRequest{}
	eventually(r.t, 2*enough, "nothing is there twice", func() bool {
		mapped, err1 := r.client.API.ListDevices(r.t.Context(), all)
		open, err2 := r.server.API.ListDevices(r.t.Context(), all)
		out, err3 := r.client.API.ListSessions(r.t.Context(), all)
		in, err4 := r.server.API.ListSessions(r.t.Context(), all)
		return errors.Join(err1, err2, err3, err4) == nil && len(mapped.Devices) == 1 && len(out.Sessions) == 1 && len(in.Sessions) == 1 &&
			len(open.Devices) == 1 && len(open.Devices[0].Users) == 1 && open.Devices[0].GetLimits().GetSize() == uint64(r.size)
	})
}

// TestAResizeThatIsCut kills each process between a file and its users at many points of
// a resize, larger and smaller. The device is back with the size that the file has by
// then, and with all that was written, and nothing else is left. Users that can go on
// see no error.
func TestAResizeThatIsCut(t *testing.T) {
	for _, v := range []struct {
		name  string
		kills int // of each direction, in the short form
		fails bool
		kill  func(r *resizing) // returns when the next process serves
	}{
		{"client", 5, false, func(r *resizing) {
			r.must(r.client.Kill())
			r.must(r.client.Start())
		}},
		{"front end", 2, false, func(r *resizing) { awaitFrontend(r.t, r.client, killFrontend(r.t, r.client)) }},
		{"server", 5, true, killServerInResize},
		{"storage plugin", 3, true, killStorageInResize},
	} {
		t.Run(v.name, func(t *testing.T) {
			r := newResizing(t)
			r.fails = v.fails
			kills := pick(v.kills, 60)
			for i := range 2 * kills {
				r.cut(i%2 == 0, 2*float64(i/2)/float64(kills), func() { v.kill(r) })
				r.check()
				if t.Failed() {
					t.Fatalf("after kill %d", i)
				}
			}
			r.load.stop()
			t.Logf("%d kills within twice %v, the time of a resize; %d devices were not taken smaller; %d requests",
				2*kills, r.took.Round(10*time.Microsecond), r.refused, r.load.ops.Load())
		})
	}
}

func (r *resizing) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

// killServerInResize kills the server and starts the next one. A client that has not
// learned of a smaller size does not take it by itself, since it has requests that wait.
func killServerInResize(r *resizing) {
	r.t.Helper()
	r.must(r.server.Kill())
	before, _ := r.clientSize()
	r.must(r.server.Start())
	if before <= r.size {
		return // larger, or the client knows
	}
	refused := false
	eventually(r.t, 2*enough, "the client refuses the smaller device, or had still learned of it", func() bool {
		d, err := r.client.Device("d0")
		refused = err == nil && d.State == "closed" && strings.Contains(d.LastError, "shrank")
		return refused || r.hasSize()
	})
	if !refused {
		return
	}
	r.refused++
	_, err := r.client.API.Remap(r.t.Context(), &controlpb.RemapRequest{Device: "d0"})
	r.must(err)
}

// killStorageInResize kills the storage plugin, and waits for the next one. A server that
// has not learned of a smaller size gives the device up, for the same reason. Unmapped
// and mapped, it is there again.
func killStorageInResize(r *resizing) {
	r.t.Helper()
	pid := killPlugin(r.t, r.server, "fileio")
	failed := false
	eventually(r.t, 2*enough, "the next storage plugin has the device", func() bool {
		p, err := r.server.Plugin("fileio")
		if err != nil || p.Pid == 0 || int(p.Pid) == pid {
			return false
		}
		l, err := r.server.API.ListDevices(r.t.Context(), &controlpb.ListRequest{})
		if err != nil || len(l.Devices) != 1 {
			return false
		}
		failed = l.Devices[0].State == "failed: smaller than before its plugin died"
		return failed || l.Devices[0].State == "open"
	})
	if !failed {
		return
	}
	r.refused++
	r.must(r.client.Unmap("d0", true))
	_, err := r.client.API.Reload(r.t.Context(), &controlpb.ReloadRequest{})
	r.must(err)
}
