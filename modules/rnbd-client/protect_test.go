package client

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
)

// tlsFront is the process of a front end that notes what it gets, in order.
type tlsFront struct {
	supervise.Process
	got  []string
	tls  plugin.TLS
	fail error

	killed bool
}

func (p *tlsFront) Kill() { p.killed = true }

func (p *tlsFront) SetTLS(_ context.Context, t plugin.TLS) error {
	p.got, p.tls = append(p.got, "tls"), t
	return p.fail
}

func (p *tlsFront) AddListener(_ context.Context, name string, _ *os.File) error {
	p.got = append(p.got, name)
	return nil
}

func requiredTLS() plugin.TLS { return plugin.TLS{Certificate: []byte("c"), Required: true} }

func listening(t *testing.T, cfg FrontendConfig) (*frontend, error) {
	t.Helper()
	f := &frontend{client: &Client{life: t.Context()}, cfg: cfg, log: slog.New(slog.DiscardHandler)}
	t.Cleanup(func() {
		for i := range f.sockets {
			f.sockets[i].close()
		}
	})
	return f, f.openSockets()
}

// Others than this host reach a socket only by TLS, or if the operator says so.
func TestListen_BeyondLoopback(t *testing.T) {
	allowed := func() plugin.TLS { return plugin.TLS{Certificate: []byte("c")} }
	dir := t.TempDir()
	for _, c := range []struct {
		listen string
		tls    func() plugin.TLS
		ok     bool
	}{
		{"tcp:127.0.0.1:0", nil, true},
		{"tcp:127.0.0.2:0", nil, true},
		{"tcp:localhost:0", nil, true},
		{"unix:" + filepath.Join(dir, "a"), nil, true},
		{"unix:" + filepath.Join(dir, "b") + trusted, requiredTLS, true},
		{"tcp::0", nil, false},
		{"tcp:0.0.0.0:0", nil, false},
		{"tcp:[::]:0", nil, false},
		{"tcp:0.0.0.0:0", allowed, false},
		{"tcp:0.0.0.0:0", requiredTLS, true},
		{"tcp:0.0.0.0:0" + trusted, nil, true},
		{"tcp:0.0.0.0:0" + trusted, allowed, true},
		{"tcp:127.0.0.1:0" + trusted, requiredTLS, true},
		{"tcp:127.0.0.1:0,trust", nil, false},
	} {
		f, err := listening(t, FrontendConfig{Listen: []string{c.listen}, TLS: c.tls})
		if (err == nil) != c.ok {
			t.Errorf("%s: %v", c.listen, err)
		}
		if err == nil && f.sockets[0].trusted != strings.HasSuffix(c.listen, trusted) {
			t.Errorf("%s: %+v", c.listen, f.sockets[0])
		}
		if err != nil && strings.Contains(c.listen, ":0") && !strings.HasSuffix(c.listen, "trust") && !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%s: %v", c.listen, err)
		}
	}
}

// The same holds for sockets that another process has made.
func TestListen_InheritedBeyondLoopback(t *testing.T) {
	socket := func() *os.File {
		l, err := net.Listen("tcp", "0.0.0.0:0")
		must(t, err)
		defer l.Close()
		f, err := l.(*net.TCPListener).File()
		must(t, err)
		return f
	}
	if _, err := listening(t, FrontendConfig{Sockets: []*os.File{socket()}}); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("without TLS: %v", err)
	}
	f, err := listening(t, FrontendConfig{TrustedSockets: []*os.File{socket()}, Sockets: []*os.File{socket()}, TLS: requiredTLS})
	if err != nil || f.sockets[0].trusted || !f.sockets[1].trusted {
		t.Errorf("with TLS, and trusted: %v", err)
	}
}

// A process gets the means of TLS before the first socket, and no socket without
// them. It gets them again when they have changed, and only then.
func TestProtect(t *testing.T) {
	now := requiredTLS()
	f, err := listening(t, FrontendConfig{Listen: []string{"tcp:127.0.0.1:0", "tcp:127.0.0.1:0" + trusted}, TLS: func() plugin.TLS { return now }})
	must(t, err)
	names := []string{f.sockets[0].name, f.sockets[1].name}

	old := &tlsFront{fail: blk.EOPNOTSUPP}
	h := &frontendProcess{Instance: &supervise.Instance{Process: old}, fe: f}
	if err := f.passSockets(t.Context(), h); !errors.Is(err, blk.EOPNOTSUPP) || !slices.Equal(old.got, []string{"tls"}) {
		t.Errorf("a process that cannot: %v, %v", old.got, err)
	}

	p := &tlsFront{}
	h = &frontendProcess{Instance: &supervise.Instance{Process: p}, fe: f}
	must(t, f.passSockets(t.Context(), h))
	if !slices.Equal(p.got, append([]string{"tls"}, names...)) || !slices.Equal(p.tls.Plain, names[1:]) || !p.tls.Required {
		t.Errorf("it gets %v, %+v", p.got, p.tls)
	}
	must(t, f.sendTLS(t.Context(), h))
	now.PrivateKey = []byte("k")
	p.fail = blk.EINVAL
	if err := f.sendTLS(t.Context(), h); !errors.Is(err, blk.EINVAL) {
		t.Error(err)
	}
	p.fail = nil
	must(t, f.sendTLS(t.Context(), h))
	must(t, f.sendTLS(t.Context(), h))
	if n := len(p.got); n != 5 || string(p.tls.PrivateKey) != "k" {
		t.Errorf("it gets %v", p.got)
	}
}

// A process that cannot check users as they must be from now on does not go on with
// its sockets.
func TestRenewTLS_FailsClosed(t *testing.T) {
	now := requiredTLS()
	f, err := listening(t, FrontendConfig{Listen: []string{"tcp:127.0.0.1:0"}, TLS: func() plugin.TLS { return now }})
	must(t, err)
	p := &tlsFront{}
	h := &frontendProcess{Instance: &supervise.Instance{Process: p}, fe: f}
	must(t, f.passSockets(t.Context(), h))
	now.PrivateKey, p.fail = []byte("half a key"), blk.EINVAL
	if err := f.renewOn(t.Context(), h); !errors.Is(err, blk.EINVAL) || p.killed {
		t.Errorf("with a wrong key: %v, killed: %t", err, p.killed)
	}
	now.Rules, p.fail = []plugin.UserRule{{Allow: "none"}}, blk.EOPNOTSUPP
	if err := f.renewOn(t.Context(), h); !errors.Is(err, blk.EOPNOTSUPP) || !p.killed {
		t.Errorf("with rules that it does not know: %v, killed: %t", err, p.killed)
	}
}
