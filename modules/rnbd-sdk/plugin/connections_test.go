package plugin

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/pluginpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sockpair"
)

// movingFront gives its connections up, and serves those of another one by a greeting
// that has their state.
type movingFront struct {
	*testFront
	has     []Connection
	adopted []Connection
	closed  int
}

func (f *movingFront) ReleaseConnections(ctx context.Context) ([]Connection, int, error) {
	if f.closed < 0 {
		<-ctx.Done()
		return nil, 0, fmt.Errorf("a request hangs: %w", blk.EBUSY)
	}
	all := f.has
	f.has = nil
	return all, f.closed, nil
}

func (f *movingFront) AdoptConnections(_ context.Context, all []Connection) error {
	if len(all) > 0 && all[0].Device == "bad" {
		CloseConnections(all)
		return fmt.Errorf("no such device: %w", blk.ENODEV)
	}
	f.adopted = append(f.adopted, all...)
	return nil
}

func (f *movingFront) ServeConnections(context.Context) error {
	for i := range f.adopted {
		c := &f.adopted[i]
		if _, err := unix.Write(c.FDs[0], append([]byte(c.Device+" "), c.State...)); err != nil {
			return err
		}
		c.Close()
	}
	f.adopted = nil
	return nil
}

// userT returns a connection, and the user's end.
func userT(t *testing.T, device, state string, more int) (Connection, net.Conn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	user, err := sockpair.Conn(os.NewFile(uintptr(fds[1]), "user"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { user.Close() })
	user.SetDeadline(time.Now().Add(time.Minute))
	c := Connection{Device: device, State: []byte(state), FDs: []int{fds[0]}}
	for range more {
		fd, err := unix.FcntlInt(uintptr(fds[0]), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		c.FDs = append(c.FDs, fd)
	}
	return c, user
}

// Connections go from one process to another through the host.
func TestConnections_FromOneToTheOther(t *testing.T) {
	ctx := testContext(t)
	from, to := &movingFront{testFront: newTestFront(), closed: 3}, &movingFront{testFront: newTestFront()}
	a, b := attachT(t, inProcessT(t, from)), attachT(t, inProcessT(t, to))
	const many = 300 // more than the socket between them holds
	var users []net.Conn
	for i := range many {
		c, user := userT(t, fmt.Sprint("disk", i), fmt.Sprint("state", i), i%maxFDs)
		from.has, users = append(from.has, c), append(users, user)
	}
	all, closed, err := a.ReleaseConnections(ctx, time.Second)
	if err != nil || len(all) != many || closed != 3 {
		t.Fatalf("%d connections, %d closed, error %v", len(all), closed, err)
	}
	if err := b.AdoptConnections(ctx, all); err != nil {
		t.Fatal(err)
	}
	CloseConnections(all)
	if err := b.ServeConnections(ctx); err != nil {
		t.Fatal(err)
	}
	for i, u := range users {
		if text, err := io.ReadAll(u); err != nil || string(text) != fmt.Sprintf("disk%d state%d", i, i) {
			t.Fatalf("user %d: %q, %v", i, text, err)
		}
	}
}

// The host keeps what a plugin refuses, or gives to no process.
func TestConnections_Refused(t *testing.T) {
	ctx := testContext(t)
	f := &movingFront{testFront: newTestFront(), closed: -1}
	r := attachT(t, inProcessT(t, f))
	if _, _, err := r.ReleaseConnections(ctx, 10*time.Millisecond); blk.ToErrno(err) != blk.EBUSY {
		t.Errorf("requests that hang: %v", err)
	}
	c, user := userT(t, "bad", "", 0)
	if err := r.AdoptConnections(ctx, []Connection{c}); blk.ToErrno(err) != blk.ENODEV {
		t.Errorf("a device that is not there: %v", err)
	}
	if _, err := unix.Write(c.FDs[0], []byte("x")); err != nil {
		t.Errorf("the host's descriptor: %v", err)
	}
	c.Close()
	if text, err := io.ReadAll(user); err != nil || string(text) != "x" {
		t.Errorf("%q, %v", text, err)
	}
	old := attachT(t, inProcessT(t, newTestFront()))
	if _, _, err := old.ReleaseConnections(ctx, time.Second); blk.ToErrno(err) != blk.EOPNOTSUPP {
		t.Errorf("a plugin that cannot: %v", err)
	}
	if err := old.AdoptConnections(ctx, nil); blk.ToErrno(err) != blk.EOPNOTSUPP {
		t.Errorf("a plugin that cannot: %v", err)
	}
}

// A peer that lies is refused, and its descriptors are closed.
func TestConnections_Lies(t *testing.T) {
	ctx := testContext(t)
	f := &movingFront{testFront: newTestFront()}
	r := attachT(t, inProcessT(t, f))
	announce := func(n uint32, send func(*net.UnixConn)) error {
		ours, theirs, err := socketPair()
		if err != nil {
			t.Fatal(err)
		}
		defer ours.Close()
		token, err := r.sendFile(theirs)
		theirs.Close()
		if err != nil {
			t.Fatal(err)
		}
		send(ours)
		ours.CloseWrite()
		_, err = r.front.AdoptConnections(ctx, &pluginpb.AdoptConnectionsRequest{Token: token, Connections: n})
		return err
	}
	msg, err := proto.Marshal(&pluginpb.Connection{Device: "disk"})
	if err != nil {
		t.Fatal(err)
	}
	sound := func(to *net.UnixConn, fds ...int) { to.WriteMsgUnix(msg, unix.UnixRights(fds...), nil) }
	for name, v := range map[string]struct {
		n    uint32
		send func(to *net.UnixConn, fd int)
	}{
		"less than announced": {2, func(to *net.UnixConn, fd int) { sound(to, fd) }},
		"more than announced": {1, func(to *net.UnixConn, fd int) { sound(to, fd); sound(to, fd) }},
		"no descriptor":       {1, func(to *net.UnixConn, _ int) { to.Write(msg) }},
		"many descriptors":    {1, func(to *net.UnixConn, fd int) { sound(to, fd, fd, fd, fd, fd) }},
		"no message":          {1, func(to *net.UnixConn, fd int) { to.WriteMsgUnix([]byte{0xff}, unix.UnixRights(fd), nil) }},
		"a long message": {1, func(to *net.UnixConn, fd int) {
			to.WriteMsgUnix(slices.Concat(msg, make([]byte, maxConnection)), unix.UnixRights(fd), nil)
		}},
	} {
		c, user := userT(t, "disk", "", 0)
		if err := announce(v.n, func(to *net.UnixConn) { v.send(to, c.FDs[0]) }); err == nil {
			t.Errorf("%s: no error", name)
		}
		c.Close()
		if b, err := io.ReadAll(user); len(b) > 0 || err != nil {
			t.Errorf("%s: the connection: %q, %v", name, b, err)
		}
		if len(f.adopted) > 0 {
			t.Errorf("%s: adopted", name)
		}
	}
}

// A host that does not read holds no plugin up longer than the call.
func TestConnections_EndWithTheCall(t *testing.T) {
	ours, theirs, err := socketPair()
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	defer theirs.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	c, _ := userT(t, "disk", "", 0)
	defer c.Close()
	if err := SendConnections(ctx, ours, slices.Repeat([]Connection{c}, 10000)); err == nil {
		t.Error("no error")
	}
	if _, err := ReceiveConnections(ctx, ours); err == nil {
		t.Error("no error")
	}
}
