package e2e

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/tlsauth"
)

// TestBadInputOpensNoDoor: of everything that strangers try at a running server,
// and of every wrong file that its operator gives it, nothing lets a stranger open
// a device; the good still do, and their session goes on.
func TestBadInputOpensNoDoor(t *testing.T) {
	h := newHouse(t)
	h.stillGood("the start")
	if err := h.openAs(&tlsauth.Files{PSK: h.keys}, "", "disk.img", "good-key"); err != nil {
		t.Fatalf("a good client with a shared key: %v", err)
	}
	h.strangers()
	h.rawStrangers()
	h.wrongFiles()
	h.stop()
	if err := h.fault.Load(); err != nil || h.reads.Load() == 0 {
		t.Errorf("the load: %d reads, %v", h.reads.Load(), err)
	}
	if strings.Contains(h.server.Log(), "panic") {
		t.Error("the server has panicked")
	}
	opens := h.opens()
	if len(opens) < h.opened {
		t.Errorf("%d OPENs are in the audit log, want %d of the good", len(opens), h.opened)
	}
	for _, o := range opens {
		if o != "dns:"+goodName+" disk.img" && o != "psk:"+goodKey+" disk.img" {
			t.Errorf("opened by bad input: %s", o)
		}
	}
}

// stranger is a client that must not open a device.
type stranger struct {
	files  *tlsauth.Files // nil: without TLS
	expect string
	device string // default disk.img
	access bool   // TLS lets it in, the rules do not
}

func (h *house) strangers() {
	own := func(name string, change func(*x509.Certificate)) *tlsauth.Files {
		f := h.issue(h.ca, name, change)
		return &f
	}
	cn := func(name string) func(*x509.Certificate) {
		return func(c *x509.Certificate) { c.Subject.CommonName = name }
	}
	foreign := h.issue(h.other, "good", named(goodName))
	revoked := own("revoked", func(c *x509.Certificate) { named(goodName)(c); c.SerialNumber.SetInt64(99) })
	key := func(identity string) *tlsauth.Files {
		return &tlsauth.Files{PSK: sharedKey(h.t, h.t.TempDir(), identity)}
	}
	swapped := h.good
	swapped.Key = own("swapped", named(goodName)).Key
	for name, s := range map[string]stranger{
		"no TLS":                      {},
		"another CA of the same name": {files: &foreign},
		"a revoked certificate":       {files: revoked},
		"an expired certificate":      {files: own("expired", func(c *x509.Certificate) { named(goodName)(c); c.NotAfter = time.Now().Add(-time.Minute) })},
		"a clock off by a day": {files: own("early", func(c *x509.Certificate) {
			named(goodName)(c)
			c.NotBefore, c.NotAfter = time.Now().Add(23*time.Hour), time.Now().Add(48*time.Hour)
		})},
		"a certificate of servers": {files: own("use", func(c *x509.Certificate) {
			named(goodName)(c)
			c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
		})},
		"the key of another":       {files: &swapped},
		"an empty identity":        {files: own("empty", cn(""))},
		"a newline in an identity": {files: own("newline", named(goodName+"\nx"))},
		"a pattern as identity":    {files: own("star", named("*"))},
		"a wildcard name":          {files: own("wildcard", named("*.example"))},
		"a server of another name": {files: &h.good, expect: "elsewhere.example"},
		"another key of the good":  {files: key(goodKey)},
		"a key that is not known":  {files: key("stranger")},
		"an unknown identity":      {files: own("unknown", named("stranger.example")), access: true},
		"a longer identity":        {files: own("longer", named(goodName+".evil")), access: true},
		"another case":             {files: own("case", named("GOOD.example")), access: true},
		"a common name":            {files: own("common", cn(goodName)), access: true},
		"a common name like a key": {files: own("keylike", cn("psk:good")), access: true},
		"a second name":            {files: own("second", func(c *x509.Certificate) { c.DNSNames = []string{"first.example", goodName} }), access: true},
		"another device":           {files: &h.good, device: "other.img", access: true},
		"a device above":           {files: &h.good, device: "../disk.img", access: true},
		"a newline in a device":    {files: &h.good, device: "x\ndisk.img", access: true},
		"a pattern as device":      {files: &h.good, device: "*", access: true},
	} {
		if s.device == "" {
			s.device = "disk.img"
		}
		switch err := h.openAs(s.files, s.expect, s.device, "bad-"+strings.ReplaceAll(name, " ", "-")); {
		case err == nil:
			h.t.Errorf("%s: opened", name)
		case s.access != errors.Is(err, syscall.EACCES):
			h.t.Errorf("%s: %v; EACCES: want %t", name, err, s.access)
		}
		h.stillGood(name)
	}
	// The names of sessions of the good are theirs.
	other := own("owner", func(c *x509.Certificate) { c.DNSNames = []string{"stranger.example"} })
	if err := h.openAs(other, "", "disk.img", "good-load"); err == nil {
		h.t.Error("a session of another identity: opened")
	}
	h.stillGood("a session name of another")
}

