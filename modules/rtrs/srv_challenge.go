package rtrs

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// The server's side of a challenge: between the last connection of a path and its
// INFO_REQ. A path that is challenged is not connected yet, and counts for
// Limits.Unfinished and Config.InfoTimeout as others do.

// Ids of receives of connection 0, above infoReqRecv.
const (
	helloRecv = infoReqRecv + 1 + iota
	proofRecv
)

// refusalGrace bounds the time for which a client that is refused keeps its
// connections, to take the REFUSAL.
const refusalGrace = time.Second

// srvProofs is what a path needs for a challenge.
type srvProofs struct {
	bound challengeBinding // guarded by the server's accepting until the path is complete

	key          uint32 // of the buffers
	hello, proof []byte // receive buffers
	out          []byte
	got          chan int // takes the length of the PROOF

	asked   atomic.Bool           // the CHALLENGE was sent
	refusal atomic.Pointer[error] // the reason why the path ends
	name    string                // of the session; set before done is closed
	claimed string                // identity of a shared key that the client names; for onHello
	done    chan struct{}         // closed when the identity of the client is proved
}

// newSrvProofs returns nil if the client of req is not challenged.
func newSrvProofs(mode AuthMode, req verbs.ConnRequest, f *rtrswire.ConnReqFields) *srvProofs {
	if !needsChallenge(mode, req, f) {
		return nil
	}
	return &srvProofs{
		bound: challengeBinding{requests: make([][]byte, f.CIDNum)},
		got:   make(chan int, 1),
		done:  make(chan struct{}),
	}
}

// needsChallenge reports whether a client must prove its identity before its
// INFO_REQ. TLS has done more.
func needsChallenge(mode AuthMode, req verbs.ConnRequest, f *rtrswire.ConnReqFields) bool {
	return mode != AuthOff && f.Features&rtrswire.FeatureProof != 0 && verbs.SecurityOf(req).Peer == ""
}

// errNoProof refuses a client that cannot prove its identity.
var errNoProof error = &sentinelError{"the client proves no identity, and this listener requires that: " +
	"give a client of this project --auth require and its keys, and the client of a Linux kernel a listener with auth=off and a rule for its address", syscall.EACCES}

// mustProve returns an error if the listener refuses the client for that.
func mustProve(mode AuthMode, req verbs.ConnRequest, f *rtrswire.ConnReqFields) error {
	if mode == AuthRequire && verbs.SecurityOf(req).Peer == "" && !needsChallenge(mode, req, f) {
		return errNoProof
	}
	return nil
}

// makeBuffers makes the message buffers.
func (s *srvProofs) makeBuffers(p *srvPath) error {
	mem := make([]byte, rtrswire.HelloLen+2*rtrswire.MaxEvidenceLen)
	mr, err := p.regMR(mem, 0)
	if err != nil {
		return err
	}
	s.key = mr.LKey()
	s.hello, mem = mem[:rtrswire.HelloLen:rtrswire.HelloLen], mem[rtrswire.HelloLen:]
	s.proof, s.out = mem[:rtrswire.MaxEvidenceLen:rtrswire.MaxEvidenceLen], mem[rtrswire.MaxEvidenceLen:]
	return nil
}

// proofRecvs are the receives that come before that of the INFO_REQ.
func (s *srvProofs) proofRecvs() []verbs.RecvWR {
	if s == nil {
		return nil
	}
	return []verbs.RecvWR{{ID: helloRecv, Buf: s.hello, LKey: s.key}, {ID: proofRecv, Buf: s.proof, LKey: s.key}}
}

// keepPrivateData keeps the private data of connection cid and its answer. The caller holds
// accepting.
func (s *srvProofs) keepPrivateData(cid int, request, response []byte) {
	if s == nil {
		return
	}
	s.bound.requests[cid] = bytes.Clone(request)
	if cid == 0 {
		s.bound.response = bytes.Clone(response)
	}
}

// endOf returns the reason for the end of a path, given that of the connection.
func (s *srvProofs) endOf(cause error) error {
	switch {
	case s == nil:
	case s.refusal.Load() != nil:
		return *s.refusal.Load()
	case s.asked.Load() && !s.hasProof() && errors.Is(cause, ErrConnLost):
		return fmt.Errorf("%w during the challenge: the client may not accept the identity of this server; its log has the reason", cause)
	}
	return cause
}

// hasProof reports whether the client has proved its identity.
func (s *srvProofs) hasProof() bool {
	select {
	case <-s.done:
		return true
	default:
		return false
	}
}

// onSetup handles a message of n bytes that comes before requests do.
func (p *srvPath) onSetup(recv uint64, n int) {
	switch recv {
	case infoReqRecv:
		go p.onInfoReq(n)
	case helloRecv:
		go p.onHello(n)
	case proofRecv:
		p.proofs.got <- n
	}
}

