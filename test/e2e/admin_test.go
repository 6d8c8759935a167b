package e2e

import (
	"crypto/x509"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/audit"
	"github.com/rnbd-go/rnbd/test/lab"
)

// administrators is a server with the pool "fast" and --admin-listen, and certificates of
// its administrators.
type administrators struct {
	t       *testing.T
	l       *lab.T
	server  *lab.Server
	ca      *lab.Authority
	dir     string
	address string
	records string
}

const adminRules = `
access:
  - {identity: ["cn:root"], role: admin}
  - {identity: ["spiffe://example.org/csi"], role: volumes, quota-bytes: 3145728}
  - {identity: ["cn:viewer"], role: read}
`

func newAdministrators(t *testing.T) *administrators {
	t.Helper()
	a := &administrators{t: t, l: lab.New(t), dir: t.TempDir()}
	a.records = filepath.Join(a.dir, "audit.json")
	var err error
	if a.ca, err = lab.NewAuthority(a.dir, "example"); err != nil {
		t.Fatal(err)
	}
	cert, key, err := a.ca.Issue("server", nil)
	if err != nil {
		t.Fatal(err)
	}
	a.address = freeAddress(t)
	pool := filepath.Join(a.dir, "pool")
	config := filepath.Join(a.dir, "server.yaml")
	if err := os.Mkdir(pool, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(config, []byte("pools:\n  - {name: fast, kind: files, path: "+pool+"}\n"+adminRules), 0o600); err != nil {
		t.Fatal(err)
	}
	a.server = a.l.Server(lab.ServerOptions{Extra: []string{"--config", config, "--audit", a.records,
		"--admin-listen", a.address, "--tls-ca", a.ca.CA(), "--tls-cert", cert, "--tls-key", key}})
	return a
}

// freeAddress returns an address of this host that was free a moment ago.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// folder has the certificate of an administrator, as --server-tls takes it.
func (a *administrators) folder(ca *lab.Authority, name string, change func(*x509.Certificate)) string {
	a.t.Helper()
	cert, key, err := ca.Issue(name, change)
	if err != nil {
		a.t.Fatal(err)
	}
	dir := a.t.TempDir()
	for to, from := range map[string]string{"ca.crt": a.ca.CA(), "tls.crt": cert, "tls.key": key} {
		text, err := os.ReadFile(from)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, to), text, 0o600)
		}
		if err != nil {
			a.t.Fatal(err)
		}
	}
	return dir
}

// run runs rnbd for the administrator of a folder, and compares the end of its output. code
// is its exit code.
func (a *administrators) run(folder string, code int, want string, args ...string) {
	a.t.Helper()
	r := try(a.t, enough, append([]string{filepath.Join(a.l.Bin, "rnbd"), "--server", "tls://" + a.address, "--server-tls", folder}, args...)...)
	if out := r.out + r.err; r.code != code || !strings.Contains(out, want) {
		a.t.Errorf("rnbd %s: exit code %d, want %d with %q:\n%s", strings.Join(args, " "), r.code, code, want, out)
	}
}

// TestRemoteAdministration: the control API over TLS, with what the rules allow each
// identity.
func TestRemoteAdministration(t *testing.T) {
	a := newAdministrators(t)
	spiffe := func(c *x509.Certificate) {
		c.DNSNames, c.IPAddresses = nil, nil
		c.URIs = []*url.URL{{Scheme: "spiffe", Host: "example.org", Path: "/csi"}}
	}
	root := a.folder(a.ca, "root", nil)
	csi := a.folder(a.ca, "csi", spiffe)
	viewer := a.folder(a.ca, "viewer", nil)
	stranger := a.folder(a.ca, "stranger", nil)
	other, err := lab.NewAuthority(t.TempDir(), "other")
	if err != nil {
		t.Fatal(err)
	}
	forged := a.folder(other, "root", nil)

	a.run(root, 0, "", "pool", "init", "fast")
	a.run(root, 0, "", "volume", "create", "fast/host", "1M")
	a.run(csi, 6, "no role that may", "pool", "init", "fast")
	a.run(csi, 0, "", "volume", "create", "fast/one", "1M")
	a.run(csi, 0, "", "volume", "create", "fast/two", "2M")
	a.run(csi, 0, "", "volume", "create", "fast/two", "2M")
	a.run(csi, 1, "may have 3145728", "volume", "create", "fast/three", "1M")
	a.run(csi, 1, "may have 3145728", "volume", "resize", "fast/one", "2M")
	a.run(csi, 1, "may have 3145728", "volume", "snapshot", "create", "fast/one@s")
	a.run(csi, 6, "has not created it", "volume", "delete", "fast/host")
	a.run(csi, 6, "has not created it", "volume", "publish", "fast/host", "cn:node", "rw")
	a.run(csi, 0, "", "volume", "publish", "fast/one", "cn:node", "rw")
	a.run(csi, 0, "", "volume", "unpublish", "fast/one", "cn:node")
	a.run(csi, 0, "", "volume", "delete", "fast/one")
	a.run(viewer, 0, "fast/two", "volume", "list", "all")
	a.run(viewer, 6, "no role that may", "volume", "delete", "fast/two")
	a.run(stranger, 6, "no role that may", "volume", "list")
	a.run(forged, 7, "", "volume", "list")
	a.run(root, 2, "for the client daemon", "client", "list")
	a.run(root, 0, "spiffe://example.org/csi", "volume", "show", "fast/two")

	refused := 0
	for _, r := range auditRecords(t, a.records, audit.EventCall) {
		if r.Identity == "" || r.Client == "" || r.UID != nil {
			t.Errorf("record without identity and address: %+v", r)
		}
		if strings.Contains(r.Result, "no role that may") {
			refused++
		}
	}
	if refused != 3 {
		t.Errorf("%d refusals are recorded, want 3", refused)
	}
}
