package rtrs

import (
	"errors"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/tlsauth"
)

// refusals is a handler that learns of refusals.
type refusals struct {
	*testHandler
	mu   sync.Mutex
	list []Refusal
}

func (h *refusals) Refused(r Refusal) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.list = append(h.list, r)
}

func (h *refusals) only(t *testing.T) (r Refusal) {
	t.Helper()
	eventually(t, "a refusal", func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		if len(h.list) > 0 {
			r = h.list[0]
		}
		return len(h.list) == 1
	})
	return r
}

// watchRefusals starts a server that requires challenges.
func watchRefusals(t *testing.T, net *loopback.Network, a *tlsauth.Auth) *refusals {
	t.Helper()
	h := &refusals{}
	startServer(t, net, serve, withAuth(a, AuthRequire), func(c *ServerConfig) {
		h.testHandler = c.Handler.(*testHandler)
		c.Handler = h
	})
	return h
}

// TestRefusalsAreTold: a handler learns once of each client that is refused for its
// identity, with the identity that the client claims.
func TestRefusalsAreTold(t *testing.T) {
	key, ca, other := psk(t, "a"), newCA(t), newCA(t)
	foreign := other.issue("P-256", "client", nil)
	foreign.CA = ca.file("ca.pem")
	certs := filesAuth(t, ca.issue("P-256", "storage", nil))
	for name, c := range map[string]struct {
		server, client *tlsauth.Auth
		claimed, why   string
	}{
		"no challenge":         {keyAuth(t, key), nil, "", "proves no identity"},
		"another key":          {keyAuth(t, key), keyAuth(t, psk(t, "a")), "psk:a", "may not accept the identity of this server"},
		"another identity":     {keyAuth(t, key), keyAuth(t, psk(t, "b")), "key ", "not in this server's file"},
		"keys and no key":      {certs, keyAuth(t, key), "key ", "not in this server's file"},
		"another CA":           {certs, filesAuth(t, foreign), "cn:client", "unknown authority"},
		"an expired one":       {certs, filesAuth(t, ca.issue("P-256", "client", expired)), "cn:client", "expired"},
		"certificate, no file": {keyAuth(t, key), filesAuth(t, ca.issue("P-256", "client", nil)), "", "shared keys only"},
	} {
		t.Run(name, func(t *testing.T) {
			net := loopback.New()
			h := watchRefusals(t, net, c.server)
			_, cfg := cltConfig(t, 2)
			if cfg.Auth, cfg.AuthMode = nil, AuthOff; c.client != nil {
				cfg.Auth, cfg.AuthMode = c.client, AuthAllow
			}
			s, err := Open(cltContext(t), "mine", []PathAddr{pathTo(net.Device("client"), clientAddr, serverAddr.String())}, cfg)
			if err == nil {
				s.Close(t.Context())
				t.Fatal("the client is served")
			}
			r := h.only(t)
			session := "mine"
			if c.client == nil {
				session = ""
			}
			if r.Session != session || r.Client.Addr() != clientAddr || r.Server != serverAddr || r.Fabric != "loopback" || !errors.Is(r.Err, syscall.EACCES) && !errors.Is(r.Err, ErrConnLost) {
				t.Errorf("%+v", r)
			}
			if !strings.HasPrefix(r.Claimed, c.claimed) || c.claimed == "" && r.Claimed != "" || !strings.Contains(r.Err.Error(), c.why) {
				t.Errorf("claims %q: %v, want %q, %q", r.Claimed, r.Err, c.claimed, c.why)
			}
		})
	}
}

// TestRefusalOfGarbage: a HELLO that cannot be read is told, and claims nothing.
func TestRefusalOfGarbage(t *testing.T) {
	p := &srvPath{proofs: &srvProofs{}, dev: loopback.New().Device("server")}
	r := p.refusalOf(make(rtrswire.Hello, 3), protocolErrorf("HELLO"))
	if r.Session != "" || r.Claimed != "" || !errors.Is(r.Err, ErrProtocol) {
		t.Errorf("%+v", r)
	}
}
