package rtrs

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
)

// openAt opens a session with the test server from an address.
func openAt(t *testing.T, net *loopback.Network, name string, src netip.Addr) error {
	t.Helper()
	_, cfg := cltConfig(t, 2)
	s, err := Open(cltContext(t), name, []PathAddr{pathTo(net.Device("client"), src, serverAddr.String())}, cfg)
	if err == nil {
		t.Cleanup(func() { s.Close(context.Background()) })
	}
	return err
}

// TestAClientLearnsWhyItIsRefused has a server refuse connections and sessions.
func TestAClientLearnsWhyItIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		server serverOption
		errno  syscall.Errno
		text   string
	}{
		"address": {func(c *ServerConfig) { c.Admit = func(netip.AddrPort) bool { return false } }, syscall.EACCES,
			"refused by the server: it does not admit clients of this address: permission denied"},
		"limit": {func(c *ServerConfig) { c.Limits.Connections = 1 }, syscall.ENOMEM,
			"refused by the server: its limit for clients is reached (1 connections): cannot allocate memory"},
		"handler": {func(c *ServerConfig) { c.Handler = refusingHandler{c.Handler} }, syscall.EMFILE,
			"the server refuses the session: it does not take the session: too many open files"},
	} {
		t.Run(name, func(t *testing.T) {
			net := loopback.New()
			startServer(t, net, serve, c.server)
			if err := openAt(t, net, "s", clientAddr); !errors.Is(err, c.errno) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("error %v, want %v", err, c.text)
			}
		})
	}
	net := loopback.New()
	startServer(t, net, serve)
	if err := openAt(t, net, "s", clientAddr); err != nil {
		t.Fatal(err)
	}
	err := openAt(t, net, "s", otherAddr)
	if !errors.Is(err, ErrNameRefused) || !errors.Is(err, ErrConnLost) || !strings.Contains(err.Error(), `another client has the name "s"`) {
		t.Errorf("a name of another client: %v", err)
	}
}

// refusingHandler takes no session. What it says is not told.
type refusingHandler struct{ ServerHandler }

func (refusingHandler) SessionUp(*SrvSession) error {
	return &reasonedError{error: syscall.EMFILE, code: rtrswire.ReasonOther, text: "secret"}
}

// TestAKernelsClientGetsNoReason has a client that announces nothing: its session is refused
// without a message, as by a kernel's server.
func TestAKernelsClientGetsNoReason(t *testing.T) {
	net := loopback.New()
	startServer(t, net, serve)
	newSession(t, net, 2, "s")
	other := newRawPath(t, net, 2)
	other.src = otherAddr
	other.connect().sendInfo(infoReq("s"))
	other.waitDown()
	if len(other.got) != 0 {
		t.Errorf("it got % x", other.got[0].data)
	}
	asking := newRawPath(t, net, 2)
	asking.src = otherAddr
	m := infoReq("s")
	rtrswire.InfoReq(m).Announce(rtrswire.FeatureReason)
	asking.connect().sendInfo(m)
	if r := rtrswire.ReasonMsg(asking.recv().data); !r.Valid() || r.Code() != rtrswire.ReasonName || r.Errno() != int(syscall.ECONNRESET) {
		t.Errorf("the reason: % x", []byte(r))
	}
	asking.hangUp()
}
