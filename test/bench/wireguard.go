package main

import (
	"crypto/ecdh"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/rnbd-go/rnbd/test/lab"
)

// wireguardModule is the path of wireguard-go, a peer of this benchmark only.
const wireguardModule = "golang.zx2c4.com/wireguard"

// wireguard returns a function that starts a device of wireguard-go on both hosts.
func (s *site) wireguard(netpeer string) func(*network) error {
	return func(n *network) error {
		var keys [2]*ecdh.PrivateKey
		for i := range keys {
			var err error
			if keys[i], err = ecdh.X25519().GenerateKey(rand.Reader); err != nil {
				return err
			}
		}
		for i, h := range [][3]string{{n.near, farEnd, nearHost}, {n.far, nearEnd, farHost}} {
			config := fmt.Sprintf("private_key=%s\nlisten_port=51820\npublic_key=%s\nendpoint=%s:51820\nallowed_ip=0.0.0.0/0\n\n",
				hex.EncodeToString(keys[i].Bytes()), hex.EncodeToString(keys[1-i].PublicKey().Bytes()), h[1])
			file := filepath.Join(s.ram, h[0]+".conf")
			if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
				return err
			}
			p, err := s.runIn(h[0], "wireguard", "sh", "-c", `exec "$0" wireguard wg0 1420 <"$1"`, netpeer, file)
			if err != nil {
				return err
			}
			n.daemons = append(n.daemons, p.pid())
			if err := n.appeared(p, h[0], "wg0", h[2]); err != nil {
				return err
			}
		}
		return nil
	}
}

// wireguardVersion returns the version of the module in the go.mod of the tests.
func wireguardVersion() string {
	gomod, _ := os.ReadFile(filepath.Join(lab.Root(), "test", "go.mod"))
	for line := range strings.Lines(string(gomod)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == wireguardModule {
			return f[1]
		}
	}
	return ""
}
