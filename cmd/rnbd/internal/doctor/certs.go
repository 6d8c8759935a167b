package doctor

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"time"
)

// Keys are the files of keys and certificates of one end. Empty ones are left out.
type Keys struct {
	Name                    string // of the options, as --tls
	CA, Cert, Key, CRL, PSK string
}

// soon is the time before the end of a certificate from which it is warned of.
const soon = 14 * 24 * time.Hour

// Check looks at the files, as they are at the time of now.
func (k Keys) Check(now time.Time) (out []Finding) {
	for _, name := range []string{k.Key, k.PSK} {
		if name != "" {
			out = append(out, secret(name))
		}
	}
	for _, f := range []struct{ name, block string }{{k.CA, "CERTIFICATE"}, {k.Cert, "CERTIFICATE"}, {k.CRL, "X509 CRL"}} {
		if f.name != "" {
			out = append(out, blocks(f.name, f.block, now)...)
		}
	}
	switch {
	case (k.Cert == "") != (k.Key == ""):
		out = append(out, Finding{"certificate", k.Name, Problem, "a certificate and its key need each other, and one of them is not named", fmt.Sprintf("name both: %s-cert and %s-key", k.Name, k.Name)})
	case k.Cert != "":
		out = append(out, pair(k.Cert, k.Key)...)
	}
	return out
}

// secret looks at a file of keys.
func secret(name string) Finding {
	st, err := os.Stat(name)
	if err == nil {
		var f *os.File
		if f, err = os.Open(name); err == nil {
			f.Close()
		}
	}
	switch {
	case err != nil:
		return Finding{"key", name, Problem, "cannot be read: " + err.Error(), "run the command as the user of the daemon; correct the name, or chown the file to that user"}
	case st.Mode().Perm()&0o077 != 0:
		return Finding{"key", name, Warning, fmt.Sprintf("other users can read it (mode %#o)", st.Mode().Perm()), "chmod 600 " + name + ", and make a new key if others may have read it"}
	}
	return Finding{"key", name, OK, "only its owner can read it", ""}
}

// blocks looks at a file of certificates or of lists of revoked ones.
func blocks(name, typ string, now time.Time) (out []Finding) {
	text, err := os.ReadFile(name)
	if err != nil {
		return one("certificate", name, Problem, "cannot be read: "+err.Error(), "run the command as the user of the daemon; correct the name, or chown the file to that user")
	}
	for n := 1; ; n++ {
		block, rest := pem.Decode(text)
		if block == nil {
			if n == 1 {
				return one("certificate", name, Problem, fmt.Sprintf("has no %q in PEM", typ), "write the file again; `openssl x509 -in FILE` or `openssl crl -in FILE` shows what is in it")
			}
			return out
		}
		text = rest
		if block.Type != typ {
			out = append(out, Finding{"certificate", name, Problem, fmt.Sprintf("block %d is %q, and must be %q", n, block.Type, typ), "take it out of the file"})
			continue
		}
		out = append(out, valid(name, n, block, now))
	}
}

// valid looks at the times of one certificate or list.
func valid(name string, n int, block *pem.Block, now time.Time) Finding {
	subject := fmt.Sprintf("%s, block %d", name, n)
	var from, to time.Time
	var what string
	if block.Type == "X509 CRL" {
		crl, err := x509.ParseRevocationList(block.Bytes)
		if err != nil {
			return Finding{"certificate", subject, Problem, err.Error(), "write the file again"}
		}
		what, from, to = "list of "+crl.Issuer.String(), crl.ThisUpdate, crl.NextUpdate
	} else {
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return Finding{"certificate", subject, Problem, err.Error(), "write the file again"}
		}
		what, from, to = "certificate of "+c.Subject.String(), c.NotBefore, c.NotAfter
	}
	switch {
	case now.Before(from):
		return Finding{"clock", subject, Problem, fmt.Sprintf("%s is valid from %s on, and the clock of this host says %s", what, stamp(from), stamp(now)), "set the clock (`timedatectl`); if it is right, issue again"}
	case to.IsZero():
	case now.After(to):
		return Finding{"certificate", subject, Problem, fmt.Sprintf("%s has ended at %s, and the clock of this host says %s: peers refuse it", what, stamp(to), stamp(now)), "issue a new one and put it into the file, which is read again by itself; or set the clock"}
	case to.Sub(now) < soon:
		return Finding{"certificate", subject, Warning, fmt.Sprintf("%s ends at %s, in %d days", what, stamp(to), int(to.Sub(now).Hours()/24)), "issue a new one and put it into the file, which is read again by itself"}
	}
	return Finding{"certificate", subject, OK, fmt.Sprintf("%s is valid until %s", what, stamp(to)), ""}
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// pair reports whether a key is that of a certificate.
func pair(cert, key string) []Finding {
	c, err := os.ReadFile(cert)
	if err != nil {
		return nil // it was told
	}
	k, err := os.ReadFile(key)
	if err != nil {
		return nil
	}
	if _, err := tls.X509KeyPair(c, k); err != nil {
		return one("certificate", cert, Problem, "does not fit the key "+key+": "+err.Error(), "name the key with which the certificate was asked for; the certificate of this end stands first in its file")
	}
	return one("certificate", cert, OK, "fits the key "+key, "")
}
