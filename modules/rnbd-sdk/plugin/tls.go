package plugin

import (
	"bytes"
	"context"
	"slices"
)

// Protector is a Frontend that can serve its listeners by TLS.
type Protector interface {
	// SetTLS gives the means of TLS, before the first listener and again when
	// they have changed. They hold for users that come from then on. After an
	// error the earlier ones hold; before the first success nothing is served.
	SetTLS(ctx context.Context, t TLS) error
}

// TLS is how a front end protects its listeners. The front end reads no file for
// it: the contents are in memory only.
type TLS struct {
	Certificate []byte // PEM: the front end's, and those between it and its CA
	PrivateKey  []byte // PEM: of Certificate
	// ClientCA are certificates in PEM. Each user shows a certificate that one of
	// them has signed. Empty: users need no certificate.
	ClientCA []byte
	// Required refuses users without TLS, except on the listeners in Plain.
	Required bool
	Plain    []string // names of listeners
}

// Equal reports whether t and o are the same.
func (t *TLS) Equal(o *TLS) bool {
	return bytes.Equal(t.Certificate, o.Certificate) && bytes.Equal(t.PrivateKey, o.PrivateKey) &&
		bytes.Equal(t.ClientCA, o.ClientCA) && t.Required == o.Required && slices.Equal(t.Plain, o.Plain)
}

// String keeps the key out of logs.
func (t TLS) String() string { return "TLS" }