// rawStrangers speak TCP or TLS themselves. None of them gets an answer of RTRS.
func (h *house) rawStrangers() {
	goodAuth, err := tlsauth.New(tlsauth.Config{Files: h.good, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		h.t.Fatal(err)
	}
	huge := h.issue(h.ca, "huge", func(c *x509.Certificate) {
		named(goodName)(c)
		for i := range 30000 {
			c.DNSNames = append(c.DNSNames, fmt.Sprintf("name-%d.example", i))
		}
	})
	handshake := func(cfg *tls.Config) func(net.Conn) io.ReadWriter {
		return func(conn net.Conn) io.ReadWriter {
			cfg.InsecureSkipVerify = true
			c := tls.Client(conn, cfg)
			c.Handshake() // the server may refuse after it
			return c
		}
	}
	plain := func(b []byte) func(net.Conn) io.ReadWriter {
		return func(conn net.Conn) io.ReadWriter { conn.Write(b); return conn }
	}
	var stalled []net.Conn
	for name, talk := range map[string]func(net.Conn) io.ReadWriter{
		"garbage":                   plain(bytes.Repeat([]byte{0xa5}, 4096)),
		"garbage behind a header":   plain(append([]byte{22, 3, 1, 0x40, 0}, bytes.Repeat([]byte{0xff}, 1<<14)...)),
		"a record that is too long": plain([]byte{22, 3, 1, 0xff, 0xff}),
		"TLS 1.2":                   handshake(&tls.Config{MaxVersion: tls.VersionTLS12}),
		"no certificate":            handshake(&tls.Config{}),
		"a huge certificate": func(conn net.Conn) io.ReadWriter {
			return handshake(&tls.Config{Certificates: []tls.Certificate{h.pair(huge)}})(conn)
		},
		"another protocol": handshake(&tls.Config{Certificates: []tls.Certificate{h.pair(h.good)}, NextProtos: []string{"h2"}}),
		"a good certificate and garbage": func(conn net.Conn) io.ReadWriter {
			c, err := goodAuth.Client(conn, "")
			if err != nil {
				h.t.Error(err)
				return conn
			}
			c.Write(bytes.Repeat([]byte("x"), 1000))
			return c
		},
	} {
		conn := h.dial()
		rw := talk(conn)
		rw.Write([]byte("MPA ID Req Frame\x50\x02\x00\x00"))
		if b, err := io.ReadAll(rw); bytes.Contains(b, []byte("MPA ID Rep")) || errors.Is(err, os.ErrDeadlineExceeded) {
			h.t.Errorf("%s: answered %q, %v", name, b, err)
		}
		conn.Close()
		stall := h.dial() // in the middle of a handshake, until the end of this
		stall.Write([]byte{22, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3})
		stalled = append(stalled, stall)
		h.stillGood(name)
	}
	for _, conn := range stalled {
		conn.Close()
	}
}

func (h *house) dial() net.Conn {
	h.t.Helper()
	conn, err := net.Dial("tcp", h.server.Addrs[0])
	if err != nil {
		h.t.Fatal(err)
	}
	conn.SetDeadline(time.Now().Add(enough))
	return conn
}

func (h *house) pair(f tlsauth.Files) tls.Certificate {
	h.t.Helper()
	c, err := tls.LoadX509KeyPair(f.Cert, f.Key)
	if err != nil {
		h.t.Fatal(err)
	}
	return c
}

// wrongFile is what an operator may give the server.
type wrongFile struct {
	file, text string
	want       string // in the error of the reload; empty: the reload works
	log        string // in the log of the server
	closed     bool   // the good are refused, too
}

func (h *house) wrongFiles() {
	ca, cert, key := read(h.t, h.ca.CA()), read(h.t, h.file("cert.pem")), read(h.t, h.file("key.pem"))
	half := func(s string) string { return s[:len(s)/2] }
	many := func(n int) string {
		var b strings.Builder
		b.WriteString("access:\n")
		for i := range n {
			fmt.Fprintf(&b, "- {identity: [tenant-%d], device: [\"t%[1]d/**\"], allow: rw}\n", i)
		}
		return b.String() + strings.TrimPrefix(goodRules, "access:\n")
	}
	rule := func(text string) string { return goodRules + "- {" + text + "}\n" }
	const rules = "conf.d/rules.yaml"
	others := h.issue(h.other, "others", named(goodName))
	unknown := h.issue(h.ca, "unknown2", named("stranger.example"))
	for name, w := range map[string]wrongFile{
		"half a PEM of the CA":          {file: "ca.pem", text: half(ca), want: "damaged or cut off"},
		"half a PEM behind a whole one": {file: "ca.pem", text: ca + half(read(h.t, h.other.CA())), want: "damaged or cut off"},
		"an empty CA file":              {file: "ca.pem", want: "no \"CERTIFICATE\""},
		"a key as CA":                   {file: "ca.pem", text: key, want: "want \"CERTIFICATE\""},
		"half a certificate":            {file: "cert.pem", text: half(cert), want: "certificate"},
		"half a key":                    {file: "key.pem", text: half(key), want: "key.pem"},
		"the key of another":            {file: "key.pem", text: read(h.t, others.Key), want: "does not match"},
		"garbage as a list of revoked":  {file: "crl.pem", text: "garbage", want: "no \"X509 CRL\""},
		"shared keys that are short":    {file: "keys", text: "stranger:0011\n", want: "at least 16"},
		"a shared key for everybody":    {file: "keys", text: "*:" + strings.Repeat("00", 32) + "\n", want: "has the character"},
		"a shared key for nobody":       {file: "keys", text: ":" + strings.Repeat("00", 32) + "\n", want: "is empty"},
		"a key that is misspelt":        {file: rules, text: rule("device: [\"**\"], alow: rw"), want: "alow"},
		"an access that is misspelt":    {file: rules, text: rule("device: [\"**\"], allow: RW"), want: "none, ro, rw or migration"},
		"an address that is none":       {file: rules, text: rule("address: [127.0.0.1/8], allow: rw"), want: "127.0.0.0/8"},
		"a pattern that is cut off":     {file: rules, text: rule("device: [\"[a\"], allow: rw"), want: "bracket"},
		"a newline in a pattern":        {file: rules, text: rule("identity: [\"a\\nb\"], allow: rw"), want: "control characters"},
		"an empty pattern":              {file: rules, text: rule("identity: [\"\"], allow: rw"), want: "it is empty"},
		"half a file of rules":          {file: rules, text: goodRules[:len("access:\n- {identity: [\"dns:good")], want: "rules.yaml"},
		"rules that are missing":        {file: rules, text: "# nothing\n", want: "write access: []"},
		"a list that is null":           {file: rules, text: "access:\n", want: "write access: []"},
		"10,000 rules":                  {file: rules, text: many(10_000)},
		"an expired certificate":        {file: "cert.pem", text: cert}, // see below
	} {
		if name == "an expired certificate" {
			late := h.issue(h.ca, "late", func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) })
			h.put("key.pem", read(h.t, late.Key))
			w.text, w.closed, w.log = read(h.t, late.Cert), true, "peers will refuse it"
		}
		before := read(h.t, h.file(w.file))
		h.put(w.file, w.text)
		h.reload(w.want)
		h.checkDoors(name, w, &others, &unknown)
		h.put("key.pem", key)
		h.put(w.file, before)
		h.reload("")
		h.stillGood("the end of " + name)
	}
	h.otherWrongFiles(&others, &unknown)
}

