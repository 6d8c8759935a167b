package rtrs

import (
	"bytes"
	"context"
	"fmt"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// The client's side of a challenge, on the path's goroutine: after all
// connections are up, before the INFO_REQ.

// challengeRecv is the id of the receive for the CHALLENGE, above infoRecv.
const challengeRecv = infoRecv + 1

// cltProofs is what a link needs for a challenge.
type cltProofs struct {
	bound challengeBinding
	asked bool // the server has announced that it will take part

	mem []byte // the messages that are sent, then the CHALLENGE
	mr  verbs.MR
	got chan []byte // takes the CHALLENGE

	security verbs.Security // of the path after the challenge
}

// newCltProofs returns nil if no challenge is wanted. TLS proves more.
func newCltProofs(cfg *ClientConfig) *cltProofs {
	if cfg.AuthMode == AuthOff || cfg.Protect {
		return nil
	}
	return &cltProofs{got: make(chan []byte, 1)}
}

func (p *cltProofs) sentEvidence() []byte     { return p.mem[:rtrswire.MaxEvidenceLen] }
func (p *cltProofs) receivedEvidence() []byte { return p.mem[rtrswire.MaxEvidenceLen:] }

// noteRequest keeps the private data of the next connection.
func (p *cltProofs) noteRequest(private []byte) {
	if p != nil {
		p.bound.requests = append(p.bound.requests, bytes.Clone(private))
	}
}

// noteResponse keeps the answer to connection 0. It returns an error if the
// server takes no part in a challenge that the session requires.
func (p *cltProofs) noteResponse(rsp rtrswire.ConnRsp, mode AuthMode) error {
	if p == nil {
		return nil
	}
	p.bound.response = bytes.Clone(rsp[:rtrswire.ConnRspLen])
	p.asked = rsp.Features()&rtrswire.FeatureProof != 0
	if !p.asked && mode == AuthRequire {
		return fmt.Errorf("the session requires a proof of the server's identity, and the server offers none: %w", syscall.EPROTONOSUPPORT)
	}
	return nil
}

func (p *cltProofs) close() {
	if p != nil && p.mr != nil {
		_ = p.mr.Close() // not in use: all queue pairs are gone
	}
}

// challengeServer has the server prove its identity, and returns this end's PROOF. It
// is nil without a challenge.
func (l *link) challengeServer(ctx context.Context) (proof []byte, err error) {
	p, s := l.proofs, l.path.session
	if p == nil || !p.asked {
		return nil, nil
	}
	prover, err := s.cfg.Auth.ClientProver(s.cfg.PeerName, l.path.addr.Dst.Addr().Unmap().WithZone("").String())
	if err != nil {
		return nil, fmt.Errorf("challenge: %w", err)
	}
	x := newCltChallenge(prover, &p.bound, s.name, newNonce())
	m, err := l.exchangeHello(ctx, x.hello)
	if err != nil {
		return nil, fmt.Errorf("challenge: %w", err)
	}
	if proof, p.security, err = x.answerChallenge(bytes.Clone(m)); err != nil {
		return nil, fmt.Errorf("challenge: %w", err)
	}
	return p.sentEvidence()[:copy(p.sentEvidence(), proof)], nil
}

// exchangeHello sends the HELLO and returns the CHALLENGE.
func (l *link) exchangeHello(ctx context.Context, hello []byte) (m []byte, err error) {
	p, c := l.proofs, l.conns[0]
	p.mem = make([]byte, 2*rtrswire.MaxEvidenceLen)
	if p.mr, err = l.dev.pd.RegMR(p.mem, 0); err != nil {
		return nil, fmt.Errorf("register message buffers: %w", err)
	}
	n := copy(p.sentEvidence(), hello)
	if err := c.poller.Call(ctx, func() { l.sendHello(c, p.sentEvidence()[:n]) }); err != nil {
		return nil, fmt.Errorf("send HELLO: %w: %w", syscall.ETIMEDOUT, err)
	}
	select {
	case m = <-p.got:
		return m, refusalOf(m)
	case <-l.failed:
		return nil, fmt.Errorf("wait for CHALLENGE: %w: %w", syscall.ECONNRESET, l.cause)
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for CHALLENGE: %w: %w", syscall.ETIMEDOUT, context.Cause(ctx))
	}
}

// refusalOf returns an error if m is a REFUSAL.
func refusalOf(m rtrswire.Refusal) error {
	if !m.Valid() {
		return nil
	}
	return fmt.Errorf("the server does not accept the identity of this end, its log has the reason: %w", syscall.Errno(m.Errno()))
}

// sendHello posts the receive of the CHALLENGE and then the HELLO. Owner.
func (l *link) sendHello(c *cltConn, hello []byte) {
	if c.down {
		return
	}
	c.prepost = false // the receives have buffers
	_, err := c.qp.PostRecv([]verbs.RecvWR{{ID: challengeRecv, Buf: l.proofs.receivedEvidence(), LKey: l.proofs.mr.LKey()}})
	if err == nil {
		err = l.sendPart(c, hello)
	}
	if err != nil {
		l.failLink(fmt.Errorf("connection 0: send HELLO: %w", err))
	}
}

// sendPart sends a part of p.sentEvidence(). Owner.
func (l *link) sendPart(c *cltConn, m []byte) error {
	return c.postChain([]verbs.SendWR{{Op: verbs.OpSend, SGEs: []verbs.SGE{{Buf: m, LKey: l.proofs.mr.LKey()}}}})
}

// onChallenge handles the completion of the receive posted for the CHALLENGE.
func (c *cltConn) onChallenge(wc *verbs.WC) {
	if wc.Op != verbs.OpRecv || wc.HasImm {
		c.connFailed(protocolErrorf("immediate %#08x before CHALLENGE", wc.Imm))
		return
	}
	c.link.proofs.got <- c.link.proofs.receivedEvidence()[:wc.ByteLen]
}
