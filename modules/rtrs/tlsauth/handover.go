package tlsauth

import "errors"

// Handover are the contents of files, for a process that cannot read them.
type Handover struct {
	Cert, Key []byte
	CA        []byte // empty: clients need no certificate
	CRL       []byte // empty: no certificate is revoked
}

// NewHandover reads the files of a server that another process is: Cert and Key,
// and CA if its clients must have certificates, then with or without CRL. Use
// Handover of the result.
func NewHandover(cfg Config) (*Auth, error) {
	f := cfg.Files
	if f.CRL == "" {
		return NewHTTPS(cfg)
	}
	switch {
	case f.PSK != "":
		return nil, errors.New("this server has no shared keys")
	case f.CA == "":
		return nil, errors.New("a file of revoked certificates needs the file of the CA")
	case f.Cert == "" || f.Key == "":
		return nil, errors.New("TLS needs both: the files of certificate and key")
	}
	return openAuth(cfg, func() (*credentials, error) {
		c := &credentials{}
		return c, c.loadCertificates(&f)
	})
}

// Handover looks at the files and returns their contents, as they were when all
// of them could be used. The caller does not change them.
func (a *Auth) Handover() Handover { return a.currentCredentials().files }
