package e2e

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

// nbdPKI are certificates for the NBD front end and for its clients.
type nbdPKI struct {
	t   *testing.T
	dir string
}

func newNBDPKI(t *testing.T) *nbdPKI {
	t.Helper()
	p := &nbdPKI{t, t.TempDir()}
	p.openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
		"-keyout", p.path("ca.key"), "-out", p.path("ca.pem"), "-subj", "/CN=CA")
	p.issue("front")
	return p
}

func (p *nbdPKI) path(name string) string { return filepath.Join(p.dir, name) }

func (p *nbdPKI) openssl(args ...string) {
	p.t.Helper()
	if out, err := exec.Command(lab.Tool(p.t, "openssl"), args...).CombinedOutput(); err != nil {
		p.t.Fatalf("openssl %s: %v\n%s", args[0], err, out)
	}
}

func (p *nbdPKI) issue(name string) {
	p.t.Helper()
	p.openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", p.path(name+".key"),
		"-out", p.path(name+".csr"), "-subj", "/CN="+name)
	ext := []byte("subjectAltName=DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n")
	if err := os.WriteFile(p.path("ext"), ext, 0o600); err != nil {
		p.t.Fatal(err)
	}
	p.openssl("x509", "-req", "-in", p.path(name+".csr"), "-CA", p.path("ca.pem"), "-CAkey", p.path("ca.key"), "-CAcreateserial",
		"-days", "2", "-extfile", p.path("ext"), "-out", p.path(name+".pem"))
}

// folder is that of a client of libnbd.
func (p *nbdPKI) folder(name string) string {
	p.t.Helper()
	p.issue(name)
	dir := p.t.TempDir()
	for from, to := range map[string]string{"ca.pem": "ca-cert.pem", name + ".pem": "client-cert.pem", name + ".key": "client-key.pem"} {
		b, err := os.ReadFile(p.path(from))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, to), b, 0o600)
		}
		if err != nil {
			p.t.Fatal(err)
		}
	}
	return dir
}

// revocations returns a function that revokes certificates and writes the list of all
// that are revoked.
func (p *nbdPKI) revocations() func(file string, names ...string) {
	p.t.Helper()
	conf := "[ca]\ndefault_ca=c\n[c]\ndatabase=" + p.path("index") + "\ncrlnumber=" + p.path("number") + "\ndefault_md=sha256\ndefault_crl_days=2\n"
	for name, text := range map[string]string{"index": "", "number": "01\n", "ca.cnf": conf} {
		if err := os.WriteFile(p.path(name), []byte(text), 0o600); err != nil {
			p.t.Fatal(err)
		}
	}
	return func(file string, names ...string) {
		p.t.Helper()
		for _, name := range names {
			p.openssl("ca", "-config", p.path("ca.cnf"), "-revoke", p.path(name+".pem"), "-keyfile", p.path("ca.key"), "-cert", p.path("ca.pem"))
		}
		p.openssl("ca", "-config", p.path("ca.cnf"), "-gencrl", "-keyfile", p.path("ca.key"), "-cert", p.path("ca.pem"), "-out", p.path("next"))
		if err := os.Rename(p.path("next"), file); err != nil {
			p.t.Fatal(err)
		}
	}
}

func (p *nbdPKI) flags(mode string) []string {
	return []string{"--nbd-tls", mode, "--nbd-tls-ca", p.path("ca.pem"), "--nbd-tls-cert", p.path("front.pem"), "--nbd-tls-key", p.path("front.key")}
}

func (r *rig) nbds(dir string) string {
	_, port, _ := strings.Cut(r.tcp, ":")
	return "nbds://localhost:" + port + "/" + r.device.Name + "?tls-certificates=" + dir
}

