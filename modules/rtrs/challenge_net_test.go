package rtrs

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/rocev2"
	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/tlsauth"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Challenges between two ends in one process.

func withAuth(a *tlsauth.Auth, mode AuthMode) serverOption {
	return func(c *ServerConfig) { c.Auth, c.AuthMode = a, mode }
}

func clientAuth(a *tlsauth.Auth, mode AuthMode) func(*ClientConfig) {
	return func(c *ClientConfig) { c.Auth, c.AuthMode = a, mode }
}

// ends are the devices of two ends that reach each other.
type ends struct {
	net            *loopback.Network
	server, client verbs.Device
	listen         netip.AddrPort
	src            netip.Addr
}

func openRoCE(t *testing.T) verbs.Device {
	t.Helper()
	dev, err := rocev2.Open(rocev2.Config{IRD: -1, ORD: -1, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dev.Close() })
	return dev
}

// roceAddr is the n-th loopback address of this process alone.
func roceAddr(n byte) netip.Addr {
	pid := os.Getpid()
	return netip.AddrFrom4([4]byte{127, 64 | byte(pid>>8)&0x3f, byte(pid), n})
}

var fabricEnds = map[string]func(t *testing.T) ends{
	"loopback": func(t *testing.T) ends {
		net := loopback.New()
		return ends{net, net.Device("server"), net.Device("client"), netip.MustParseAddrPort("10.0.0.9:77"), clientAddr}
	},
	"iwarp": func(t *testing.T) ends {
		return ends{loopback.New(), openIwarp(t), openIwarp(t), netip.MustParseAddrPort("127.0.0.1:0"), netip.Addr{}}
	},
	"rocev2": func(t *testing.T) ends {
		return ends{loopback.New(), openRoCE(t), openRoCE(t), netip.AddrPortFrom(roceAddr(1), 1234), roceAddr(2)}
	},
}

// meetOver connects a session of a client to a server of the given mode. The
// identities are those that the ends see.
func meetOver(t *testing.T, e ends, server *tlsauth.Auth, mode AuthMode, name string, client func(*ClientConfig)) (seen [2]string, err error) {
	t.Helper()
	srv := startServer(t, e.net, serve, withAuth(server, AuthOff))
	at, err := srv.ListenAuth(e.server, e.listen, mode)
	if err != nil {
		t.Fatal(err)
	}
	c, cfg := cltConfig(t, 2)
	client(&cfg)
	if c.Session, err = Open(cltContext(t), name, []PathAddr{{Device: e.client, Src: e.src, Dst: at}}, cfg); err != nil {
		if n := len(srv.Sessions()); n > 0 {
			t.Errorf("%d sessions after %v", n, err)
		}
		return seen, err
	}
	defer c.stop()
	if c.region, err = c.Register(make([]byte, 4096)); err != nil {
		t.Fatal(err)
	}
	if err := c.write(1, 7, 0, 4096, "user"); err != nil {
		t.Fatal(err)
	}
	c.finished(7, 0)
	return [2]string{c.Paths()[0].Security.Peer, srv.Sessions()[0].Paths()[0].Security.Peer}, nil
}

