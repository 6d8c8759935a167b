package main

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// The daemons read the file that the packages install, unless told otherwise, and
// `config check` and `doctor` look at that very file.
func TestConfigFiles(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root's daemons read the system's configuration")
	}
	t.Setenv("RNBD_SOCKET", "")
	was := systemConfig
	systemConfig = t.TempDir()
	t.Cleanup(func() { systemConfig = was })
	file, more := systemFile("server"), filepath.Join(systemDir("server"), "a.yaml")
	if err := os.Mkdir(systemDir("server"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{file, more} {
		if err := os.WriteFile(f, []byte("list: false\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		args, want []string
	}{
		{nil, []string{file, more}},
		{[]string{"--config", "none"}, []string{more}},
		{[]string{"--config="}, []string{more}},
		{[]string{"--config", more, "--config-dir", "none"}, []string{more}},
		{[]string{"--config-dir", "none"}, []string{file}},
		{[]string{"--socket", "/s"}, nil},
	} {
		root := newRoot()
		cmd, rest, err := root.Find(append([]string{"server", "run"}, c.args...))
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.ParseFlags(rest); err != nil {
			t.Fatal(err)
		}
		_, o := serverRun()
		o.Config, o.ConfigDir = cmd.Flags().Lookup("config").Value.String(), cmd.Flags().Lookup("config-dir").Value.String()
		if got, err := o.configFiles(cmd, "server"); err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%q: %q, %v, want %q", c.args, got, err, c.want)
		}
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	cmd, o := serverRun()
	if got := o.configFile(cmd, "server"); got != "" {
		t.Errorf("a file that is not there is read: %s", got)
	}
}
