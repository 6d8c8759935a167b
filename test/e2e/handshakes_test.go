package e2e

import (
	"crypto/tls"
	"encoding/json"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/audit"
	"github.com/rnbd-go/rnbd/test/lab"
)

// auditRecords are the whole records in a file, of one event.
func auditRecords(t *testing.T, file, event string) (out []audit.Record) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		var r audit.Record
		if !strings.HasSuffix(line, "\n") {
			break
		}
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		if r.Event == event {
			out = append(out, r)
		}
	}
	return out
}

// TestHandshakesThatFailAreAudited: a client that TLS refuses has a line in the audit
// log, of the server and of the client daemon. Hundreds of them have a few.
func TestHandshakesThatFailAreAudited(t *testing.T) {
	lab.Tool(t, "nbdinfo")
	p, other := newNBDPKI(t), newNBDPKI(t)
	other.issue("stranger")
	p.issue("member")
	dir := t.TempDir()
	serverLog, clientLog := filepath.Join(dir, "server.json"), filepath.Join(dir, "client.json")
	files := func(name string) []string {
		return []string{"--tls", "require", "--tls-ca", p.path("ca.pem"), "--tls-cert", p.path(name + ".pem"), "--tls-key", p.path(name + ".key")}
	}
	r := newRig(t, rigOptions{size: 1 << 20,
		server: lab.ServerOptions{Extra: append(files("front"), "--audit", serverLog)},
		client: lab.ClientOptions{Extra: append(append(files("member"), p.flags("require")...), "--tls-name", "localhost", "--audit", clientLog)}})
	addr := r.server.Addrs[0]
	pair, err := tls.LoadX509KeyPair(other.path("stranger.pem"), other.path("stranger.key"))
	if err != nil {
		t.Fatal(err)
	}
	attempt := func(with func(net.Conn)) {
		t.Helper()
		conn, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(30 * time.Second))
		with(conn)
		conn.Read(make([]byte, 1))
	}
	attempt(func(conn net.Conn) {
		c := tls.Client(conn, &tls.Config{InsecureSkipVerify: true, GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }})
		if c.Handshake() == nil {
			c.Read(make([]byte, 1))
		}
	})
	const plain = 300
	for range plain {
		attempt(func(conn net.Conn) { conn.Write([]byte("\x1b[2J rnbd\n")) })
	}
	sum := func() (lines int, n uint64) {
		for _, rec := range auditRecords(t, serverLog, audit.EventHandshake) {
			lines, n = lines+1, n+max(rec.LeftOut, 1)
		}
		return lines, n
	}
	eventually(t, "the audit log has all of them", func() bool { _, n := sum(); return n == plain+1 })
	if lines, _ := sum(); lines > 50 { // a few windows of time
		t.Errorf("%d lines for %d handshakes", lines, plain+1)
	}
	first := auditRecords(t, serverLog, audit.EventHandshake)
	if rec := first[0]; rec.Claimed != "dns:localhost" || rec.Identity != "" || !strings.Contains(rec.Result, "unknown authority") || rec.Fabric != "iwarp" || rec.Server != addr || rec.Client == "" {
		t.Errorf("%+v", rec)
	}
	if rec := first[1]; !strings.Contains(rec.Result, "does not begin with TLS") || rec.Claimed != "" {
		t.Errorf("%+v", rec)
	}

	if err := exec.Command("nbdinfo", r.tcpURI()).Run(); err == nil {
		t.Error("an NBD client without TLS is served")
	}
	if err := exec.Command("nbdinfo", r.nbds(other.folder("stranger"))).Run(); err == nil {
		t.Error("an NBD client of another CA is served")
	}
	eventually(t, "the audit log has the NBD clients", func() bool { return len(auditRecords(t, clientLog, audit.EventHandshake)) >= 2 })
	for _, rec := range auditRecords(t, clientLog, audit.EventHandshake) {
		if rec.Fabric != "nbd" || !strings.Contains(rec.Result, "TLS") || !strings.HasPrefix(rec.Client, "127.0.0.1:") || rec.Server == "" {
			t.Errorf("%+v", rec)
		}
	}
	key, err := os.ReadFile(p.path("front.key"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{serverLog, clientLog} {
		b, err := os.ReadFile(file)
		if err != nil || strings.Contains(string(b), strings.Split(string(key), "\n")[1]) || strings.Contains(string(b), "\x1b") {
			t.Errorf("%s: %v, or bytes that must not be there", file, err)
		}
	}
}