// TestE045_ModesOfBothEnds: who is in, and as whom, for each pair of modes.
func TestE045_ModesOfBothEnds(t *testing.T) {
	key := psk(t, "a")
	both := [2]string{"psk:a", "psk:a"}
	for fabric, open := range fabricEnds {
		for _, c := range []struct {
			server, client AuthMode
			want           [2]string
			err            error
		}{
			{AuthOff, AuthOff, [2]string{}, nil},
			{AuthOff, AuthAllow, [2]string{}, nil},
			{AuthOff, AuthRequire, [2]string{}, syscall.EPROTONOSUPPORT},
			{AuthAllow, AuthOff, [2]string{}, nil},
			{AuthAllow, AuthAllow, both, nil},
			{AuthAllow, AuthRequire, both, nil},
			{AuthRequire, AuthOff, [2]string{}, syscall.EACCES},
			{AuthRequire, AuthAllow, both, nil},
			{AuthRequire, AuthRequire, both, nil},
		} {
			t.Run(fmt.Sprintf("%s, server %v, client %v", fabric, c.server, c.client), func(t *testing.T) {
				a := keyAuth(t, key)
				seen, err := meetOver(t, open(t), a, c.server, "s", clientAuth(a, c.client))
				if !errors.Is(err, c.err) || seen != c.want {
					t.Errorf("%v, %v, want %v, %v", seen, err, c.want, c.err)
				}
				if c.err == syscall.EACCES && !strings.Contains(err.Error(), "--auth") {
					t.Errorf("%v does not say what to do", err)
				}
			})
		}
	}
}

// TestChallengeOverFabrics: certificates in messages of several packets, and ends
// that do not belong together.
func TestChallengeOverFabrics(t *testing.T) {
	ca, other := newCA(t), newCA(t)
	key := psk(t, "a")
	between, err := os.ReadFile(ca.issue("RSA", "between", nil).Cert)
	if err != nil {
		t.Fatal(err)
	}
	long := func(f tlsauth.Files) tlsauth.Files { // with more certificates behind it
		b, err := os.ReadFile(f.Cert)
		if err != nil {
			t.Fatal(err)
		}
		for range 12 {
			b = append(b, between...)
		}
		if err := os.WriteFile(f.Cert, b, 0o600); err != nil {
			t.Fatal(err)
		}
		return f
	}
	server := filesAuth(t, long(ca.issue("RSA", "storage", nil)))
	foreign := other.issue("P-256", "client", nil)
	foreign.CA = ca.file("ca.pem")
	for fabric, open := range fabricEnds {
		for name, c := range map[string]struct {
			server, client *tlsauth.Auth
			want           [2]string
		}{
			"certificates":         {server, filesAuth(t, long(ca.issue("Ed25519", "client", nil))), [2]string{"dns:storage", "cn:client"}},
			"client of another CA": {server, filesAuth(t, foreign), [2]string{}},
			"expired client":       {server, filesAuth(t, ca.issue("P-256", "client", expired)), [2]string{}},
			"expired server":       {filesAuth(t, ca.issue("P-256", "storage", expired)), filesAuth(t, ca.issue("P-256", "client", nil)), [2]string{}},
			"wrong key":            {keyAuth(t, key), keyAuth(t, psk(t, "a")), [2]string{}},
			"unknown identity":     {keyAuth(t, key), keyAuth(t, psk(t, "b")), [2]string{}},
		} {
			t.Run(fabric+", "+name, func(t *testing.T) {
				seen, err := meetOver(t, open(t), c.server, AuthAllow, "s", clientAuth(c.client, AuthAllow))
				if seen != c.want || (err == nil) != (c.want != [2]string{}) || err != nil && !errors.Is(err, syscall.EACCES) {
					t.Errorf("%v, %v, want %v", seen, err, c.want)
				}
			})
		}
	}
}

