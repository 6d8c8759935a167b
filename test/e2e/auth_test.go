package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sdktest"
	"github.com/rnbd-go/rnbd/test/lab"
)

// tenantRules let each tenant open its own images. Without an identity the address
// decides.
const tenantRules = `
access:
  - identity: [psk:tenant-a]
    device: [a/**]
    allow: rw
  - identity: [psk:tenant-b]
    device: [b/**]
    allow: rw
  - address: [127.0.0.1]
    fabric: [iwarp]
    device: [old/**]
    allow: ro
`

// TestTenantsOverRoCE: two clients with keys, over a fabric without TLS, cannot
// see each other's devices. A client without keys, as a kernel's, has a listener
// and a rule for its address.
func TestTenantsOverRoCE(t *testing.T) {
	l := lab.New(t)
	dir := t.TempDir()
	keys := map[string]string{"a": sharedKey(t, dir, "tenant-a"), "b": sharedKey(t, dir, "tenant-b")}
	all, config, audit := filepath.Join(dir, "all.psk"), filepath.Join(dir, "server.yaml"), filepath.Join(dir, "audit.json")
	var lines []byte
	for _, file := range keys {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		lines = append(lines, b...)
	}
	images := filepath.Join(dir, "images")
	for name, text := range map[string]string{all: string(lines), config: tenantRules} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, tenant := range []string{"a", "b", "old"} {
		if err := os.MkdirAll(filepath.Join(images, tenant), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(images, tenant, "disk.img"), make([]byte, 1<<20), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	roce := lab.LoopbackAddr(21) + ":4500"
	plain := "127.0.0.1:" + freePort(t)
	s := l.Server(lab.ServerOptions{SearchPath: images, Plugins: []string{"fileio"}, Listen: []string{"rocev2://" + roce, plain + ",auth=off"},
		Extra: []string{"--config", config, "--auth", "require", "--tls-psk", all, "--audit", audit}})
	open := func(c *lab.Client, path, session, device string) error {
		_, err := c.API.Map(t.Context(), &controlpb.MapRequest{Path: device, Paths: []string{path}, Session: session, AccessMode: "ro"})
		return err
	}
	for i, tenant := range []string{"a", "b"} {
		other := map[string]string{"a": "b", "b": "a"}[tenant]
		c := l.Client(lab.ClientOptions{Extra: []string{"--auth", "require", "--tls-psk", keys[tenant]}})
		path := lab.LoopbackAddr(byte(22+i)) + "@" + roce + "%rocev2"
		if err := open(c, path, tenant, tenant+"/disk.img"); err != nil {
			t.Fatalf("tenant %s: %v", tenant, err)
		}
		for _, device := range []string{other + "/disk.img", "old/disk.img"} {
			if err := open(c, path, tenant, device); err == nil {
				t.Errorf("tenant %s has opened %s", tenant, device)
			}
		}
		if p := sessionsOf(t, c)[0].Paths[0].Security; p.GetProtocol() != "challenge" || p.GetPeer() != "psk:tenant-"+tenant {
			t.Errorf("tenant %s: %v", tenant, p)
		}
	}
	rnbd(t, "--socket", s.Socket, "path", "list", "sessname,auth,tls,peer").want(t, 0, "challenge HMAC-SHA-256", "psk:tenant-a", "psk:tenant-b")
	rnbd(t, "--socket", s.Socket, "server", "access", "check", "psk:tenant-a", "b/disk.img", "ro").want(t, 6)

	stranger := l.Client(lab.ClientOptions{})
	err := open(stranger, lab.LoopbackAddr(24)+"@"+roce+"%rocev2", "old", "old/disk.img")
	if err == nil || !strings.Contains(err.Error(), "--auth") {
		t.Errorf("without keys: %v", err)
	}
	if err := open(stranger, plain, "old", "a/disk.img"); err == nil {
		t.Error("a client without keys has opened the image of a tenant")
	}
	if err := open(stranger, plain, "old", "old/disk.img"); err != nil {
		t.Errorf("by its address: %v", err)
	}
	if log := s.Log(); !strings.Contains(log, "the client proves no identity, and this listener requires that") {
		t.Error("the server's log does not say why a client is refused")
	}
	impostor := l.Client(lab.ClientOptions{Extra: []string{"--auth", "require", "--tls-psk", sharedKey(t, t.TempDir(), "tenant-a")}})
	if err := open(impostor, lab.LoopbackAddr(25)+"@"+roce+"%rocev2", "fake", "a/disk.img"); err == nil {
		t.Error("a client with another key for the identity has opened its image")
	}
	sdktest.Eventually(t, "the audit log has what is opened and what is refused", func() bool {
		b, err := os.ReadFile(audit)
		return err == nil && strings.Contains(string(b), `"identity":"psk:tenant-a","device":"a/disk.img"`) &&
			strings.Contains(string(b), `"event":"proof","result":"the client proves no identity`) &&
			strings.Contains(string(b), `"session":"fake","client":"`+lab.LoopbackAddr(25)) && strings.Contains(string(b), `"claimed":"psk:tenant-a"`)
	})
}

// TestAuthFailsClosed: no wrong pair of settings maps a device.
func TestAuthFailsClosed(t *testing.T) {
	l := lab.New(t)
	dir := t.TempDir()
	right := sharedKey(t, dir, "right")
	wrong := sharedKey(t, t.TempDir(), "right") // the same identity, another key
	images := l.Image("disk.img", 1<<20)
	with := func(mode, key string) []string { return []string{"--auth", mode, "--tls-psk", key} }
	for name, c := range map[string]struct {
		server, client []string
		works          bool
	}{
		"required, client without":        {with("require", right), nil, false},
		"server without, client requires": {nil, with("require", right), false},
		"wrong key":                       {with("allow", right), with("allow", wrong), false},
		"required, client with TLS only":  {with("require", right), []string{"--tls", "require", "--tls-psk", right}, false},
		"TLS for those that have it":      {append(with("require", right), "--tls", "allow"), []string{"--tls", "require", "--tls-psk", right}, true},
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

func TestAuthSettingsThatAreRefused(t *testing.T) {
	key := sharedKey(t, t.TempDir(), "x")
	for words, args := range map[string][]string{
		"use off, allow or require":        {"server", "run", "--auth", "maybe"},
		"neither trusted nor auth=MODE":    {"server", "run", "--listen", "127.0.0.1:1,authentic"},
		"\"yes\": use off, allow":          {"server", "run", "--listen", "127.0.0.1:1,auth=yes"},
		"TLS needs":                        {"client", "run", "--auth", "require"},
		"--auth is":                        {"client", "run", "--tls-psk", key},
		"127.0.0.1:1,auth=require,trusted": {"server", "run", "--tls", "require", "--tls-psk", key, "--listen", "rocev2://127.0.0.1:1,auth=require"},
	} {
		rnbd(t, append(args, "--socket", filepath.Join(shortDir(t), "s.sock"))...).want(t, 2, words)
	}
	rnbd(t, "server", "run", "--listen", "127.0.0.1:1,auth=require", "--socket", filepath.Join(shortDir(t), "s.sock")).want(t, 2, "TLS needs")
}
