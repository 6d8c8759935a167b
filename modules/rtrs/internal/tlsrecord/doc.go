// Package tlsrecord is the record layer of TLS 1.3 (RFC 8446, section 5) for
// one connection after its handshake.
//
// It protects records in the buffer of the sender, from the places of their
// content, and opens them in the buffer of the receiver and to such places. It knows no sockets,
// starts no goroutines, and allocates only when a key changes.
//
// A direction belongs to one goroutine. The two directions of a connection are
// independent, except that a key update of the peer may ask for one of this end:
//
//	for {
//		size, err := in.Next(buf)           // 0: more bytes are needed
//		typ, content, err := in.Open(buf[:size])
//		if typ != tlsrecord.ApplicationData {
//			event, err := in.Control(typ, content)
//		}
//	}
package tlsrecord