// TestE044_PeersOfAKernelSeeNoChallenge: a client that offers one speaks to
// Linux's server as always, and its requests are as captured but for the
// announcement; a server that offers one answers Linux's client as always.
func TestE044_PeersOfAKernelSeeNoChallenge(t *testing.T) {
	a := keyAuth(t, fixedKey)
	for _, mode := range []AuthMode{AuthOff, AuthAllow} {
		net := loopback.New()
		s := startScripted(t, net, srvA, nil)
		tap := tapNet(net, func(e loopback.Event) bool {
			return e.Kind == loopback.KindConnect || e.Kind == loopback.KindWork && e.From.Addr() == cltA && e.Op == verbs.OpSend
		})
		cltOpen(t, []PathAddr{pathTo(net.Device("client"), cltA, srvA)}, clientAuth(a, mode))
		if len(s.infos) != 1 || rtrswire.InfoReq(s.infos[0]).Name() != "clt" {
			t.Errorf("%v: %d INFO_REQs", mode, len(s.infos))
		}
		announcement := "\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
		if mode == AuthAllow {
			announcement = "\x00RNBX\x01\x00\x08\x00\x00\x00"
		}
		for _, e := range tap.all() {
			if e.Kind == loopback.KindConnect && (string(e.Data[45:]) != announcement || e.Data[44] != 1) {
				t.Errorf("%v: bytes 44 to 55 are % x", mode, e.Data[44:])
			}
			if e.Kind == loopback.KindWork && e.Len != rtrswire.InfoReqLen {
				t.Errorf("%v: a SEND of %d bytes", mode, e.Len)
			}
		}
	}
	var answers []rtrswire.ConnRspFields
	for _, mode := range []AuthMode{AuthOff, AuthAllow} {
		net := loopback.New()
		startServer(t, net, serve, withAuth(a, mode))
		p := newSession(t, net, 2, "kernel")
		p.stillWorks()
		p.rep.Incarnation = rtrswire.UUID{}
		answers = append(answers, p.rep)
	}
	if answers[0] != answers[1] {
		t.Errorf("a client without keys is answered %+v, without challenges %+v", answers[1], answers[0])
	}
}

// TestE044_KernelClientsAreRefused: where proofs are required.
func TestE044_KernelClientsAreRefused(t *testing.T) {
	net := loopback.New()
	s := startServer(t, net, serve, withAuth(keyAuth(t, fixedKey), AuthRequire))
	p := newRawPath(t, net, 2)
	if errno := p.refused(0, p.private(0)); errno != -int(syscall.EACCES) {
		t.Errorf("refused with %d", errno)
	}
	if s.Usage() != (Usage{}) {
		t.Errorf("the server holds %+v", s.Usage())
	}
	if _, err := s.ListenAuth(s.dev, netip.MustParseAddrPort("10.0.0.9:77"), AuthMode(7)); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("mode 7: %v", err)
	}
}

