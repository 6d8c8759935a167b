package nbdwire

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// defaultPort is that of NBD servers on TCP.
const defaultPort = "10809"

// Address says where an export is.
type Address struct {
	Network string // "tcp" or "unix"
	Address string // of package net
	Export  string
	Named   bool        // the URI names an export
	TLS     *tls.Config // nil: none
}

var schemes = []string{"nbd", "nbd+unix", "nbds", "nbds+unix"}

// IsURI reports whether name is one that ParseURI takes, by its scheme.
func IsURI(name string) bool {
	scheme, _, ok := strings.Cut(name, "://")
	return ok && slices.Contains(schemes, scheme)
}

// ParseURI reads nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH. With nbds in
// the place of nbd the connection has TLS. Its parameters are tls-certificates=FOLDER with
// the files ca-cert.pem, client-cert.pem and client-key.pem, the last two only if the
// client has a certificate, and tls-hostname=NAME, which the server must prove to be.
// Without a folder the authorities are those of the system. The errno is EINVAL for a URI
// of another form.
func ParseURI(uri string) (Address, error) {
	u, err := url.Parse(uri)
	if err != nil {
		return Address{}, fmt.Errorf("%w: %w", err, syscall.EINVAL)
	}
	a := Address{Network: "tcp", Address: u.Host, Export: strings.TrimPrefix(u.Path, "/")}
	a.Named = a.Export != ""
	switch {
	case !slices.Contains(schemes, u.Scheme):
		a.Address = ""
	case strings.HasSuffix(u.Scheme, "+unix"):
		a.Network, a.Address = "unix", u.Query().Get("socket")
	case u.Hostname() != "" && u.Port() == "":
		a.Address = net.JoinHostPort(u.Hostname(), defaultPort)
	}
	if a.Address == "" {
		return Address{}, fmt.Errorf("%q is no address of an NBD export: %w", uri, syscall.EINVAL)
	}
	if strings.HasPrefix(u.Scheme, "nbds") {
		a.TLS, err = loadTLS(u.Query().Get("tls-certificates"), cmp.Or(u.Query().Get("tls-hostname"), u.Hostname(), "localhost"))
	}
	return a, err
}

// loadTLS makes the configuration of a client that connects to host.
func loadTLS(dir, host string) (*tls.Config, error) {
	cfg := &tls.Config{ServerName: host, DynamicRecordSizingDisabled: true}
	if dir == "" {
		return cfg, nil
	}
	ca, err := os.ReadFile(filepath.Join(dir, "ca-cert.pem"))
	if err != nil {
		return nil, fmt.Errorf("tls-certificates: %w", err)
	}
	cfg.RootCAs = x509.NewCertPool()
	if !cfg.RootCAs.AppendCertsFromPEM(ca) {
		return nil, fmt.Errorf("tls-certificates: %s has no certificate: %w", filepath.Join(dir, "ca-cert.pem"), syscall.EINVAL)
	}
	cert, err := tls.LoadX509KeyPair(filepath.Join(dir, "client-cert.pem"), filepath.Join(dir, "client-key.pem"))
	switch {
	case err == nil:
		cfg.Certificates = []tls.Certificate{cert}
	case !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("tls-certificates: %w", err)
	}
	return cfg, nil
}
