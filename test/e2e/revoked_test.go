package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/audit"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

// TestTLSIdentitiesAreJudgedAnew: a client whose CA is taken away, and that has a
// certificate of another one by then, connects again and no request fails; one whose
// certificate is revoked loses its session.
func TestTLSIdentitiesAreJudgedAnew(t *testing.T) {
	old, next := newNBDPKI(t), newNBDPKI(t)
	dir := t.TempDir()
	file := func(name string) string { return filepath.Join(dir, name) }
	install := func(name string, from ...string) {
		t.Helper()
		var all []byte
		for _, f := range from {
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, b...)
		}
		if err := os.WriteFile(file("next"), all, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file("next"), file(name)); err != nil {
			t.Fatal(err)
		}
	}
	old.issue("member")
	next.issue("member")
	list := next.revocations()
	old.revocations()(file("old.crl"))
	list(file("next.crl"))
	install("ca.pem", old.path("ca.pem"), next.path("ca.pem"))
	install("crl.pem", file("old.crl"), file("next.crl"))
	install("member.pem", old.path("member.pem"))
	install("member.key", old.path("member.key"))
	r := newRig(t, rigOptions{size: 1 << 20,
		server: lab.ServerOptions{Extra: []string{"--tls", "require", "--tls-ca", file("ca.pem"), "--tls-crl", file("crl.pem"), "--tls-cert", old.path("front.pem"), "--tls-key", old.path("front.key"),
			"--access-grace", "1s", "--audit", file("audit.json")}},
		client: lab.ClientOptions{Extra: []string{"--tls", "require", "--tls-ca", old.path("ca.pem"), "--tls-cert", file("member.pem"), "--tls-key", file("member.key"), "--tls-name", "localhost"}}})
	c := r.dial()
	var failed atomic.Pointer[error]
	var requests atomic.Int64
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for n := int64(0); ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			if _, err := c.WriteAt(noise(uint64(n), 4096), n%256*4096); err != nil {
				failed.Store(&err)
				return
			}
			requests.Add(1)
			time.Sleep(time.Millisecond)
		}
	}()
	forced := func() []audit.Record { return auditRecords(t, file("audit.json"), audit.EventForced) }

	install("member.key", next.path("member.key"))
	install("member.pem", next.path("member.pem"))
	install("crl.pem", file("next.crl"))
	install("ca.pem", next.path("ca.pem")) // nobody tells the server
	eventually(t, "the path of the earlier certificate is closed", func() bool { return len(forced()) == 1 })
	before := requests.Load()
	eventually(t, "requests go on", func() bool { return requests.Load() > before+100 || failed.Load() != nil })
	if err := failed.Load(); err != nil {
		t.Errorf("a request failed: %v", *err)
	}
	if rec := forced()[0]; !strings.Contains(rec.Reason, "unknown authority") || rec.Identity != "dns:localhost" || rec.Session == "" || rec.Client == "" {
		t.Errorf("%+v", rec)
	}

	list(file("next.crl"), "member")
	install("crl.pem", file("next.crl"))
	rnbd(t, "--socket", r.server.Socket, "config", "reload").want(t, 0, "tls-crl", "other contents")
	rnbd(t, "--socket", r.server.Socket, "config", "reload").want(t, 0, "nothing to change")
	eventually(t, "requests fail", func() bool { return failed.Load() != nil })
	close(stop)
	<-done
	eventually(t, "the session is gone", func() bool {
		l, err := r.server.API.ListSessions(t.Context(), &controlpb.ListRequest{})
		return err == nil && len(l.Sessions) == 0
	})
	if all := forced(); len(all) != 2 || !strings.Contains(all[1].Reason, "is revoked") {
		t.Errorf("%+v", all)
	}
	eventually(t, "the client is refused", func() bool {
		for _, rec := range auditRecords(t, file("audit.json"), audit.EventHandshake) {
			if strings.Contains(rec.Result, "is revoked") && rec.Claimed == "dns:localhost" {
				return true
			}
		}
		return false
	})
	rnbd(t, "--socket", r.server.Socket, "server", "events").want(t, 0, "connected -> closed", "is revoked")
}
