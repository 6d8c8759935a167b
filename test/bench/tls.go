package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
)

// Targets of the rows of TLS. Those that are compared are all in one phase.
const (
	tlsOurs  = "rnbd, client library, TLS"
	tlsPlain = "rnbd, client library, plain"
	tlsRules = "rnbd, client library, 1,000 rules"
	tlsPeer  = "nbdkit memory, TLS"
	tlsGo    = "Go NBD client, nbdkit memory, TLS"
)

// addTLS starts servers of memory with TLS, ours and nbdkit, and ours without
// it. Both ends prove who they are.
func (s *site) addTLS(ctx context.Context) error {
	if !s.wants(tlsOurs, tlsPlain, tlsRules, tlsPeer, tlsGo) {
		return nil
	}
	c, err := s.certificates()
	if err != nil {
		return err
	}
	for name, flags := range map[string][]string{tlsOurs: c.flags("server"), tlsPlain: nil, tlsRules: nil} {
		if !s.wants(name) {
			continue
		}
		if name == tlsRules {
			if flags, err = s.manyRules(); err != nil {
				return err
			}
		}
		server, err := s.memoryServer(s.Size, lab.ServerOptions{}, flags...)
		if err != nil {
			return err
		}
		l := library(server.Addrs, true, "ram")
		if name == tlsOurs {
			l.args = append(l.args, c.flags("client")...)
		}
		g, _, err := s.addOurs(name, l, s.Size, server.PID())
		if err != nil {
			return err
		}
		if name == tlsOurs {
			s.ciphers[name] = g.cipher
		}
	}
	if s.wants(tlsPeer, tlsGo) && s.have(tlsPeer, "nbdkit", "fio") {
		s.try(tlsPeer, s.addNbdkitTLS(ctx, c))
	}
	return nil
}

// manyRules returns the flags of a server with 1,000 access rules. The last
// allows the device.
func (s *site) manyRules() (flags []string, err error) {
	var b strings.Builder
	b.WriteString("access:\n")
	for i := range 999 {
		fmt.Fprintf(&b, "- {identity: [tenant-%d], device: [\"t%[1]d/**\"], allow: rw}\n", i)
	}
	b.WriteString("- {device: [\"**\"], allow: rw}\n")
	path := filepath.Join(s.dir, "rules.yaml")
	return []string{"--config", path}, os.WriteFile(path, []byte(b.String()), 0o600)
}

// addNbdkitTLS adds nbdkit's memory plugin, reached by libnbd and by the Go NBD
// client.
func (s *site) addNbdkitTLS(ctx context.Context, c *certificates) error {
	nbdkit, addr, err := s.tcp(ctx, "nbdkit-tls", func(port string) []string {
		return []string{"env", c.gnutls(), "nbdkit", "-f", "-i", "127.0.0.1", "-p", port, "--tls=require", "--tls-verify-peer",
			"--tls-certificates=" + c.dir, "memory", fmt.Sprint(s.Size)}
	})
	if err != nil {
		return err
	}
	uri := "nbds://" + addr + "/"
	g, _, err := s.addGenerator(tlsGo, generatorConfig{devices: []string{uri + "?tls-certificates=" + c.dir}}, nbdkit.pid())
	if err != nil {
		return err
	}
	s.ciphers[tlsGo] = g.cipher
	if err := g.fill(); err != nil {
		return err
	}
	if !s.wants(tlsPeer) {
		return nil
	}
	t := s.addFio(tlsPeer, nil, nbdkit.pid())
	t.run = func(ctx context.Context, w workload, d time.Duration) (sample, error) {
		return fioRun{size: s.Size, change: c.libnbd}.jobs(ctx, append([]string{"--name=bench"}, nbdEngine(uri)...), w, d)
	}
	s.ciphers[tlsPeer], err = c.cipherOfLibnbd(ctx, uri)
	return err
}

// certificates are those of a CA, a server and a client, in the files that nbdkit
// and libnbd look for: ca-cert.pem, server-cert.pem, server-key.pem and so on.
type certificates struct {
	dir  string
	user int // that libnbd runs as
}

// nobody is a user without rights. libnbd takes certificates from the home of a
// user other than root.
const nobody = 65534

// certificates makes them in a folder, which is the home of libnbd's user, too.
func (s *site) certificates() (*certificates, error) {
	home, err := s.folder("/dev/shm")
	if err != nil {
		return nil, err
	}
	c := &certificates{dir: filepath.Join(home, ".pki", "libnbd"), user: os.Geteuid()}
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return nil, err
	}
	if err := c.issue(); err != nil {
		return nil, fmt.Errorf("certificates: %w", err)
	}
	if err := os.WriteFile(filepath.Join(c.dir, "gnutls"), []byte(onlyAES128), 0o600); err != nil || c.user != 0 {
		return c, err
	}
	c.user = nobody
	return c, filepath.WalkDir(home, func(path string, _ os.DirEntry, err error) error {
		return errors.Join(err, os.Chown(path, nobody, nobody))
	})
}

// onlyAES128 has GnuTLS choose what crypto/tls chooses. GnuTLS alone prefers
// AES-256-GCM, which is slower.
const onlyAES128 = `[overrides]
tls-disabled-cipher = aes-256-gcm
tls-disabled-cipher = chacha20-poly1305
tls-disabled-cipher = aes-128-ccm
tls-disabled-cipher = aes-256-ccm
`

// issue makes the files.
func (c *certificates) issue() error {
	a, err := lab.NewAuthority(c.dir, "ca")
	for _, name := range []string{"server", "client"} {
		if err == nil {
			_, _, err = a.Issue(name, nil)
		}
	}
	return err
}

// flags are those of a daemon or of rnbd bench.
func (c *certificates) flags(role string) []string {
	file := func(name string) string { return filepath.Join(c.dir, name) }
	return []string{"--tls", "require", "--tls-ca", file("ca-cert.pem"), "--tls-cert", file(role + "-cert.pem"), "--tls-key", file(role + "-key.pem")}
}

// gnutls is a word of the environment of programs with GnuTLS.
func (c *certificates) gnutls() string {
	return "GNUTLS_SYSTEM_PRIORITY_FILE=" + filepath.Join(c.dir, "gnutls")
}

// libnbd prepares a program that uses libnbd with these certificates.
func (c *certificates) libnbd(cmd *exec.Cmd) {
	home := filepath.Dir(filepath.Dir(c.dir))
	cmd.Dir = home
	cmd.Env = append(os.Environ(), "HOME="+home, c.gnutls())
	if c.user != os.Geteuid() {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(c.user), Gid: uint32(c.user)}}
	}
}

// tlsLine is what libnbd says in its debug output.
var tlsLine = regexp.MustCompile(`connection is using TLS: cipher (\S+) \((\d+) bits\)`)

// cipherOfLibnbd asks libnbd for the cipher of a connection.
func (c *certificates) cipherOfLibnbd(ctx context.Context, uri string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, "nbdinfo", "--size", uri)
	c.libnbd(cmd)
	cmd.Env = append(cmd.Env, "LIBNBD_DEBUG=1")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("nbdinfo: %w: %s", err, out.String())
	}
	m := tlsLine.FindSubmatch(out.Bytes())
	if m == nil {
		return "", fmt.Errorf("libnbd does not say which cipher it uses: %s", out.String())
	}
	return string(m[1]), nil
}
