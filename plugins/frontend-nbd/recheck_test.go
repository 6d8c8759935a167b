package main

import (
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

const errPERM = 1 // NBD_EPERM

// ends reports whether the front end closes the connection of c. c is running.
func ends(c *client) bool {
	for range 2000 {
		c.mu.Lock()
		err := c.err
		c.mu.Unlock()
		if err != nil {
			c.conn.Close()
			return true
		}
		time.Sleep(10 * time.Millisecond)
	}
	return false
}

// lastEvent takes the events until one of a kind comes, and returns it.
func lastEvent(t *testing.T, f *frontend, kind string) (last plugin.UserEvent) {
	t.Helper()
	eventually(t, "the event "+kind, func() bool {
		events, _ := f.TakeUsers()
		for _, e := range events {
			if e.Event == kind {
				last = e
			}
		}
		return last.Event == kind
	})
	return last
}

func allow(identity, what string) plugin.UserRule {
	return plugin.UserRule{Identity: []string{identity}, Allow: what}
}

// TestJudge_Ends: a connection is closed if its client would not be let in any more,
// and goes on if it would be, or if only time has passed.
func TestJudge_Ends(t *testing.T) {
	for name, c := range map[string]struct {
		change func(a *authority, s *plugin.TLS, number int64)
		reason string // empty: it goes on
	}{
		"no rule fits any more": {func(_ *authority, s *plugin.TLS, _ int64) { s.Rules = []plugin.UserRule{allow("dns:other", "rw")} }, "no rule fits"},
		"the first rule says none": {func(_ *authority, s *plugin.TLS, _ int64) {
			s.Rules = []plugin.UserRule{allow("dns:web", "none"), allow("**", "rw")}
		}, "allows nothing"},
		"another rule fits": {func(_ *authority, s *plugin.TLS, _ int64) { s.Rules = []plugin.UserRule{allow("dns:w*", "rw")} }, ""},
		"no rules":          {func(_ *authority, s *plugin.TLS, _ int64) { s.Rules = nil }, ""},
		"it is revoked": {func(a *authority, s *plugin.TLS, n int64) {
			s.ClientCRL = a.revoke(time.Now().Add(time.Hour), n)
		}, "is revoked"},
		"it is revoked by a list that has run out": {func(a *authority, s *plugin.TLS, n int64) {
			s.ClientCRL = a.revoke(time.Now().Add(-time.Minute), n)
		}, "is revoked"},
		"another is revoked": {func(a *authority, s *plugin.TLS, n int64) {
			s.ClientCRL = a.revoke(time.Now().Add(time.Hour), n+100)
		}, ""},
		"the list has run out": {func(a *authority, s *plugin.TLS, _ int64) { s.ClientCRL = a.revoke(time.Now().Add(-time.Minute)) }, ""},
		"its CA is gone":       {func(a *authority, s *plugin.TLS, _ int64) { s.ClientCA = newAuthority(t).pem }, "unknown authority"},
		"another CA is there, too": {func(a *authority, s *plugin.TLS, _ int64) {
			s.ClientCA = append(append([]byte{}, newAuthority(t).pem...), a.pem...)
		}, ""},
		"another certificate of the front end": {func(a *authority, s *plugin.TLS, _ int64) { *s = a.server(true, true) }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAuthority(t)
			s := a.server(true, true)
			s.Rules = []plugin.UserRule{allow("dns:web", "rw")}
			r, addr := tlsRig(t, rigConfig{}, s)
			number := a.next
			client := running(secured(t, addr, a.member("web"), true))
			client.write(0, make([]byte, 4096))
			c.change(a, &s, number)
			must(t, "set TLS", r.f.SetTLS(t.Context(), s))
			if c.reason == "" {
				if client.write(0, make([]byte, 4096)) != 0 || client.read(0, make([]byte, 4096)) != 0 {
					t.Error("the client is not served")
				}
				return
			}
			if !ends(client) {
				t.Fatal("the connection goes on")
			}
			e := lastEvent(t, r.f, plugin.UserForced)
			if !strings.Contains(e.Reason, c.reason) || e.Device != "disk0" || e.Identity != "dns:web" || e.Peer == "" || e.Listener == "" {
				t.Errorf("event: %+v", e)
			}
			eventually(t, "no opener", func() bool { return r.f.Openers(0) == 0 })
		})
	}
}

