//go:build linux

package tlsrecord

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The record layer of Linux (TCP_ULP "tls") as the other end, and as an
// alternative. Where the module is not loaded the tests are left out;
// test/kernelvm runs them in a guest that has it.

const (
	solTLS          = 282 // SOL_TLS
	tlsTX, tlsRX    = 1, 2
	cipherAESGCM128 = 51 // TLS_CIPHER_AES_GCM_128
)

// kernelInfo is struct tls12_crypto_info_aes_gcm_128.
func kernelInfo(t testing.TB, k Keys) string {
	t.Helper()
	s, err := suiteOf(k.Suite)
	if err != nil {
		t.Fatal(err)
	}
	key, err := s.expandLabel(k.Secret, "key", s.keyLen)
	if err != nil {
		t.Fatal(err)
	}
	iv, err := s.expandLabel(k.Secret, "iv", ivLen)
	if err != nil {
		t.Fatal(err)
	}
	b := binary.NativeEndian.AppendUint16(nil, tls.VersionTLS13)
	b = binary.NativeEndian.AppendUint16(b, cipherAESGCM128)
	b = append(b, iv[4:]...)
	b = append(b, key...)
	b = append(b, iv[:4]...)
	return string(binary.BigEndian.AppendUint64(b, k.Seq))
}

// onSocket calls f with the descriptor of c.
func onSocket(t testing.TB, c net.Conn, f func(fd int) error) {
	t.Helper()
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if cerr := raw.Control(func(fd uintptr) { err = f(int(fd)) }); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
}

// kernelTLS has the kernel protect a direction of c.
func kernelTLS(t testing.TB, c net.Conn, direction int, k Keys) {
	t.Helper()
	onSocket(t, c, func(fd int) error {
		if err := unix.SetsockoptString(fd, unix.SOL_TCP, unix.TCP_ULP, "tls"); err != nil {
			return os.NewSyscallError("TCP_ULP", err)
		}
		return os.NewSyscallError("SOL_TLS", unix.SetsockoptString(fd, solTLS, direction, kernelInfo(t, k)))
	})
}

// needKernelTLS leaves a test out where the kernel has no TLS.
func needKernelTLS(t testing.TB) {
	t.Helper()
	from, _ := connection(t)
	onSocket(t, from, func(fd int) error {
		if err := unix.SetsockoptString(fd, unix.SOL_TCP, unix.TCP_ULP, "tls"); errors.Is(err, unix.ENOENT) {
			t.Skip("the module tls is not loaded")
		}
		return nil
	})
}

// connection returns the two ends of a TCP connection.
func connection(t testing.TB) (from, to net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if from, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if to, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []net.Conn{from, to} {
		c.SetDeadline(time.Now().Add(5 * time.Minute))
		t.Cleanup(func() { c.Close() })
	}
	return from, to
}

// sendRecords sends data as records of this package, a list of them at a time.
func sendRecords(c io.Writer, s *Sealer, data []byte) error {
	const list = 8
	buf := make([]byte, list*(MaxContent+Overhead))
	for len(data) > 0 {
		n := 0
		for range list {
			k := copy(buf[n+HeaderLen:][:MaxContent], data)
			if k == 0 {
				break
			}
			data = data[k:]
			n += s.Seal(buf[n:], ApplicationData, k)
		}
		if _, err := c.Write(buf[:n]); err != nil {
			return err
		}
	}
	return nil
}

// receiveRecords opens records until dst is full.
func receiveRecords(c io.Reader, o *Opener, dst []byte) error {
	buf := make([]byte, 256<<10)
	have := 0
	for len(dst) > 0 {
		n, err := c.Read(buf[have:])
		if err != nil {
			return err
		}
		have += n
		at := 0
		for {
			size, err := o.Next(buf[at:have])
			if err != nil {
				return err
			}
			if size == 0 {
				break
			}
			_, content, err := o.Open(buf[at : at+size])
			if err != nil {
				return err
			}
			dst = dst[copy(dst, content):]
			at += size
		}
		have = copy(buf, buf[at:have])
	}
	return nil
}

// transfer sends data in one of three ways, and returns the time and what came.
// A direction is protected by the kernel, by this package, or, if there are no
// keys, by nobody.
func transfer(t testing.TB, data []byte, k *Keys, kernelSends, kernelReceives bool) (time.Duration, []byte) {
	t.Helper()
	from, to := connection(t)
	defer from.Close()
	defer to.Close()
	send := func() error { _, err := from.Write(data); return err }
	got := make([]byte, len(data))
	receive := func() error { _, err := io.ReadFull(to, got); return err }
	if k != nil {
		s, o := sealer(t, *k), opener(t, *k, false)
		if kernelSends {
			kernelTLS(t, from, tlsTX, *k)
		} else {
			send = func() error { return sendRecords(from, s, data) }
		}
		if kernelReceives {
			kernelTLS(t, to, tlsRX, *k)
		} else {
			receive = func() error { return receiveRecords(to, o, got) }
		}
	}
	sent := make(chan error, 1)
	start := time.Now()
	go func() { sent <- send() }()
	if err := receive(); err != nil {
		t.Fatalf("receive: %v", err)
	}
	took := time.Since(start)
	if err := <-sent; err != nil {
		t.Fatalf("send: %v", err)
	}
	return took, got
}

// TestKernelOpensAndSealsTheSameRecords: the kernel opens the records of this
// package and the other way round.
func TestKernelOpensAndSealsTheSameRecords(t *testing.T) {
	needKernelTLS(t)
	data := make([]byte, 1<<20+12345)
	for i := range data {
		data[i] = byte(i * i >> 7)
	}
	k := keysOf(tls.TLS_AES_128_GCM_SHA256)
	for _, c := range []struct{ sends, receives bool }{{true, false}, {false, true}, {true, true}} {
		if _, got := transfer(t, data, &k, c.sends, c.receives); !bytes.Equal(got, data) {
			t.Errorf("the kernel sends: %t, receives: %t: data differ", c.sends, c.receives)
		}
	}
}

// TestKernelThroughput prints how long the same bytes take without TLS, with
// records of this package and with those of the kernel, one after the other in
// each round.
func TestKernelThroughput(t *testing.T) {
	needKernelTLS(t)
	data := bytes.Repeat([]byte("0123456789abcdef"), 64<<10) // 1 MiB: the guest is emulated
	k := keysOf(tls.TLS_AES_128_GCM_SHA256)
	var plain, own, kernel []time.Duration
	for range 5 {
		for _, c := range []struct {
			took   *[]time.Duration
			keys   *Keys
			kernel bool
		}{{&plain, nil, false}, {&own, &k, false}, {&kernel, &k, true}} {
			took, _ := transfer(t, data, c.keys, c.kernel, c.kernel)
			*c.took = append(*c.took, took)
		}
	}
	for name, took := range map[string][]time.Duration{"plain": plain, "own records": own, "kernel's records": kernel} {
		slices.Sort(took)
		rate := func(d time.Duration) float64 { return float64(len(data)) / d.Seconds() / 1e6 }
		t.Logf("%-16s %4.0f MB/s (quartiles %.0f to %.0f)", name, rate(took[2]), rate(took[3]), rate(took[1]))
	}
}
