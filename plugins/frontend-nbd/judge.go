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
// connections that are open are judged again, as if their clients came now:
//
//	judge     collects them, and decides on a goroutine of its own
//	sentence  a connection's queue takes the verdict
//	turnAway  no command begins any more
//	depart    all are answered: the client learns the end, and closes its end
//
// Only time is no reason to close one: a certificate that has run out since, or a
// list that has, keeps new connections out.

// leaveTime bounds the time from a verdict to the end of its connection.
const leaveTime = 10 * time.Second

// proof is how a client has proved its identity.
type proof struct {
	identity string
	certs    []*x509.Certificate // the client's first
}

// proofOf returns the proof of a client with TLS, nil for one without, or without a
// certificate.
func proofOf(t *tls.Conn) *proof {
	if t == nil || len(t.ConnectionState().PeerCertificates) == 0 {
		return nil
	}
	return &proof{identity: identityOf(t), certs: t.ConnectionState().PeerCertificates}
}

// verdict is what a connection may do from now on.
type verdict struct {
	end      error // why it is closed; nil: it is not
	readOnly bool
}

// decide returns what the rules give to a client with an identity, empty for none.
func decide(rules *access.Rules, identity, device string) (ok, readOnly bool, why string) {
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

// judge decides about an open connection.
func (p *protection) judge(c *conn) (v verdict) {
	if err := p.lacks(c); err != nil {
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
	ok, readOnly, why := decide(p.rules, identity, c.exp.name)
	if !ok {
		v.end = errors.New("the client is not allowed to have it open any more: " + why)
	}
	v.readOnly = readOnly
	return v
}

// lacks returns an error if a handshake of now would end without an export.
func (p *protection) lacks(c *conn) error {
	switch {
	case c.tunnel == nil:
		if c.listener != "" && p.requires(c.listener) {
			return errNeedsTLS
		}
		return nil
	case p.config.ClientCAs == nil:
		return nil
	case c.proof == nil:
		return errNoCertificate
	}
	return p.holds(c.proof, time.Now())
}

// holds returns an error if a CA of the client's certificate is not known any more or
// has expired, or if the certificate is revoked.
func (p *protection) holds(client *proof, now time.Time) error {
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
	return p.revoked.listed(chains)
}

// judge has all connections judged, but for those of the kernel's client.
func (f *frontend) judge() {
	f.judging.Lock() // the later of two knows the later protection
	defer f.judging.Unlock()
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
		f.execute(c, p.judge(c))
	}
}

// judgeLate has a connection judged that was not with its queue yet when others were.
// p is the protection by which it was let in.
func (f *frontend) judgeLate(c *conn, p *protection) {
	if f.protection.Load() == p {
		return
	}
	f.judging.Lock()
	defer f.judging.Unlock()
	f.execute(c, f.protection.Load().judge(c))
}

// execute gives a verdict to the connection's queue, and sees to its end.
func (f *frontend) execute(c *conn, v verdict) {
	f.post(c.q, func() {
		if c.user == nil {
			c.user = &user{events: &f.users, peer: c.peer}
		}
		c.sentence(v)
	})
	if v.end != nil {
		time.AfterFunc(f.leaveTime, func() { f.post(c.q, func() { c.fail(v.end) }) })
	}
}

// sentence takes a verdict. Queue's thread, as all below.
func (c *conn) sentence(v verdict) {
	readOnly := c.toldReadOnly || v.readOnly
	switch {
	case c.state == connDead || c.leaving != nil:
	case v.end != nil:
		c.q.log.Warn("connection is closed when its requests are answered", "export", c.exp.name, "peer", c.peer, "cause", v.end)
		if c.state == connDraining {
			return // the client has said that it is done
		}
		c.leaving = v.end
		c.turnAway()
	case readOnly != c.readOnly:
		c.readOnly = readOnly
		c.q.log.Info("the rules allow a connection something else than before", "export", c.exp.name, "peer", c.peer, "mode", modeOf(readOnly))
		c.user.judged(c.exp.name, readOnly)
	}
}

// turnAway has no further command begin, if the connection is to end. One that was
// received in part goes on.
func (c *conn) turnAway() {
	if c.leaving != nil && c.state == connOpen && c.cur == nil {
		c.setState(connDraining)
		c.noteEnd()
		c.q.again = true
	}
}

// depart closes a connection whose commands are answered. What the client has sent
// beyond them is read and dropped until it closes its end: the kernel would reset the
// connection otherwise, and the last replies with it.
func (c *conn) depart() {
	switch {
	case c.leaving == nil:
		c.fail(errDone)
	case !c.lingers:
		c.lingers, c.readable = true, true
		c.q.again = true
		unix.Shutdown(c.fd, unix.SHUT_WR)
	case c.readable:
		c.discard()
	}
}

func (c *conn) discard() {
	for range receiveRounds {
		n, err := unix.Read(c.fd, c.stage)
		switch {
		case err == unix.EINTR:
		case err == unix.EAGAIN:
			c.readable = false
			return
		case err != nil || n == 0:
			c.fail(c.leaving)
			return
		}
	}
	c.q.again = true
}
