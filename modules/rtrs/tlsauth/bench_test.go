package tlsauth

import (
	"crypto/tls"
	"net"
	"testing"
)

// BenchmarkBegunHandshake is what a client costs a server that begins a handshake
// and does not go on.
func BenchmarkBegunHandshake(b *testing.B) {
	server := newAuth(b, newAuthority(b, "ca").issue("server", nil))
	near, far := net.Pipe()
	go tls.Client(near, &tls.Config{ServerName: "127.0.0.1", InsecureSkipVerify: true, MinVersion: tls.VersionTLS13, NextProtos: []string{"rnbd"}}).Handshake()
	hello := make([]byte, 4096)
	n, err := far.Read(hello)
	if err != nil {
		b.Fatal(err)
	}
	far.Close()
	b.ReportAllocs()
	for b.Loop() {
		near, far := net.Pipe()
		done := make(chan struct{})
		go func() {
			server.Server(far)
			far.Close()
			close(done)
		}()
		near.Write(hello[:n])
		near.Read(make([]byte, 8192))
		near.Close()
		<-done
	}
}