// checkDoors tries to come in while the server has a wrong file.
func (h *house) checkDoors(name string, w wrongFile, others, unknown *tlsauth.Files) {
	h.t.Helper()
	for who, f := range map[string]*tlsauth.Files{"another CA": others, "an unknown identity": unknown, "nobody": nil} {
		if err := h.openAs(f, "", "disk.img", "bad-"+strings.ReplaceAll(name, " ", "-")); err == nil {
			h.t.Errorf("%s: opened by %s", name, who)
		}
	}
	if !w.closed {
		h.stillGood(name)
	} else if err := h.openAs(&h.good, "", "disk.img", "closed"); err == nil {
		h.t.Errorf("%s: opened by the good, too", name)
	}
	eventually(h.t, name+" is in the log", func() bool {
		if strings.Contains(h.server.Log(), w.log) {
			return true
		}
		_ = h.openAs(&h.good, "", "disk.img", "good-again") // the log leaves lines out when there are many
		return false
	})
}

// otherWrongFiles are those that are no mistake of a text.
func (h *house) otherWrongFiles(others, unknown *tlsauth.Files) {
	// A key that others can read is used, and warned of.
	if err := os.Chmod(h.file("key.pem"), 0o644); err != nil {
		h.t.Fatal(err)
	}
	h.reload("")
	h.checkDoors("a key that others can read", wrongFile{log: "can be read by other users"}, others, unknown)

	// A list of revoked certificates that is out of date lets nobody in.
	h.revoke(h.ca, time.Now().Add(-time.Minute))
	h.checkDoors("a list that is out of date", wrongFile{log: "out of date", closed: true}, others, unknown)
	h.revoke(h.ca, time.Now().Add(time.Hour), 99)
	h.stillGood("a list that is out of date")

	// Another CA comes and goes. Meanwhile the certificates of both are good.
	ca := read(h.t, h.file("ca.pem"))
	h.put("ca.pem", ca+read(h.t, h.other.CA()))
	h.stillGood("a second CA")
	if err := h.openAs(others, "", "disk.img", "good-others"); err != nil {
		h.t.Errorf("with the CA of another: %v", err)
	}
	h.put("ca.pem", ca)
	h.checkDoors("a CA that has gone", wrongFile{}, others, unknown)
}
