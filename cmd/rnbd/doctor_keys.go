package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/config"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/doctor"
	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/tlsauth"
)

// checkKeys looks at the files of o, or at those of the daemons' configuration if o
// names none.
func checkKeys(o *tlsOptions) (found []doctor.Finding) {
	if k := o.keys(); k != (doctor.Keys{Name: "--tls"}) {
		return k.Check(time.Now())
	}
	_, c := clientRun()
	found = append(found, configOf("client", c)...)
	_, s := serverRun()
	found = append(found, configOf("server", s)...)
	sets := []doctor.Keys{
		c.keys(), s.keys(), {Name: "--nbd-tls", CA: c.NBDTLSCA, Cert: c.NBDTLSCert, Key: c.NBDTLSKey, CRL: c.NBDTLSCRL},
		c.metricsOptions.pageKeys(), s.metricsOptions.pageKeys(),
	}
	for _, k := range sets {
		found = append(found, k.Check(time.Now())...)
	}
	return found
}

func (o *tlsOptions) keys() doctor.Keys {
	return doctor.Keys{Name: "--tls", CA: o.TLSCA, Cert: o.TLSCert, Key: o.TLSKey, CRL: o.TLSCRL, PSK: o.TLSPSK}
}

func (o *metricsOptions) pageKeys() doctor.Keys {
	return doctor.Keys{Name: "--metrics", CA: o.MetricsClientCA, Cert: o.MetricsCert, Key: o.MetricsKey}
}

// configOf reads the system's configuration of a daemon into options. A file with an
// error is a finding.
func configOf(kind string, into any) (found []doctor.Finding) {
	files := existing(systemFile(kind))
	more, err := config.Files(systemDir(kind))
	files = append(files, more...)
	if err == nil {
		err = readAll(files, into, func() {}, nil)
	}
	if err != nil {
		found = append(found, doctor.Finding{Check: "configuration", Subject: kind, Outcome: doctor.Problem, Text: strings.ReplaceAll(err.Error(), "\n", "; "), Do: "correct the file; `rnbd config check` shows when it is right"})
	}
	return found
}

// forProbes reads the files that servers are tried with; nil: none.
func (o *clientTLS) forProbes() (*tlsauth.Auth, rtrs.AuthMode, error) {
	mode, err := authMode("--auth", o.Auth)
	if err != nil {
		return nil, mode, err
	}
	if o.TLS != tlsOff && o.TLS != tlsRequire {
		return nil, mode, usageError{fmt.Errorf("--tls %q: use %s or %s", o.TLS, tlsOff, tlsRequire)}
	}
	if o.TLS == tlsOff && mode == rtrs.AuthOff {
		return nil, mode, nil // the files are only looked at
	}
	a, err := o.tlsOptions.open(o.name, mode != rtrs.AuthOff, false, slog.New(slog.DiscardHandler))
	return a, mode, err
}

// speaksTLS reports whether the server at addr answers the begin of TLS by TLS. It
// proves nothing of the server.
func speaksTLS(ctx context.Context, addr string) bool {
	d := tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"rnbd"}, MinVersion: tls.VersionTLS13}}
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err == nil {
		conn.Close()
		return true
	}
	return strings.Contains(err.Error(), "remote error: tls:") // an alert
}

// hint says what to do about keys, if err is the answer of a server about them.
func (o *clientTLS) hint(ctx context.Context, addr string, err error) string {
	text := err.Error()
	bare := o.TLS == tlsOff && (o.Auth == tlsOff || o.Auth == "")
	switch {
	case strings.Contains(text, "--auth"):
		if bare {
			return "the server wants a challenge: give the client --auth allow and its keys (--tls-psk, or --tls-ca, --tls-cert and --tls-key), and this command the same"
		}
		return "the server refuses these keys, or has none: compare them with its file (--tls-psk), or its CA (--tls-ca); its log and its audit log have the reason"
	case errors.Is(err, syscall.EPROTONOSUPPORT) && !bare:
		return "the server does without what this command requires: give it --tls or --auth and keys, or try --auth allow"
	case bare && errors.Is(err, syscall.ECONNRESET) && speaksTLS(ctx, addr):
		return "the server wants TLS: give the client --tls require and its keys (--tls-psk, or --tls-ca, --tls-cert and --tls-key), and this command the same"
	case tlsFault(text) != "":
		return tlsFault(text)
	case strings.Contains(text, "TLS"):
		return "the ends do not agree on keys: compare the CA, the name that the server must prove (--tls-name) and the clocks; the server's log has its side"
	case errors.Is(err, syscall.EACCES) && !bare:
		return "the server refuses the identity of these keys: its log and its audit log have the reason"
	}
	return ""
}

// tlsFaults are parts of the errors of TLS, and what to do about each. Those that begin
// with "remote error" are alerts of the server.
var tlsFaults = []struct{ text, hint string }{
	{"certificate has expired or is not yet valid", "the server's certificate is out of its time, or a clock is wrong: `openssl x509 -dates -in FILE` on the server"},
	{"signed by unknown authority", "the server's certificate is of another CA than --tls-ca"},
	{"certificate is valid for", "the server's certificate has other names than --tls-name, or the address: the error says which"},
	{"certificate is not valid for any names", "the server's certificate has no name: issue one with the name that --tls-name says"},
	{"certificate has been revoked", "the server's certificate is in the list of revoked ones (--tls-crl)"},
	{"remote error: tls: certificate required", "the server wants a certificate of this client: --tls-cert and --tls-key"},
	{"remote error: tls: expired certificate", "this client's certificate has expired, or the server's clock is wrong: issue another one"},
	{"remote error: tls: unknown certificate authority", "this client's certificate is of another CA than the server's --tls-ca"},
	{"remote error: tls: revoked certificate", "this client's certificate is in the server's list of revoked ones"},
	{"remote error: tls: protocol version not supported", "the ends have no version of TLS in common"},
}

// tlsFault returns what to do about an error of TLS with the given text, or "".
func tlsFault(text string) string {
	for _, f := range tlsFaults {
		if strings.Contains(text, f.text) {
			return f.hint
		}
	}
	return ""
}
