package kernelvm

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Either client gets the errno that the kernel's own would get, from either
// server.
func TestErrors(t *testing.T) {
	for _, col := range columns {
		for _, pair := range [][2]side{{ours, kernel}, {kernel, ours}} {
			c := cell{column: col, from: pair[0], to: pair[1], invalidate: true}
			t.Run(c.String(), func(t *testing.T) { refusals(t, c.set(t)) })
		}
	}
}

// refusals maps, with a device mapped for writing in another session.
func refusals(t *testing.T, b *bench) {
	held := b.mapDisk(t, "rw", fast)
	for _, x := range []struct {
		name string
		with func(*mapping)
		want syscall.Errno
	}{
		{"no such device", func(m *mapping) { m.session, m.name = "t", "nowhere" }, syscall.ENOENT},
		{"second writer", func(m *mapping) { m.session = "t" }, syscall.EPERM},
		{"second writer by migration, then a third", func(m *mapping) { m.session, m.access = "t", "rw" }, syscall.EPERM},
		{"twice in a session", func(*mapping) {}, syscall.EEXIST},
		{"two dots", func(m *mapping) { m.session, m.name = "t", "a/../"+m.name }, syscall.EINVAL},
		{"nobody listens at the port", func(m *mapping) { m.session, m.port = "t", 4321 }, syscall.ECONNRESET},
		{"session with a dot", func(m *mapping) { m.session = "a.b" }, syscall.EINVAL},
		{"name too long", func(m *mapping) { m.session, m.name = "t", strings.Repeat("n", 300) }, syscall.EINVAL},
		{"two paths between the same addresses", func(m *mapping) { m.session, m.links = "t", []int{fast, fast} }, syscall.EEXIST},
	} {
		eventually(t, time.Minute, "one session is left", func() bool { return b.s.Sessions(t) <= 1 })
		m := b.mapping("rw", fast)
		x.with(&m)
		if d, err := b.c.Map(t.Context(), m); !errors.Is(err, x.want) {
			t.Errorf("%s: %v, want %v", x.name, err, x.want)
			if err == nil {
				b.c.Unmap(t, d)
			}
		}
	}
	b.unmap(t, held)
}

// request is the private data of a first connection, as the protocol has it.
func request() []byte {
	p := make([]byte, 56)
	copy(p, []byte{0, 0, 0xbd, 0x1b, 0x00, 0x02, 0, 0, 2, 0, 1, 0})
	copy(p[12:], "path-uuid-123456session-uuid-1234")
	p[44] = 1
	return p
}

// A kernel server refuses requests with the errno that the protocol page tells,
// and our end hands it on.
func TestBadRequestsToKernelServer(t *testing.T) {
	b := cell{column: rocev2, from: ours, to: kernel}.set(t)
	for _, x := range []struct {
		name string
		at   int
		is   byte
		want string
	}{
		{"magic", 2, 0, "98ff"},
		{"major version", 5, 3, "98ff"},
		{"cid not below cid_num", 6, 2, "98ff"},
		{"unknown session and no first_conn", 44, 0, "faff"},
	} {
		p := request()
		p[x.at] = x.is
		out := run(t, hostPlace{b.g}, rawpeerPath, "connect", b.c.Addr(fast), b.s.Addr(fast)+":1234", hex.EncodeToString(p))
		answer, refused := strings.CutPrefix(strings.TrimSpace(out), "refused ")
		if !refused || !strings.HasPrefix(answer, "bd1b0002"+x.want) {
			t.Errorf("%s: %s, want a refusal with %s", x.name, out, x.want)
		}
	}
}

// A kernel client takes no answer of another protocol.
func TestBadAnswersToKernelClient(t *testing.T) {
	b := cell{column: rocev2, from: kernel, to: ours}.set(t)
	for i, x := range []struct{ name, answer string }{
		{"magic", "bd1c00020000000200f001000010000000000000"},
		{"major version", "bd1b00030000000200f001000010000000000000"},
		{"errno", "bd1b0002f4ff000200f001000010000000000000"},
	} {
		port := 2000 + i
		full := x.answer + strings.Repeat("00", 56-len(x.answer)/2)
		// Its own address: the server has the others.
		p := hostPlace{b.g}.Start(t, rawpeerPath, "listen", fmt.Sprintf("%s:%d", rocev2.client(b.g, fast), port), full)
		for end := time.Now().Add(20 * time.Second); !strings.Contains(p.Output(), "listening") && time.Now().Before(end); {
			time.Sleep(20 * time.Millisecond)
		}
		m := b.mapping("rw", fast)
		m.port, m.to = port, otherAddr{b.s, rocev2.client(b.g, fast)}
		if _, err := b.c.Map(t.Context(), m); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s: %v, want ECONNRESET", x.name, err)
		}
		p.Stop()
	}
}

// otherAddr is a server at an address that is not its own.
type otherAddr struct {
	server
	addr string
}

func (o otherAddr) Addr(int) string { return o.addr }

// timeout is a context that ends before the test does.
func timeout(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}
