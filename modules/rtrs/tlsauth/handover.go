package tlsauth

// Handover are the contents of files, for a process that cannot read them.
type Handover struct {
	Cert, Key []byte
	CA        []byte // empty: clients need no certificate
}

// NewHandover reads the files of a server that another process is: Cert and Key,
// and CA if its clients must have certificates. Use Handover of the result.
func NewHandover(cfg Config) (*Auth, error) { return NewHTTPS(cfg) }

// Handover looks at the files and returns their contents, as they were when all
// of them could be used. The caller does not change them.
func (a *Auth) Handover() Handover { return a.current().files }
