package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/access"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// When the daemon gives other rules, CAs or lists of revoked certificates, the
// connections that are open are checked again, as if their clients came now:
//
//	recheckAccess  collects them, and decides on a goroutine of its own
//	applyDecision  a connection's queue takes the decision
//	refuseNew  no command begins any more
//	closeIfAnswered  all are answered: the client learns the end, and closes its end
//
// Only time is no reason to close one: a certificate that has run out since, or a
// list that has, keeps new connections out.

// closeGrace bounds the time from a decision to the end of its connection.
const closeGrace = 10 * time.Second

// identityProof is how a client has proved its identity.
type identityProof struct {
	identity string
	certs    []*x509.Certificate // the client's first
}

// proofOf returns the proof of a client with TLS, nil for one without, or without a
// certificate.
func proofOf(t *tls.Conn) *identityProof {
	if t == nil || len(t.ConnectionState().PeerCertificates) == 0 {
		return nil
	}
	return &identityProof{identity: identityOf(t), certs: t.ConnectionState().PeerCertificates}
}

// accessDecision is what a connection may do from now on.
type accessDecision struct {
	end      error // why it is closed; nil: it is not
	readOnly bool
}

// decideAccess returns what the rules give to a client with an identity, empty for none.
func decideAccess(rules *access.Rules, identity, device string) (ok, readOnly bool, why string) {
	c := access.Client{}
	if identity != "" {
		c.Identities = []string{identity}
	}
	if rules.Decide(c, device, blk.ReadWrite).Allowed {
		return true, false, ""
	}
	d := rules.Decide(c, device, blk.ReadOnly)
	return d.Allowed, true, d.Why
}

// decideConn decides about an open connection.
func (p *tlsProtection) decideConn(c *conn) (v accessDecision) {
	if err := p.checkRequired(c); err != nil {
		v.end = fmt.Errorf("the client would not be let in any more: %w", err)
		return v
	}
	if p.rules == nil {
		return v
	}
	identity := ""
	if c.proof != nil && p.config.ClientCAs != nil {
		identity = c.proof.identity
	}
	ok, readOnly, why := decideAccess(p.rules, identity, c.exp.name)
	if !ok {
		v.end = errors.New("the client is not allowed to have it open any more: " + why)
	}
	v.readOnly = readOnly
	return v
}

// checkRequired returns an error if a handshake of now would end without an export.
func (p *tlsProtection) checkRequired(c *conn) error {
	switch {
	case c.tunnel == nil:
		if c.listener != "" && p.requiresTLS(c.listener) {
			return errNeedsTLS
		}
		return nil
	case p.config.ClientCAs == nil:
		return nil
	case c.proof == nil:
		return errNoCertificate
	}
	return p.checkProof(c.proof, time.Now())
}

// checkProof returns an error if a CA of the client's certificate is not known any more or
// has expired, or if the certificate is revoked.
func (p *tlsProtection) checkProof(client *identityProof, now time.Time) error {
	leaf, between := client.certs[0], x509.NewCertPool()
	for _, c := range client.certs[1:] {
		between.AddCert(c)
	}
	if leaf.NotAfter.Before(now) {
		now = leaf.NotAfter
	}
	chains, err := leaf.Verify(x509.VerifyOptions{
		Roots: p.config.ClientCAs, Intermediates: between, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
	if err != nil {
		return err
	}
	return p.revoked.checkListed(chains)
}

// recheckAccess rechecks all connections but for those of the kernel's client.
func (f *frontend) recheckAccess() {
	f.rechecking.Lock() // the later of two knows the later protection
	defer f.rechecking.Unlock()
	p := f.protection.Load()
	if p == nil {
		return
	}
	var conns []*conn
	f.eachQueue(func(q *queue) {
		for _, c := range q.conns {
			if c.disk == nil {
				conns = append(conns, c)
			}
		}
	})
	for _, c := range conns {
		f.postDecision(c, p.decideConn(c))
	}
}

// recheckLate rechecks a connection that was not with its queue yet when the others were rechecked.
// p is the protection by which it was let in.
func (f *frontend) recheckLate(c *conn, p *tlsProtection) {
	if f.protection.Load() == p {
		return
	}
	f.rechecking.Lock()
	defer f.rechecking.Unlock()
	f.postDecision(c, f.protection.Load().decideConn(c))
}

// postDecision gives a decision to the connection's queue, and sees to its end.
func (f *frontend) postDecision(c *conn, v accessDecision) {
	f.runOnQueue(c.q, func() {
		if c.user == nil {
			c.user = &nbdUser{events: &f.users, peer: c.peer}
		}
		c.applyDecision(v)
	})
	if v.end != nil {
		time.AfterFunc(f.closeGrace, func() { f.runOnQueue(c.q, func() { c.closeSocket(v.end) }) })
	}
}

// applyDecision takes a decision. It runs on the queue's thread, as all functions below.
func (c *conn) applyDecision(v accessDecision) {
	readOnly := c.toldReadOnly || v.readOnly
	switch {
	case c.state == connDead || c.leaving != nil:
	case v.end != nil:
		c.q.log.Warn("connection is closed when its requests are answered", "export", c.exp.name, "peer", c.peer, "cause", v.end)
		if c.state == connDraining {
			return // the client has said that it is done
		}
		c.leaving = v.end
		c.refuseNew()
	case readOnly != c.readOnly:
		c.readOnly = readOnly
		c.q.log.Info("the rules allow a connection something else than before", "export", c.exp.name, "peer", c.peer, "mode", modeOf(readOnly))
		c.user.accessChanged(c.exp.name, readOnly)
	}
}

// refuseNew has no further command begin, if the connection is to end. One that was
// received in part goes on.
func (c *conn) refuseNew() {
	if c.leaving != nil && c.state == connOpen && c.cur == nil {
		c.setState(connDraining)
		c.noteEnd()
		c.q.again = true
	}
}

// closeIfAnswered closes a connection whose commands are answered. What the client has sent
// beyond them is read and dropped until it closes its end: the kernel would reset the
// connection otherwise, and the last replies with it.
func (c *conn) closeIfAnswered() {
	switch {
	case c.leaving == nil:
		c.closeSocket(errDone)
	case !c.lingers:
		c.lingers, c.readable = true, true
		c.q.again = true
		unix.Shutdown(c.fd, unix.SHUT_WR)
	case c.readable:
		c.discardCommands()
	}
}

func (c *conn) discardCommands() {
	for range receiveRounds {
		n, err := unix.Read(c.fd, c.stage)
		switch {
		case err == unix.EINTR:
		case err == unix.EAGAIN:
			c.readable = false
			return
		case err != nil || n == 0:
			c.closeSocket(c.leaving)
			return
		}
	}
	c.q.again = true
}