// TestJudge_TLSIsRequired: a client without TLS, or without a certificate, is closed
// when the listener serves such clients no more, also by another process.
func TestJudge_TLSIsRequired(t *testing.T) {
	for name, c := range map[string]struct {
		first  func(a *authority) plugin.TLS // zero: TLS is off
		secure bool                          // the client uses it
		then   func(a *authority, listener string) plugin.TLS
		reason string // empty: it goes on
	}{
		"off, then required": {
			then:   func(a *authority, _ string) plugin.TLS { return a.server(true, false) },
			reason: "without TLS",
		},
		"allowed, then required": {
			first:  func(a *authority) plugin.TLS { return a.server(false, true) },
			then:   func(a *authority, _ string) plugin.TLS { return a.server(true, true) },
			reason: "without TLS",
		},
		"off, then allowed": {
			then: func(a *authority, _ string) plugin.TLS { return a.server(false, true) },
		},
		"required, but not on the listener": {
			then: func(a *authority, listener string) plugin.TLS {
				s := a.server(true, true)
				s.Plain = []string{listener}
				return s
			},
		},
		"no certificate, then one is required": {
			first:  func(a *authority) plugin.TLS { return a.server(true, false) },
			secure: true,
			then:   func(a *authority, _ string) plugin.TLS { return a.server(true, true) },
			reason: "no certificate",
		},
		"no certificate, and none is required": {
			first:  func(a *authority) plugin.TLS { return a.server(false, false) },
			secure: true,
			then:   func(a *authority, _ string) plugin.TLS { return a.server(true, false) },
		},
	} {
		for _, moved := range []bool{false, true} {
			if moved && c.secure {
				continue // such a connection is handed to no process
			}
			t.Run(fmt.Sprintf("%s, moved=%t", name, moved), func(t *testing.T) {
				a := newAuthority(t)
				l := newRelay(t, rigConfig{})
				r := l.rigs[0]
				if c.first != nil {
					must(t, "set TLS", r.f.SetTLS(t.Context(), c.first(a)))
				}
				addr := r.listenOn("tcp", "127.0.0.1:0")
				var client *client
				if c.secure {
					client = running(secured(t, addr, a.client(), true))
				} else {
					client = running(dial(t, "tcp", addr, "disk0", true))
				}
				listener := r.firstConn().listener
				if listener == "" {
					t.Fatal("nobody knows by which listener it came")
				}
				if moved {
					all := release(t, r)
					r = l.rigs[1]
					must(t, "set TLS", r.f.SetTLS(t.Context(), c.then(a, listener)))
					serve(t, r, all)
				} else {
					must(t, "set TLS", r.f.SetTLS(t.Context(), c.then(a, listener)))
				}
				if c.reason == "" {
					if client.write(0, make([]byte, 4096)) != 0 {
						t.Error("the client is not served")
					}
					return
				}
				if !ends(client) {
					t.Fatal("the connection goes on")
				}
				if e := lastEvent(t, r.f, plugin.UserForced); !strings.Contains(e.Reason, c.reason) || e.Peer == "" {
					t.Errorf("event: %+v", e)
				}
			})
		}
	}
}