// The front end serves by TLS alone, also the process that follows one that died,
// and with the files of the day.
func TestNBDByTLS(t *testing.T) {
	lab.Tool(t, "nbdinfo")
	p := newNBDPKI(t)
	r := newRig(t, rigOptions{size: 16 << 20, client: lab.ClientOptions{Extra: append(p.flags("require"), "--plugin-allow", "nbd=none")}})
	dir := p.folder("app")
	if want := "nbds+unix:///" + r.device.Name; !strings.HasPrefix(r.device.Endpoint, want) {
		t.Errorf("mapped at %s, want %s", r.device.Endpoint, want)
	}
	source, back := randomFile(t, 16<<20), filepath.Join(t.TempDir(), "back")
	run(t, "nbdcopy", "--connections=4", "--flush", source, r.nbds(dir))
	run(t, "nbdcopy", r.nbds(dir), back)
	if want := sumOf(t, source); sumOf(t, back) != want || sumOf(t, r.image) != want {
		t.Error("data differ")
	}
	for _, uri := range []string{r.tcpURI(), r.unixURI()} {
		if out, err := exec.Command("nbdinfo", uri).CombinedOutput(); err == nil {
			t.Errorf("%s without TLS: %s", uri, out)
		}
	}
	if err := r.client.KillPlugin("nbd"); err != nil {
		t.Fatal(err)
	}
	works := func(dir string) func() bool {
		return func() bool { return exec.Command("nbdinfo", "--size", r.nbds(dir)).Run() == nil }
	}
	eventually(t, "the next process serves by TLS", works(dir))
	if err := exec.Command("nbdinfo", "--size", r.tcpURI()).Run(); err == nil {
		t.Error("the next process serves without TLS")
	}

	// Another CA and certificate. Nobody tells the daemon.
	other := newNBDPKI(t)
	otherDir := other.folder("app")
	for _, f := range []string{"ca.pem", "front.key", "front.pem"} {
		b, err := os.ReadFile(other.path(f))
		if err == nil {
			err = os.WriteFile(p.path("next"), b, 0o600)
		}
		if err == nil {
			err = os.Rename(p.path("next"), p.path(f))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the new files are used", works(otherDir))
	if works(dir)() {
		t.Error("a certificate of the earlier CA is accepted")
	}

	// A broken file changes nothing, and is reported.
	if err := os.WriteFile(p.path("front.pem"), []byte("garbage"), 0o600); err != nil {
		t.Fatal(err)
	}
	rnbd(t, "--socket", r.client.Socket, "config", "reload").want(t, 2, p.path("front.pem"))
	r.client.Signal(syscall.SIGHUP)
	if !works(otherDir)() {
		t.Error("a broken file ends the service")
	}
	key, err := os.ReadFile(other.path("front.key"))
	if err != nil {
		t.Fatal(err)
	}
	if line := bytes.Split(key, []byte("\n"))[1]; strings.Contains(r.client.Log(), string(line)) {
		t.Error("the key is in the log")
	}
}

// A trusted listener is as without TLS; allow is up to the clients.
func TestNBDTrustedListenerAndAllow(t *testing.T) {
	lab.Tool(t, "nbdinfo")
	p := newNBDPKI(t)
	dir := p.folder("app")
	for _, args := range [][]string{append(p.flags("require"), "--nbd-listen", "tcp:127.0.0.1:0,trusted"), append(p.flags("allow"), "--nbd-listen", "tcp:127.0.0.1:0")} {
		l := lab.New(t)
		s := l.Server(lab.ServerOptions{SearchPath: l.Image("disk.img", 1<<20), Plugins: []string{"fileio"}})
		c := l.Client(lab.ClientOptions{Extra: args})
		r := &rig{t: t, client: c, tcp: tcpOf(t, c), device: l.Map(c, "disk.img", s)}
		for _, uri := range []string{r.tcpURI(), r.nbds(dir)} {
			if size := run(t, "nbdinfo", "--size", uri); strings.TrimSpace(size) != "1048576" {
				t.Errorf("%s: %s", uri, size)
			}
		}
	}
}

func TestNBDListenersAndTLSThatAreRefused(t *testing.T) {
	p := newNBDPKI(t)
	for words, args := range map[string][]string{
		"tcp:[::]:":                   {"--nbd-listen", "tcp::0"},
		"listen on \"tcp:[::]:":       {"--nbd-listen", "tcp:0.0.0.0:0"},
		",trusted if its network":     append(p.flags("allow"), "--nbd-listen", "tcp:0.0.0.0:0"),
		"use off, allow or require":   {"--nbd-tls", "maybe"},
		"--nbd-tls is off":            {"--nbd-tls-ca", p.path("ca.pem")},
		"needs both":                  {"--nbd-tls", "require", "--nbd-tls-ca", p.path("ca.pem")},
		"no such file":                {"--nbd-tls", "require", "--nbd-tls-cert", p.path("none"), "--nbd-tls-key", p.path("front.key")},
		"does not match public key":   {"--nbd-tls", "require", "--nbd-tls-cert", p.path("front.pem"), "--nbd-tls-key", p.path("ca.key")},
		"unknown flag: --nbd-tls-psk": {"--nbd-tls", "require", "--nbd-tls-psk", p.path("front.key")},
	} {
		socket := filepath.Join(shortDir(t), "s.sock")
		rnbd(t, append([]string{"client", "run", "--socket", socket}, args...)...).want(t, 2, words)
	}
}

// TestNBDRulesAndRevocation: rules and a list of revoked certificates of the client's
// configuration hold for NBD clients that come after a reload; a reload that would
// leave no rule is refused.
func TestNBDRulesAndRevocation(t *testing.T) {
	lab.Tool(t, "nbdinfo")
	p := newNBDPKI(t)
	reader, dir := p.folder("reader"), t.TempDir()
	config, crl := filepath.Join(dir, "rules.yaml"), p.path("crl.pem")
	write := func(file, text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(config, "nbd-access:\n  - identity: [dns:localhost]\n    device: [\"*\"]\n    allow: ro\n")
	list := p.revocations()
	list(crl)
	r := newRig(t, rigOptions{size: 16 << 20, client: lab.ClientOptions{Extra: append(p.flags("require"), "--nbd-tls-crl", crl, "--config", config, "--audit", filepath.Join(dir, "audit.json"))}})
	info := func() string {
		out, err := exec.Command("nbdinfo", r.nbds(reader)).CombinedOutput()
		if err != nil {
			return "refused"
		}
		return string(out)
	}
	reload := func(want int, words ...string) {
		t.Helper()
		rnbd(t, "--socket", r.client.Socket, "config", "reload", "client").want(t, want, words...)
	}
	if out := info(); !strings.Contains(out, "is_read_only: true") {
		t.Errorf("a client that may read: %s", out)
	}
	write(config, "nbd-access:\n  - {identity: [dns:localhost], allow: rw}\n")
	reload(0, "nbd-access", "set")
	if out := info(); !strings.Contains(out, "is_read_only: false") {
		t.Errorf("a client that may write: %s", out)
	}
	write(config, "nbd-access:\n  - {identity: [dns:other], allow: rw}\n")
	reload(0)
	if out := info(); out != "refused" {
		t.Errorf("a client that no rule fits: %s", out)
	}
	write(config, "loss: fail\n")
	reload(2, "nbd-access: no file has rules any more")
	write(config, "nbd-access:\n  - {identity: [dns:localhost], allow: migration}\n")
	reload(2, "line 2", "none, ro or rw")
	if out := info(); out != "refused" {
		t.Errorf("after reloads that are refused: %s", out)
	}
	write(config, "nbd-access: []\n")
	reload(0, "nbd-access")
	if out := info(); !strings.Contains(out, "is_read_only: false") {
		t.Errorf("without rules: %s", out)
	}
	list(crl, "reader")
	eventually(t, "the client of the list is refused", func() bool { return info() == "refused" })
	eventually(t, "the audit log has what clients opened and were refused, and a command with its user", func() bool {
		b, err := os.ReadFile(filepath.Join(dir, "audit.json"))
		for _, want := range []string{
			`"event":"connect","result":"ok"`, `"fabric":"nbd","identity":"dns:localhost","device":"` + r.device.Name + `","mode":"ro"`, `"event":"close","result":"ok"`,
			`"result":"not allowed to open it: no rule fits`, `is revoked"`, `"event":"call","result":"ok","call":"Reload"`, `"uid":`,
		} {
			if !strings.Contains(string(b), want) {
				return false
			}
		}
		return err == nil
	})
	rnbd(t, "client", "run", "--config", config, "--nbd-tls-crl", crl, "--socket", filepath.Join(shortDir(t), "s.sock")).want(t, 2, "--nbd-tls is off")
	write(config, "nbd-access:\n  - {allow: rw}\n")
	rnbd(t, "client", "run", "--config", config, "--socket", filepath.Join(shortDir(t), "s.sock")).want(t, 2, "nbd-access has rules")
}