// onHello serves the HELLO of n bytes, and what follows, up to the PROOF. It runs
// on a goroutine of its own.
func (p *srvPath) onHello(n int) {
	hello := bytes.Clone(p.proofs.hello[:n])
	err := p.challengeClient(hello)
	if err != nil && (p.goesOn() || p.proofs.asked.Load() && errors.Is(err, ErrConnLost)) {
		p.sess.srv.tellRefusal(p.refusalOf(hello, err))
	}
	switch {
	case err == nil:
	case errors.Is(err, ErrProtocol):
		p.close(err)
	default:
		p.refuseClient(err)
	}
}

// challengeClient proves the identity of the server, and has the client prove its own.
func (p *srvPath) challengeClient(hello []byte) error {
	if err := p.checkComplete("HELLO"); err != nil {
		return err
	}
	s := p.proofs
	x, err := newSrvChallenge(p.sess.srv.cfg.Auth, &s.bound, hello, newNonce())
	if err != nil {
		return err
	}
	if c, ok := x.prover.(interface{ Claimed() string }); ok {
		s.claimed = c.Claimed()
	}
	s.asked.Store(true)
	if err := p.onOwner(p.conns[0], func() error { return p.conns[0].postSetup(x.challenge) }); err != nil {
		return err
	}
	select {
	case n := <-s.got:
		client, err := x.verifyProof(bytes.Clone(s.proof[:n]))
		if err != nil {
			return err
		}
		if err := p.sess.takeIdentity(p, client); err != nil {
			return err
		}
	case <-p.closing:
		return p.cause
	}
	s.name = x.session
	close(s.done)
	return nil
}

// postSetup sends a message of the challenge. Owner.
func (c *srvConn) postSetup(m []byte) error {
	s := c.path.proofs
	c.rkey[0] = verbs.SGE{Buf: s.out[:copy(s.out, m)], LKey: s.key}
	c.chain[0] = verbs.SendWR{Op: verbs.OpSend, Signaled: true, SGEs: c.rkey[:]}
	return c.postChain(c.chain[:1])
}

// tellRefusal tells the handler of a client that is refused.
func (s *Server) tellRefusal(r Refusal) {
	if h, ok := s.cfg.Handler.(RefusalWatcher); ok {
		h.Refused(r)
	}
}

// refusalOf describes the refusal of the client of p, which has sent hello.
func (p *srvPath) refusalOf(hello rtrswire.Hello, err error) Refusal {
	r := Refusal{Client: p.client, Server: p.server, Fabric: p.dev.Info().Fabric, Err: err}
	if hello.Check() == nil {
		f := hello.Fields()
		if r.Session = f.Name; f.Method == rtrswire.ProofKey {
			r.Claimed = cmp.Or(p.proofs.claimed, fmt.Sprintf("key %x", f.KeyID))
		}
	}
	if claim, ok := errors.AsType[claimedError](err); ok {
		r.Claimed = claim.identity
	}
	if u, ok := errors.AsType[verbs.Unproved](err); ok {
		r.Claimed = u.Claimed
	}
	return r
}

// claimedError is an error about a client that has proved to be identity.
type claimedError struct {
	identity string
	error
}

func (e claimedError) Unwrap() error { return e.error }

// refuseClient closes the path after the client was told of it.
func (p *srvPath) refuseClient(err error) {
	if !p.goesOn() {
		return
	}
	p.proofs.refusal.Store(&err)
	p.sess.srv.log.Warn("rtrs: client refused", "client", verbs.AddrPortString(p.client), "server", verbs.AddrPortString(p.server), "err", err)
	m := make(rtrswire.Refusal, rtrswire.RefusalLen)
	m.Put(ErrnoOf(err))
	if e := p.onOwner(p.conns[0], func() error { return p.conns[0].postSetup(m) }); e == nil {
		p.awaitEnd(refusalGrace)
	}
	p.close(err)
}

// awaitEnd waits for the end of the path, which the client has been told of, for at most limit.
func (p *srvPath) awaitEnd(limit time.Duration) {
	select {
	case <-p.closing: // the client has gone
	case <-time.After(limit):
	}
}

// awaitProof waits until the client has proved its identity. name is that of its
// INFO_REQ.
func (p *srvPath) awaitProof(name string) error {
	s := p.proofs
	if s == nil {
		return nil
	}
	select {
	case <-s.done:
	case <-p.closing:
		return p.cause
	}
	if name != s.name {
		return protocolErrorf("INFO_REQ names session %q, the proof of the client was for %q", name, s.name)
	}
	return nil
}

// takeIdentity notes the identity that the client of p has proved. EACCES: the
// session belongs to another one.
func (s *SrvSession) takeIdentity(p *srvPath, client verbs.Security) error {
	s.srv.accepting.Lock() // no path is being made
	defer s.srv.accepting.Unlock()
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	if err := s.belongsTo(client.Peer); err != nil {
		return err
	}
	p.security, p.known = client, true
	return nil
}

// belongsTo returns EACCES if a path of the session belongs to another identity.
// A path whose client has not proved its identity yet belongs to none. Holds the
// server's mu.
func (s *SrvSession) belongsTo(identity string) error {
	for _, p := range s.paths {
		if p.known && p.security.Peer != identity {
			return claimedError{identity, fmt.Errorf("the session belongs to another identity than %q: %w", identity, syscall.EACCES)}
		}
	}
	return nil
}