// TestE046_EachConnectionOfAPathIsProved: also when a path comes back, and when
// another one joins; with keys as they are then.
func TestE046_EachConnectionOfAPathIsProved(t *testing.T) {
	net := loopback.New()
	keys := filepath.Join(t.TempDir(), "keys")
	replace := func(line string) {
		t.Helper()
		err := os.WriteFile(keys+".next", []byte(line), 0o600)
		if err == nil {
			err = os.Rename(keys+".next", keys)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	replace(fixedKey)
	srv := startServer(t, net, serve, withAuth(filesAuth(t, tlsauth.Files{PSK: keys}), AuthRequire))
	tap := tapNet(net, func(e loopback.Event) bool {
		return e.Kind == loopback.KindWork && e.Op == verbs.OpSend && e.Len == rtrswire.HelloLen
	})
	dev := net.Device("client")
	c := cltOpen(t, []PathAddr{pathTo(dev, cltA, serverAddr.String())}, clientAuth(keyAuth(t, fixedKey), AuthRequire))
	if _, err := c.AddPath(cltContext(t), pathTo(dev, cltB, serverAddr.String())); err != nil {
		t.Fatal(err)
	}
	net.Cut(cltA, serverAddr.Addr())
	c.awaitState(1, PathReconnecting)
	c.awaitState(1, PathConnected)
	hellos := map[string]bool{}
	for _, e := range tap.all() {
		hellos[string(e.Data)] = true
	}
	if len(hellos) < 3 {
		t.Errorf("%d challenges, want one for each start of a path", len(hellos))
	}
	for _, p := range append(pathPeers(srv), c.Paths()[0].Security.Peer, c.Paths()[1].Security.Peer) {
		if p != "psk:tenant-a" {
			t.Errorf("a path of %q", p)
		}
	}
	if err := c.write(1, 7, 0, 512, "user"); err != nil {
		t.Fatal(err)
	}
	c.finished(7, 0)
	replace(psk(t, "tenant-a"))
	net.Cut(cltA, serverAddr.Addr())
	e := c.event("a refusal", func(e Event) bool { return e.Path == 1 && errors.Is(e.Err, syscall.EACCES) })
	if e.State == PathConnected {
		t.Error("a path with an old key is connected")
	}
	replace(fixedKey)
	c.awaitState(1, PathConnected)
}

func pathPeers(srv *testServer) (peers []string) {
	for _, s := range srv.Sessions() {
		for _, p := range s.Paths() {
			if p.State == SrvPathConnected {
				peers = append(peers, p.Security.Peer)
			}
		}
	}
	return peers
}

// proving makes p announce that it takes part in challenges.
func (c *rawPath) proving() *rawPath {
	c.req.Features = rtrswire.FeatureProof
	return c
}

// bound is what the client knows of its connections.
func (c *rawPath) bound() *challengeBinding {
	b := &challengeBinding{response: make([]byte, rtrswire.ConnRspLen)}
	for cid := range c.qps {
		b.requests = append(b.requests, c.private(cid))
	}
	rtrswire.ConnRsp(b.response).Put(&c.rep)
	return b
}

// take waits for the next message before INFO_RSP, and posts a receive for one
// more.
func (c *rawPath) take() []byte {
	c.t.Helper()
	m := c.recv().data
	if _, err := c.qps[0].PostRecv([]verbs.RecvWR{{ID: rawInfo, Buf: c.recvMem[8192:], LKey: c.recvMR.LKey()}}); err != nil && !errors.Is(err, verbs.ErrNotConnected) {
		c.t.Fatal(err)
	}
	return m
}

// sendProof sends a message of a challenge. Those before may still be under way,
// so each kind has a place of its own.
func (c *rawPath) sendProof(m []byte) {
	if len(m) == 0 {
		c.post(0, verbs.SendWR{Op: verbs.OpSend})
		return
	}
	buf := append([]byte(nil), m...)
	mr, err := c.pd.RegMR(buf, 0)
	if err != nil {
		c.t.Fatal(err)
	}
	c.post(0, verbs.SendWR{Op: verbs.OpSend, SGEs: []verbs.SGE{{Buf: buf, LKey: mr.LKey()}}})
}

// hello sends the HELLO for a session, and takes the CHALLENGE.
func (c *rawPath) hello(a *tlsauth.Auth, name string) (x *cltChallenge, challenge []byte) {
	c.t.Helper()
	prover, err := a.ClientProver("", "")
	if err != nil {
		c.t.Fatal(err)
	}
	x = newCltChallenge(prover, c.bound(), name, newNonce())
	c.sendProof(x.hello)
	return x, c.take()
}

// prove makes the challenge as an honest client does.
func (c *rawPath) prove(a *tlsauth.Auth, name string) *rawPath {
	c.t.Helper()
	x, m := c.hello(a, name)
	proof, _, err := x.answerChallenge(m)
	if err != nil {
		c.t.Fatal(err)
	}
	c.sendProof(proof)
	return c
}

func (c *rawPath) expectRefusal(errno syscall.Errno) {
	c.t.Helper()
	if m := rtrswire.Refusal(c.take()); !m.Valid() || m.Errno() != int(errno) {
		c.t.Errorf("% x is no refusal with %v", []byte(m), errno)
	}
	c.hangUp()
}

// TestHostileClientsOfAChallenge: nothing but a proof lets a client in, and
// nothing is left of others.
func TestHostileClientsOfAChallenge(t *testing.T) {
	a, b, stranger := psk(t, "a"), psk(t, "b"), keyAuth(t, psk(t, "a"))
	clientA, clientB := keyAuth(t, a), keyAuth(t, b)
	server := keyAuth(t, a, b)
	net := loopback.New()
	s := startServer(t, net, serve, withAuth(server, AuthAllow))
	good := newRawPath(t, net, 2).proving()
	good.src = otherAddr
	good.connect().prove(clientA, "good").info("good").stillWorks()
	held := s.Usage()
	junk := func(n int, begin ...byte) []byte { return append(begin, make([]byte, n-len(begin))...) }
	for name, attack := range map[string]func(p *rawPath){
		"INFO_REQ without HELLO":   func(p *rawPath) { p.connect().sendInfo(infoReq("x")); p.waitDown() },
		"an empty message":         func(p *rawPath) { p.connect().sendProof(nil); p.waitDown() },
		"a HELLO of zeros":         func(p *rawPath) { p.connect().sendProof(junk(rtrswire.HelloLen)); p.waitDown() },
		"a HELLO that is too long": func(p *rawPath) { p.connect().sendProof(junk(rtrswire.HelloLen+1, 0x81, 0, 1, 0, 1)); p.waitDown() },
		"a HELLO of another key": func(p *rawPath) {
			p.connect().sendProof(junk(rtrswire.HelloLen, 0x81, 0, 1, 0, 1))
			p.expectRefusal(syscall.EACCES)
		},
		"a certificate": func(p *rawPath) {
			p.connect().sendProof(junk(rtrswire.HelloLen, 0x81, 0, 1, 0, 2))
			p.expectRefusal(syscall.EACCES)
		},
		"an immediate":              func(p *rawPath) { p.connect().imm(0, 0x10000001); p.waitDown() },
		"HELLO before connection 1": func(p *rawPath) { p.connect(0).sendProof(junk(rtrswire.HelloLen, 0x81, 0, 1, 0, 1)); waitFirst(p) },
		"HELLO again": func(p *rawPath) {
			x, _ := p.connect().hello(clientA, "x")
			p.sendProof(x.hello)
			p.waitDown()
		},
		"INFO_REQ in place of PROOF": func(p *rawPath) {
			p.connect().hello(clientA, "x")
			p.sendInfo(infoReq("x"))
			p.waitDown()
		},
		"the CHALLENGE sent back": func(p *rawPath) {
			_, m := p.connect().hello(clientA, "x")
			m[0] = byte(rtrswire.MsgProof)
			p.sendProof(m)
			p.expectRefusal(syscall.EACCES)
		},
		"another key of the identity": func(p *rawPath) {
			_, m := p.connect().hello(clientA, "x")
			prover, err := stranger.ClientProver("", "")
			if err != nil {
				t.Fatal(err)
			}
			proof, err := evidenceMessage(prover, &rtrswire.EvidenceFields{Type: rtrswire.MsgProof, Method: rtrswire.ProofKey}, func(claim []byte) []byte {
				return p.bound().proofText(verbs.ClientRole, m, claim)
			})
			if err != nil {
				t.Fatal(err)
			}
			p.sendProof(proof)
			p.expectRefusal(syscall.EACCES)
		},
		"another name in INFO_REQ": func(p *rawPath) { p.connect().prove(clientA, "x").sendInfo(infoReq("y")); p.waitDown() },
		"a request before INFO_REQ": func(p *rawPath) {
			p.connect().prove(clientA, "x").imm(0, 0x00000008)
			p.waitDown()
		},
		"a path to the session of another identity": func(p *rawPath) {
			p.req.PathsUUID = good.req.PathsUUID
			p.connect().prove(clientB, "good").expectRefusal(syscall.EACCES)
		},
		"a path without proof to that session": func(p *rawPath) {
			p.req.PathsUUID, p.req.Features = good.req.PathsUUID, 0
			if errno := p.refused(0, p.private(0)); errno != -int(syscall.EACCES) {
				t.Errorf("refused with %d", errno)
			}
		},
		"a connection without proof to a path with": func(p *rawPath) {
			p.connect(0)
			p.req.Features = 0
			if errno := p.refused(1, p.private(1)); errno == 0 {
				t.Error("let in")
			}
		},
		"the path of another client, again": func(p *rawPath) {
			p.req.PathsUUID, p.req.SessUUID, p.req.ReconCnt = good.req.PathsUUID, good.req.SessUUID, 9
			p.connect()
			good.stillWorks()
			p.prove(clientB, "good").expectRefusal(syscall.EACCES)
		},
		"it leaves after the HELLO": func(p *rawPath) { p.connect().hello(clientA, "x") },
		"it leaves after the PROOF": func(p *rawPath) { p.connect().prove(clientA, "x") },
	} {
		t.Run(name, func(t *testing.T) {
			p := newRawPath(t, net, 2).proving()
			attack(p)
			p.hangUp()
			good.stillWorks()
			eventually(t, "nothing is left of it", func() bool { return s.Usage() == held && len(s.Sessions()) == 1 })
			if ups, _, _ := s.handler.counts(); ups != 1 {
				t.Errorf("%d sessions came up", ups)
			}
		})
	}
	newRawPath(t, net, 2).proving().connect().prove(clientB, "b").info("b").stillWorks()
}

func waitFirst(p *rawPath) {
	p.t.Helper()
	eventually(p.t, "the connection to be closed", func() bool { p.pump(); return p.downs > 0 })
}

// TestHostileServersOfAChallenge: a client that requires a proof sends no name of
// a device, and no session, to a server that gives none.
func TestHostileServersOfAChallenge(t *testing.T) {
	mine := keyAuth(t, fixedKey)
	stranger := keyAuth(t, strings.Replace(fixedKey, "0001", "0002", 1))
	answer := func(s *scriptedServer, key *tlsauth.Auth, change func(*challengeBinding)) []byte {
		hello := rtrswire.Hello(s.last(0).info[:rtrswire.HelloLen])
		b := &challengeBinding{response: make([]byte, rtrswire.ConnRspLen)}
		s.mu.Lock()
		for _, c := range s.conns {
			m := make([]byte, rtrswire.ConnReqLen)
			rtrswire.ConnReq(m).Put(&c.req)
			b.requests = append(b.requests, m)
		}
		s.mu.Unlock()
		rtrswire.ConnRsp(b.response).Put(&rtrswire.ConnRspFields{QueueDepth: 8, MaxIOSize: 4096, MaxHdrSize: 4096, Features: rtrswire.FeatureProof})
		if change != nil {
			change(b)
		}
		x, err := newSrvChallenge(key, b, hello, newNonce())
		if err != nil {
			t.Error(err)
			return nil
		}
		return x.challenge
	}
	refusal := make(rtrswire.Refusal, rtrswire.RefusalLen)
	refusal.Put(int(syscall.EACCES))
	for name, c := range map[string]struct {
		reply func(s *scriptedServer, infoRsp []byte) []byte // nil result: none
		want  error
	}{
		"INFO_RSP in place of CHALLENGE": {func(_ *scriptedServer, m []byte) []byte { return m }, syscall.ECONNRESET},
		"nothing, then the end":          {func(s *scriptedServer, _ []byte) []byte { go s.hangUp(); return nil }, syscall.ECONNRESET},
		"the HELLO sent back":            {func(s *scriptedServer, _ []byte) []byte { return s.last(0).info }, syscall.ECONNRESET},
		"REFUSAL":                        {func(*scriptedServer, []byte) []byte { return refusal }, syscall.EACCES},
		"a CHALLENGE of zeros":           {func(*scriptedServer, []byte) []byte { return make([]byte, 80) }, syscall.ECONNRESET},
		"too many bytes":                 {func(*scriptedServer, []byte) []byte { return make([]byte, 2*rtrswire.MaxEvidenceLen) }, syscall.ECONNRESET},
		"a CHALLENGE without proof":      {func(*scriptedServer, []byte) []byte { return append([]byte{0x82, 0, 1, 0, 1, 0}, make([]byte, 74)...) }, syscall.EACCES},
		"another key":                    {func(s *scriptedServer, _ []byte) []byte { return answer(s, stranger, nil) }, syscall.EACCES},
		"the proof for another path": {func(s *scriptedServer, _ []byte) []byte {
			return answer(s, mine, func(b *challengeBinding) { b.requests[0][12] ^= 1 })
		}, syscall.EACCES},
		"the proof for other sizes": {func(s *scriptedServer, _ []byte) []byte {
			return answer(s, mine, func(b *challengeBinding) { b.response[6] ^= 1 })
		}, syscall.EACCES},
	} {
		t.Run(name, func(t *testing.T) {
			net := loopback.New()
			s := startScripted(t, net, srvA, func(s *scriptedServer) {
				s.infoReq = rtrswire.MaxEvidenceLen
				s.onConnect = func(_ rtrswire.ConnReqFields, rsp []byte) ([]byte, int) {
					f := rtrswire.ConnRsp(rsp).Fields()
					f.Features |= rtrswire.FeatureProof
					rtrswire.ConnRsp(rsp).Put(&f)
					return rsp, 0
				}
				s.onInfo = func(rsp []byte) []byte { return c.reply(s, rsp) }
			})
			_, cfg := cltConfig(t, 2)
			clientAuth(mine, AuthRequire)(&cfg)
			_, err := Open(cltContext(t), "clt", []PathAddr{pathTo(net.Device("client"), cltA, srvA)}, cfg)
			if !errors.Is(err, c.want) {
				t.Errorf("%v, want %v", err, c.want)
			}
			if len(s.infos) != 1 || rtrswire.Hello(s.infos[0][:rtrswire.HelloLen]).Check() != nil {
				t.Errorf("the client has sent %d messages", len(s.infos))
			}
		})
	}
}

// TestE047_ChallengesAreBounded: a path whose challenge does not end counts for the
// limits of paths that are not connected, and ends in time.
func TestE047_ChallengesAreBounded(t *testing.T) {
	a := keyAuth(t, fixedKey)
	net := loopback.New()
	s := startServer(t, net, serve, withAuth(a, AuthRequire), limited(func(l *Limits) { l.UnfinishedPerAddr = 2 }))
	var held []*rawPath
	for range 3 {
		p := newRawPath(t, net, 1).proving().connect()
		p.hello(a, "s")
		held = append(held, p)
	}
	held[0].waitDown()
	if u := s.Usage(); u.GaveWay != 1 || u.Unfinished != 2 {
		t.Errorf("%+v", u)
	}
	net = loopback.New()
	s = startServer(t, net, serve, withAuth(a, AuthRequire), func(c *ServerConfig) { c.InfoTimeout = 3 * time.Second })
	p := newRawPath(t, net, 1).proving().connect()
	p.hello(a, "s")
	p.waitDown()
	eventually(t, "nothing is left of it", func() bool { return s.Usage() == Usage{TimedOut: 1} })
}

// TestTLSIsEnough: a path with TLS is not challenged.
func TestTLSIsEnough(t *testing.T) {
	key := psk(t, "a")
	net := loopback.New()
	srv := startServer(t, net, serve, withAuth(keyAuth(t, key), AuthOff))
	dev := protectedDevice(t, 2, key)
	at, err := srv.ListenAuth(dev, netip.MustParseAddrPort("127.0.0.1:0"), AuthRequire)
	if err != nil {
		t.Fatal(err)
	}
	c := cltOpen(t, []PathAddr{{Device: protectedDevice(t, 0, key), Dst: at}}, func(cfg *ClientConfig) {
		cfg.Protect = true
		clientAuth(keyAuth(t, key), AuthRequire)(cfg)
	})
	if sec := c.Paths()[0].Security; sec.Protocol != "TLS 1.3" || sec.Peer != "psk:a" {
		t.Errorf("%+v", sec)
	}
}
