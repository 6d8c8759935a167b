package e2e

import (
	"crypto/sha256"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return port
}

// sharedKey makes a file with a key for an identity.
func sharedKey(t *testing.T, dir, identity string) string {
	t.Helper()
	file := filepath.Join(dir, identity+".psk")
	rnbd(t, "psk", "new", identity, "--file", file).want(t, 0)
	return file
}

func TestTLSCarriesDataAndIsShown(t *testing.T) {
	key := sharedKey(t, t.TempDir(), "tenant-a")
	r := newRig(t, rigOptions{size: 16 << 20,
		server: lab.ServerOptions{Extra: []string{"--tls", "require", "--tls-psk", key}},
		client: lab.ClientOptions{Extra: []string{"--tls", "require", "--tls-psk", key}}})
	c := r.dial()
	data := noise(1, 3<<20)
	for off := 0; off < len(data); off += 1 << 20 {
		if _, err := c.WriteAt(data[off:][:1<<20], int64(off)); err != nil {
			t.Fatal(err)
		}
	}
	back := make([]byte, len(data))
	for off := 0; off < len(data); off += 1 << 20 {
		if _, err := c.ReadAt(back[off:][:1<<20], int64(off)); err != nil {
			t.Fatal(err)
		}
	}
	if sha256.Sum256(back) != sha256.Sum256(data) {
		t.Error("data differ")
	}
	for _, s := range sessionsOf(t, r.client) {
		for _, p := range s.Paths {
			if p.Security.GetProtocol() != "TLS 1.3" || p.Security.GetPeer() != "psk:tenant-a" || p.Security.GetCipher() == "" {
				t.Errorf("path %s: %v", p.Name, p.Security)
			}
		}
	}
	r.serverCLI("path", "list", "tls,peer").want(t, 0, "TLS 1.3", "psk:tenant-a")
}

// TestTLSFailsClosed: no wrong pair of settings maps a device.
func TestTLSFailsClosed(t *testing.T) {
	l := lab.New(t)
	dir := t.TempDir()
	right := sharedKey(t, dir, "right")
	wrong := sharedKey(t, t.TempDir(), "right") // the same identity, another key
	images := l.Image("disk.img", 1<<20)
	require := func(key string) []string { return []string{"--tls", "require", "--tls-psk", key} }
	for name, c := range map[string]struct {
		server, client []string
		works          bool
	}{
		"both plain":                      {nil, nil, true},
		"required, client without":        {require(right), nil, false},
		"server without, client requires": {nil, require(right), false},
		"wrong key":                       {require(right), require(wrong), false},
		"allowed, client without":         {[]string{"--tls", "allow", "--tls-psk", right}, nil, true},
		"allowed, client with":            {[]string{"--tls", "allow", "--tls-psk", right}, require(right), true},
		"allowed, wrong key":              {[]string{"--tls", "allow", "--tls-psk", right}, require(wrong), false},
	} {
		s := l.Server(lab.ServerOptions{SearchPath: images, Plugins: []string{"fileio"}, Extra: c.server})
		client := l.Client(lab.ClientOptions{Extra: c.client})
		_, err := client.API.Map(t.Context(), &controlpb.MapRequest{Path: "disk.img", Paths: s.Addrs, Session: "s", AccessMode: "ro"})
		if (err == nil) != c.works {
			t.Errorf("%s: %v", name, err)
		}
		client.Stop()
		s.Stop()
	}
}

func TestTLSSettingsThatAreRefused(t *testing.T) {
	dir := t.TempDir()
	key := sharedKey(t, dir, "x")
	half := filepath.Join(dir, "half")
	if err := os.WriteFile(half, []byte("x:0011"), 0o600); err != nil {
		t.Fatal(err)
	}
	for words, args := range map[string][]string{
		"use off, allow or require":          {"server", "run", "--tls", "maybe"},
		"use off or require":                 {"client", "run", "--tls", "allow", "--tls-psk", key},
		"TLS needs":                          {"server", "run", "--tls", "require"},
		"--tls is off":                       {"server", "run", "--tls-psk", key},
		"at least 16":                        {"server", "run", "--tls", "require", "--tls-psk", half},
		"no such file":                       {"client", "run", "--tls", "require", "--tls-psk", filepath.Join(dir, "none")},
		"write rocev2://127.0.0.1:1,trusted": {"server", "run", "--tls", "require", "--tls-psk", key, "--listen", "rocev2://127.0.0.1:1"},
		"has a key of \"x\" already":         {"psk", "new", "x", "--file", key},
		"identity \"a b\" has the character": {"psk", "new", "a b"},
	} {
		if args[1] == "run" {
			args = append(args, "--socket", filepath.Join(shortDir(t), "s.sock"))
		}
		rnbd(t, args...).want(t, 2, words)
	}
}

// TestTLSKeysChangeUnderLoad: new keys in the server's file are used for what
// comes, and what is there goes on.
func TestTLSKeysChangeUnderLoad(t *testing.T) {
	dir := t.TempDir()
	keys := filepath.Join(dir, "keys")
	mine, theirs := sharedKey(t, dir, "mine"), sharedKey(t, dir, "theirs")
	replace := func(file string) {
		t.Helper()
		b, err := os.ReadFile(file)
		if err == nil {
			err = os.WriteFile(keys+".next", b, 0o600)
		}
		if err == nil {
			err = os.Rename(keys+".next", keys)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	replace(mine)
	r := newRig(t, rigOptions{size: 16 << 20,
		server: lab.ServerOptions{Extra: []string{"--tls", "require", "--tls-psk", keys}},
		client: lab.ClientOptions{Extra: []string{"--tls", "require", "--tls-psk", mine}}})
	c := r.dial()
	stop, done := make(chan struct{}), make(chan error, 1)
	go func() {
		for n := int64(0); ; n++ {
			select {
			case <-stop:
				done <- nil
				return
			default:
			}
			if _, err := c.WriteAt(noise(uint64(n), 4096), n%256*4096); err != nil {
				done <- fmt.Errorf("write %d: %w", n, err)
				return
			}
		}
	}()
	other := r.Client(lab.ClientOptions{Extra: []string{"--tls", "require", "--tls-psk", theirs}})
	mapOther := func() error {
		_, err := other.API.Map(t.Context(), &controlpb.MapRequest{Path: "disk.img", Paths: r.server.Addrs, Session: "other", AccessMode: "ro"})
		return err
	}
	if err := mapOther(); err == nil {
		t.Error("an unknown key got in")
	}
	for i := range 20 {
		replace([]string{mine, theirs}[i%2])
		r.server.Signal(syscall.SIGHUP)
		time.Sleep(10 * time.Millisecond)
	}
	if err := mapOther(); err != nil {
		t.Errorf("the new key: %v", err)
	}
	close(stop)
	if err := <-done; err != nil {
		t.Error(err)
	}
	if n := sessionsOf(t, r.client)[0].Paths[0].Reconnects; n != 0 {
		t.Errorf("%d reconnects", n)
	}
	if !strings.Contains(r.server.Log(), "the files are read again") {
		t.Error("no line in the log")
	}
}
