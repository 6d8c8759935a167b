// Package tlsauth proves the identities of the two ends of a connection, and
// agrees on the keys that protect it: TLS 1.3 with certificates of both ends,
// or with a key that both ends share.
//
// The handshake is that of crypto/tls. When it is done, Conn.Detach hands the
// keys to internal/tlsrecord. That package protects the data path.
//
//	auth, err := tlsauth.New(tlsauth.Config{CA: "ca.pem", Cert: "server.pem", Key: "server.key"})
//	conn, err := auth.Server(tcp)        // one end
//	conn, err := auth.Client(tcp, "db1") // the other end
//
// NewHTTPS does the same for an HTTP server, without shared keys, and with
// certificates of clients only if it is given a CA.
//
// Where nothing is encrypted Auth is a verbs.Authenticator: it proves the identity
// of this end for a text that both ends know, and checks the proof of the other one.
//
// # Shared keys
//
// crypto/tls has no external pre-shared keys. So each end derives two Ed25519
// key pairs from the shared key by HKDF, one for the server and one for the
// client. An end signs with its own, and accepts only the other one. An end
// that knows the key cannot pass for another identity, and messages of a
// client cannot be sent back to it as an answer. See docs/use/security.md.
//
// # Files
//
// Files are looked at before each handshake and read again when they have
// changed. Files with an error change nothing: the earlier ones stay in use, and
// a line in the log says so.
package tlsauth
