package plugincheck

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/pluginpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sockpair"
)

// cookie is what tells a plugin that a host has started it (docs/abi/plugin-v1.md).
const cookie = "RNBD_PLUGIN=4e1f5d0f1c0b4b6fa3d2c5f1b9a7e6d3"

// byHand is a program that was started as a plugin, without the host's library, so that a
// check can say what no host says.
type byHand struct {
	cmd     *exec.Cmd
	out     *bounded
	control *net.UnixConn
	host    *tls.Certificate
	ended   chan struct{}
}

func startProcess(path, dir string, env []string) (*byHand, error) {
	host, err := newCertificate()
	if err != nil {
		return nil, err
	}
	conn, peer, err := sockpair.New(unix.SOCK_SEQPACKET, "plugin control")
	if err != nil {
		return nil, err
	}
	defer peer.Close()
	c := exec.Command(path)
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: host.Certificate[0]})
	c.Env = append([]string{cookie, "PLUGIN_CLIENT_CERT=" + string(text), "PLUGIN_UNIX_SOCKET_DIR=" + dir, "TMPDIR=" + dir,
		"GORACE=atexit_sleep_ms=0"}, append(passedOn(), env...)...)
	c.ExtraFiles = []*os.File{peer}
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	p := &byHand{cmd: c, out: &bounded{most: 64 << 10, more: make(chan struct{}, 1)}, control: conn, host: host, ended: make(chan struct{})}
	c.Stdout = p.out
	c.WaitDelay = time.Second
	if err := c.Start(); err != nil {
		_ = conn.Close()
		return nil, err
	}
	go func() {
		_ = c.Wait()
		close(p.ended)
	}()
	return p, nil
}

// passedOn returns the part of this process's environment that every plugin sees.
func passedOn() []string {
	env := []string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME")}
	for _, kv := range os.Environ() {
		if strings.HasPrefix(kv, "RNBD_") && !strings.HasPrefix(kv, "RNBD_PLUGIN") {
			env = append(env, kv)
		}
	}
	return env
}

// end kills the process and its group.
func (p *byHand) end() {
	_ = p.control.Close()
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	<-p.ended
}

// hello returns the first line on standard output.
func (p *byHand) hello(most time.Duration) (string, error) {
	over := time.After(most)
	for {
		if line, _, ok := bytes.Cut(p.out.Bytes(), []byte("\n")); ok {
			return string(line), nil
		}
		select {
		case <-p.out.more:
		case <-p.ended:
			if !bytes.Contains(p.out.Bytes(), []byte("\n")) {
				return "", errors.New("it ended before it printed a line")
			}
		case <-over:
			return "", fmt.Errorf("no line after %v", most)
		}
	}
}

// dial connects to the plugin as the owner of a certificate.
func (p *byHand) dial(hello string, who *tls.Certificate) (*grpc.ClientConn, error) {
	f := strings.Split(hello, "|")
	der, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(f[5], "="))
	if err != nil {
		return nil, fmt.Errorf("certificate of the plugin: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("certificate of the plugin: %w", err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(cert)
	creds := credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{*who}, RootCAs: roots, ServerName: "localhost", MinVersion: tls.VersionTLS12})
	return grpc.NewClient("passthrough:plugin", grpc.WithTransportCredentials(creds),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", f[3])
		}))
}

// attachQueue attaches a queue as queue 0.
func (p *byHand) attachQueue(ctx context.Context, c *grpc.ClientConn) error {
	ring, err := shm.NewRing(entries)
	if err != nil {
		return err
	}
	defer ring.Close()
	mem, sq, cq := ring.FDs()
	token := binary.LittleEndian.AppendUint64(nil, 1)
	if _, _, err := p.control.WriteMsgUnix(token, unix.UnixRights(mem, sq, cq), nil); err != nil {
		return err
	}
	_, err = pluginpb.NewPluginClient(c).AttachQueue(ctx, &pluginpb.AttachQueueRequest{Token: 1})
	return err
}

// newCertificate makes a certificate for localhost that signs itself.
func newCertificate() (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: "localhost"}, DNSNames: []string{"localhost"}, SerialNumber: big.NewInt(time.Now().UnixNano()),
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment | x509.KeyUsageKeyAgreement | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		NotBefore:   time.Now().Add(-time.Minute), NotAfter: time.Now().Add(24 * time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

// bounded keeps the first bytes of what is written to it, and drops the rest.
type bounded struct {
	most int
	more chan struct{} // gets a value after a write; nil: no goroutine waits

	mu  sync.Mutex
	buf []byte
}

func (b *bounded) Write(p []byte) (int, error) {
	b.mu.Lock()
	b.buf = append(b.buf, p[:min(len(p), b.most-len(b.buf))]...)
	b.mu.Unlock()
	select {
	case b.more <- struct{}{}:
	default:
	}
	return len(p), nil
}

// Bytes returns a copy of what is kept.
func (b *bounded) Bytes() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	return bytes.Clone(b.buf)
}
