package e2e

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-client"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/logs"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/iwarp"
	"github.com/rnbd-go/rnbd/modules/rtrs/tlsauth"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
	"github.com/rnbd-go/rnbd/test/lab"
)

// Identities of the clients that the rules of a house let in.
const (
	goodName = "good.example"
	goodKey  = "good"
)

// house is a server that requires TLS and has access rules, with clients that
// may open disk.img beside. Its files can be exchanged while it runs.
type house struct {
	t         *testing.T
	server    *lab.Server
	ca, other *lab.Authority // both are named "ca"
	dir       string         // of the server's files
	good      tlsauth.Files
	keys      string // a file of the shared key of the good
	lib       *client.Client
	opened    int

	reads atomic.Uint64
	fault atomic.Value // of the load
	stop  func()
}

func newHouse(t *testing.T) *house {
	h := &house{t: t, dir: shortDir(t)}
	l := lab.New(t)
	h.ca, h.other = h.authority(), h.authority()
	h.good = h.issue(h.ca, "good", named(goodName))
	h.keys = sharedKey(t, t.TempDir(), goodKey)
	server := h.issue(h.ca, "server", nil)
	for name, from := range map[string]string{"ca.pem": server.CA, "cert.pem": server.Cert, "key.pem": server.Key, "keys": h.keys} {
		h.put(name, read(t, from))
	}
	h.revoke(h.ca, time.Now().Add(time.Hour), 99)
	if err := os.Mkdir(h.file("conf.d"), 0o700); err != nil {
		t.Fatal(err)
	}
	h.put("conf.d/rules.yaml", goodRules)
	dir := l.Image("disk.img", 1<<20)
	l.Image("other.img", 1<<20)
	h.server = l.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"}, Extra: []string{
		"--tls", "require", "--tls-ca", h.file("ca.pem"), "--tls-cert", h.file("cert.pem"), "--tls-key", h.file("key.pem"),
		"--tls-crl", h.file("crl.pem"), "--tls-psk", h.file("keys"), "--config-dir", h.file("conf.d"), "--audit", h.file("audit.json"),
		"--access-grace", "100ms", "--log-level", "info"}})
	h.lib = h.client(&h.good, "")
	h.load()
	return h
}

const goodRules = `access:
- {identity: ["dns:good.example", "psk:good"], device: ["disk.img"], allow: rw}
- {identity: ["spiffe://example/tenant/*"], device: ["other.img"], allow: ro}
`

func (h *house) authority() *lab.Authority {
	h.t.Helper()
	a, err := lab.NewAuthority(h.t.TempDir(), "ca")
	if err != nil {
		h.t.Fatal(err)
	}
	return a
}

// issue returns the files of a client or server, which takes the house's CA for
// its own.
func (h *house) issue(a *lab.Authority, name string, change func(*x509.Certificate)) tlsauth.Files {
	h.t.Helper()
	cert, key, err := a.Issue(name, change)
	if err != nil {
		h.t.Fatal(err)
	}
	return tlsauth.Files{CA: h.ca.CA(), Cert: cert, Key: key}
}

func named(name string) func(*x509.Certificate) {
	return func(c *x509.Certificate) { c.DNSNames = []string{name} }
}

func (h *house) revoke(a *lab.Authority, until time.Time, serials ...int64) {
	h.t.Helper()
	if err := a.Revoke(h.file("crl.pem"), until, serials...); err != nil {
		h.t.Fatal(err)
	}
}

func (h *house) file(name string) string { return filepath.Join(h.dir, name) }

