package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

// TestDoctorKnowsKeys: doctor says that a server wants TLS, or a challenge, whether
// it accepts the keys, and what is wrong with their files.
func TestDoctorKnowsKeys(t *testing.T) {
	l := lab.New(t)
	right, wrong := sharedKey(t, t.TempDir(), "right"), sharedKey(t, t.TempDir(), "right")
	images := l.Image("disk.img", 1<<20)
	socket := filepath.Join(shortDir(t), "none.sock")
	doctor := func(args ...string) result {
		return rnbd(t, append([]string{"--socket", socket, "doctor", "--all"}, args...)...)
	}
	for mode, wants := range map[string]string{"--tls": "the server wants TLS", "--auth": "the server wants a challenge"} {
		s := l.Server(lab.ServerOptions{SearchPath: images, Plugins: []string{"fileio"}, Extra: []string{mode, "require", "--tls-psk", right}})
		addr := s.Addrs[0] + "%iwarp"
		for name, c := range map[string]struct {
			args  []string
			works bool
			words string
		}{
			"without keys": {nil, false, wants},
			"other keys":   {[]string{mode, "require", "--tls-psk", wrong}, false, "->"},
			"keys":         {[]string{mode, "require", "--tls-psk", right}, true, "a server of ours"},
		} {
			r := doctor(append([]string{addr}, c.args...)...)
			if served := strings.Contains(r.out, "a server of ours"); served != c.works || !strings.Contains(r.out, c.words) {
				t.Errorf("%s %s: %s%s", mode, name, r.out, r.err)
			}
		}
		s.Stop()
	}
	if err := os.Chmod(right, 0o644); err != nil {
		t.Fatal(err)
	}
	if r := doctor("--tls-psk", right); !strings.Contains(r.out, "other users can read it") || !strings.Contains(r.out, "chmod 600") {
		t.Errorf("a key that others can read: %s%s", r.out, r.err)
	}
	doctor("--auth", "maybe", "127.0.0.1:1").want(t, 2, "use off, allow")
}
