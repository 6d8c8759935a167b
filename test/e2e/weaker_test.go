package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

// A server is not upgraded to a configuration that protects less: the running process
// goes on with its rules.
func TestUpgrade_ToWeakerConfiguration(t *testing.T) {
	l := lab.New(t)
	file := filepath.Join(t.TempDir(), "server.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const rules = "access:\n  - address: [10.9.9.9/32]\n    device: ['**']\n    allow: rw\n"
	write(rules)
	s := l.Server(lab.ServerOptions{SearchPath: l.Image("disk.img", 1<<20), Plugins: []string{"fileio"}, Extra: []string{"--config", file}})
	for text, why := range map[string]string{
		"":                           "no file has access rules, and there were 1",
		rules + "confine: \"off\"\n": "confine is off",
	} {
		write(text)
		if _, err := s.Upgrade(""); err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("%q: %v, want %q", text, err, why)
		}
	}
	c := l.Client(lab.ClientOptions{})
	if _, err := c.Map("disk.img", s); err == nil {
		t.Error("a client that the rules refuse maps a device")
	}
	write(rules)
	if _, err := s.Upgrade(""); err != nil {
		t.Error(err)
	}
}