// put exchanges a file of the server.
func (h *house) put(name, text string) {
	h.t.Helper()
	writeFile(h.t, h.file(name+".next"), text)
	if err := os.Rename(h.file(name+".next"), h.file(name)); err != nil {
		h.t.Fatal(err)
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// client is a client library that proves what the files say; nil: without TLS.
func (h *house) client(files *tlsauth.Files, expect string) *client.Client {
	h.t.Helper()
	c, err := h.newClient(files, expect)
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { closeLibrary(c) })
	return c
}

func closeLibrary(c *client.Client) {
	ctx, cancel := context.WithTimeout(context.Background(), enough)
	defer cancel()
	_ = c.Close(ctx)
}

func (h *house) newClient(files *tlsauth.Files, expect string) (*client.Client, error) {
	quiet := slog.New(slog.DiscardHandler)
	fabric := iwarp.DefaultConfig()
	fabric.Logger = quiet
	if files != nil {
		auth, err := tlsauth.New(tlsauth.Config{Files: *files, Name: expect, Logger: quiet})
		if err != nil {
			return nil, err
		}
		fabric.TLS = auth
	}
	dev, err := iwarp.Open(fabric)
	if err != nil {
		return nil, err
	}
	cfg := client.DefaultConfig()
	cfg.Hostname, cfg.DefaultFabric, cfg.Fabrics = "e2e", "iwarp", map[string]verbs.Device{"iwarp": dev}
	cfg.Protect, cfg.Pumps, cfg.Logs = files != nil, 1, logs.New(slog.DiscardHandler, slog.LevelError)
	return client.New(h.t.Context(), cfg)
}

// open maps a device and takes it away again.
func (h *house) open(c *client.Client, device, session string) error {
	ctx, cancel := context.WithTimeout(h.t.Context(), enough)
	defer cancel()
	d, err := h.mapped(ctx, c, device, session)
	if err == nil {
		err = c.Unmap(ctx, d.Name(), false)
	}
	return err
}

func (h *house) mapped(ctx context.Context, c *client.Client, device, session string) (*client.Device, error) {
	return c.Map(ctx, client.MapRequest{Path: device, Paths: h.server.Addrs, Session: session, Mode: blk.ReadOnly, Frontend: client.FrontendNone, Slots: 4})
}

// openAs is open by a client of its own.
func (h *house) openAs(files *tlsauth.Files, expect, device, session string) error {
	c, err := h.newClient(files, expect)
	if err != nil {
		return err
	}
	defer closeLibrary(c)
	return h.open(c, device, session)
}

// stillGood checks that the good open the device in new sessions.
func (h *house) stillGood(after string) {
	h.t.Helper()
	h.opened++
	if err := h.open(h.lib, "disk.img", fmt.Sprint("good-", h.opened)); err != nil {
		h.t.Errorf("after %s: a good client is refused: %v", after, err)
	}
	if err := h.fault.Load(); err != nil {
		h.t.Fatalf("after %s: the load has failed: %v", after, err)
	}
}

// load reads the device all the time in a session that was there before.
func (h *house) load() {
	d, err := h.mapped(h.t.Context(), h.lib, "disk.img", "good-load")
	if err != nil {
		h.t.Fatal(err)
	}
	io, err := d.NewIO(0, 0, 1)
	if err != nil {
		h.t.Fatal(err)
	}
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		defer io.Close()
		for n := uint64(0); ; n++ {
			select {
			case <-quit:
				return
			case <-time.After(2 * time.Millisecond): // the others need the processors
			}
			io.Submit(client.Request{Op: blk.Read, Off: n % 256 * 4096, Len: 4096})
			var answers [1]client.Done
			if io.Wait(answers[:]); answers[0].Errno != 0 {
				h.fault.Store(fmt.Sprintf("read %d: %v", n, answers[0].Errno))
				return
			}
			h.reads.Add(1)
		}
	}()
	h.stop = func() { close(quit); <-done }
}

// reload has the server read its files again. With want it must fail and say so.
func (h *house) reload(want string) {
	h.t.Helper()
	r := rnbd(h.t, "config", "reload", "server", "--socket", h.server.Socket)
	switch {
	case want == "" && r.code != 0:
		h.t.Errorf("reload: %s%s", r.out, r.err)
	case want != "" && (r.code == 0 || !strings.Contains(r.err, want)):
		h.t.Errorf("reload: exit code %d, want an error with %q: %s%s", r.code, want, r.out, r.err)
	}
}

// opens lists who has opened what, as the audit log has it.
func (h *house) opens() (list []string) {
	h.t.Helper()
	for line := range strings.Lines(read(h.t, h.file("audit.json"))) {
		var r struct{ Event, Result, Session, Identity, Device string }
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			h.t.Fatalf("audit log: %v: %s", err, line)
		}
		if r.Event == "open" && r.Result == "ok" {
			list = append(list, r.Identity+" "+r.Device)
		}
	}
	return list
}