// TestJudge_Time: a certificate that has run out since ends no connection, and a CA
// that has does.
func TestJudge_Time(t *testing.T) {
	a := newAuthority(t)
	s := a.server(true, true)
	p, err := newProtection(&s)
	must(t, "protection", err)
	late := time.Now().Add(30 * time.Minute)
	for name, c := range map[string]struct {
		until time.Time
		now   time.Time
		want  string
	}{
		"valid":       {late, time.Now(), ""},
		"expired":     {late, late.Add(10 * time.Hour), ""},
		"CA expired":  {time.Now().Add(9 * time.Hour), time.Now().Add(2 * time.Hour), "expired"},
		"both, later": {time.Now().Add(9 * time.Hour), time.Now().Add(10 * time.Hour), "expired"},
	} {
		cert, key := a.issue("web", func(cert *x509.Certificate) { cert.NotAfter = c.until })
		pair, err := (with(t, a.client(), cert, key)).GetClientCertificate(nil)
		must(t, "load", err)
		err = p.checkProof(&identityProof{certs: []*x509.Certificate{pair.Leaf}}, c.now)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestJudge_ReadOnly: a client that was told that it may write gets EPERM when it may
// not, and what it wrote before is there. One that was told that it may not write
// stays as it is.
func TestJudge_ReadOnly(t *testing.T) {
	a := newAuthority(t)
	s := a.server(true, true)
	r, addr := tlsRig(t, rigConfig{}, s)
	set := func(what string) {
		t.Helper()
		s.Rules = []plugin.UserRule{allow("dns:web", what)}
		must(t, "set TLS", r.f.SetTLS(t.Context(), s))
		r.onQueue(0, func(*queue) {})
	}
	writer := running(secured(t, addr, a.member("web"), true))
	set("ro")
	if e := lastEvent(t, r.f, plugin.UserJudged); e.Mode != "ro" || e.Device != "disk0" || e.Identity != "dns:web" || !strings.Contains(e.Reason, "EPERM") {
		t.Errorf("event: %+v", e)
	}
	reader := running(secured(t, addr, a.member("web"), true))
	for cmd, code := range map[uint16]uint32{
		nbdwire.CmdWrite: writer.write(0, make([]byte, 4096)), nbdwire.CmdTrim: writer.do(nbdwire.CmdTrim, 0, 0, 4096, nil), nbdwire.CmdWriteZeroes: writer.do(nbdwire.CmdWriteZeroes, 0, 0, 4096, nil),
	} {
		if code != errPERM {
			t.Errorf("command %d ends with %d", cmd, code)
		}
	}
	if writer.read(0, make([]byte, 4096)) != 0 || writer.do(nbdwire.CmdFlush, 0, 0, 0, nil) != 0 {
		t.Error("a read or a flush fails")
	}
	set("rw")
	if e := lastEvent(t, r.f, plugin.UserJudged); e.Mode != "rw" {
		t.Errorf("event: %+v", e)
	}
	if code := writer.write(0, make([]byte, 4096)); code != 0 {
		t.Errorf("a write ends with %d", code)
	}
	if code := reader.write(0, make([]byte, 4096)); code != errPERM {
		t.Errorf("a write of the reader ends with %d", code)
	}
}

// TestJudge_RequestsInFlight: they are answered before the end, further ones have no
// effect.
func TestJudge_RequestsInFlight(t *testing.T) {
	a := newAuthority(t)
	s := a.server(true, true)
	r, addr := tlsRig(t, rigConfig{}, s)
	client := running(secured(t, addr, a.member("web"), true))
	r.hosts[0].hold.Store(true)
	calls := []*call{client.start(nbdwire.CmdWrite, 0, 0, 4096, []byte(strings.Repeat("a", 4096))), client.start(nbdwire.CmdRead, 0, 8192, 4096, make([]byte, 4096))}
	eventually(t, "the device has both", func() (both bool) {
		r.onQueue(0, func(q *queue) { both = len(q.conns) == 1 && q.conns[0].unanswered == 2 })
		return both
	})
	s.Rules = []plugin.UserRule{allow("dns:other", "rw")}
	must(t, "set TLS", r.f.SetTLS(t.Context(), s))
	r.onQueue(0, func(*queue) {}) // the queue has the decision
	late := client.start(nbdwire.CmdWrite, 0, 16384, 4096, []byte(strings.Repeat("b", 4096)))
	r.hosts[0].hold.Store(false)
	for i, call := range calls {
		if code, err := call.wait(); code != 0 || err != nil {
			t.Errorf("request %d: %d, %v", i, code, err)
		}
	}
	if _, err := late.wait(); err == nil {
		t.Error("a request after the decision is answered")
	}
	if !ends(client) {
		t.Error("the connection goes on")
	}
	if at := r.disks[0].at(0, 1); at[0] != 'a' {
		t.Error("the write before has no effect")
	}
	if at := r.disks[0].at(16384, 1); at[0] != 0 {
		t.Error("the write after has an effect")
	}
}

// firstConn waits until the first queue has a connection, and returns it.
func (r *rig) firstConn() (c *conn) {
	r.t.Helper()
	eventually(r.t, "the connection is served", func() bool {
		r.onQueue(0, func(q *queue) {
			if len(q.conns) > 0 {
				c = q.conns[0]
			}
		})
		return c != nil
	})
	return c
}

// plainRules are rules for clients without TLS.
func plainRules(a *authority, what string) plugin.TLS {
	s := a.server(false, true)
	s.Rules = []plugin.UserRule{{Allow: what}}
	return s
}

// TestJudge_EndIsBounded: neither a request that hangs, nor a client that goes on
// sending, or that does not close its end, holds the connection.
func TestJudge_EndIsBounded(t *testing.T) {
	for name, c := range map[string]func(t *testing.T, r *rig, conn net.Conn){
		"a request hangs": func(t *testing.T, r *rig, conn net.Conn) {
			r.hosts[0].hold.Store(true)
			conn.Write(command(nbdwire.CmdRead, 0, 1, 0, 512))
			t.Cleanup(func() { r.hosts[0].hold.Store(false) })
			eventually(t, "it is with the device", func() (sent bool) {
				r.onQueue(0, func(q *queue) { sent = q.conns[0].unanswered == 1 })
				return sent
			})
		},
		"a payload does not come": func(t *testing.T, r *rig, conn net.Conn) {
			conn.Write(append(command(nbdwire.CmdWrite, 0, 1, 0, 4096), 1, 2, 3))
			eventually(t, "it is begun", func() (begun bool) {
				r.onQueue(0, func(q *queue) { begun = q.conns[0].cur != nil })
				return begun
			})
		},
		"the client stays": func(*testing.T, *rig, net.Conn) {},
		"the client sends": func(_ *testing.T, _ *rig, conn net.Conn) {
			go func() {
				for {
					if _, err := conn.Write(command(nbdwire.CmdRead, 0, 1, 0, 512)); err != nil {
						return
					}
				}
			}()
		},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAuthority(t)
			r, _ := tlsRig(t, rigConfig{}, plainRules(a, "rw"))
			r.f.closeGrace = 300 * time.Millisecond
			client := dial(t, "unix", r.addr, "disk0", false)
			r.firstConn()
			c(t, r, client.conn)
			must(t, "set TLS", r.f.SetTLS(t.Context(), plainRules(a, "none")))
			dead := func() (n int) {
				r.onQueue(0, func(q *queue) {
					for _, c := range q.conns {
						if c.state != connDead {
							n++
						}
					}
				})
				return n
			}
			eventually(t, "the connection is closed", func() bool { return dead() == 0 })
			if e := lastEvent(t, r.f, plugin.UserForced); !strings.Contains(e.Reason, "allows nothing") {
				t.Errorf("event: %+v", e)
			}
		})
	}
}

// TestJudge_TheClientLearnsTheEnd: a client without TLS reads the end of the stream.
func TestJudge_TheClientLearnsTheEnd(t *testing.T) {
	a := newAuthority(t)
	r, _ := tlsRig(t, rigConfig{}, plainRules(a, "rw"))
	client := dial(t, "unix", r.addr, "disk0", false)
	must(t, "set TLS", r.f.SetTLS(t.Context(), plainRules(a, "none")))
	client.conn.SetReadDeadline(time.Now().Add(enough))
	if b, err := io.ReadAll(client.conn); len(b) != 0 || err != nil {
		t.Errorf("% x, %v", b, err)
	}
	client.conn.Close()
	eventually(t, "no opener", func() bool { return r.f.Openers(0) == 0 })
}

// TestJudge_WhileAClientComes: a connection that was let in by the rules before, and
// reaches its queue after the others were rechecked, is checked by the rules of now.
func TestJudge_WhileAClientComes(t *testing.T) {
	a := newAuthority(t)
	r, _ := tlsRig(t, rigConfig{}, plainRules(a, "rw"))
	client := running(dial(t, "unix", r.addr, "disk0", false))
	c := r.firstConn()
	before := r.f.protection.Load()
	s := plainRules(a, "none")
	now, err := newProtection(&s)
	must(t, "protection", err)
	r.f.recheckLate(c, before)
	if code := client.read(0, make([]byte, 512)); code != 0 {
		t.Errorf("under the same rules: %d", code)
	}
	r.f.protection.Store(now)
	r.f.recheckLate(c, before)
	if !ends(client) {
		t.Error("the connection goes on")
	}
}

// TestJudge_HandedOver: a connection that another process goes on with is checked by
// that one's rules, and again when they change.
func TestJudge_HandedOver(t *testing.T) {
	a := newAuthority(t)
	l := newRelay(t, rigConfig{})
	set := func(i int, what string) {
		t.Helper()
		must(t, "set TLS", l.rigs[i].f.SetTLS(t.Context(), plainRules(a, what)))
		l.rigs[i].onQueue(0, func(*queue) {})
	}
	write := func(c *client, want uint32) {
		t.Helper()
		if code := c.write(0, make([]byte, 512)); code != want {
			t.Errorf("a write ends with %d, want %d", code, want)
		}
	}
	set(0, "rw")
	set(1, "rw")
	client := l.rigs[0].connect(true)
	write(client, 0)
	set(0, "ro")
	write(client, errPERM)
	l.move() // told rw, narrowed there, and rw here
	l.rigs[1].onQueue(0, func(*queue) {})
	write(client, 0)
	set(1, "ro")
	write(client, errPERM)
	l.rigs[0].listen()
	set(0, "none")
	all := release(t, l.rigs[1])
	serve(t, l.rigs[0], all)
	if !ends(client) {
		t.Error("the connection goes on")
	}
	lastEvent(t, l.rigs[0].f, plugin.UserForced)
}
