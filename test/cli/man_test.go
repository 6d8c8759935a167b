package cli

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

// TestManPagesAreRendered has groff look at every page with all warnings on.
func TestManPagesAreRendered(t *testing.T) {
	groff := lab.Tool(t, "groff")
	dir := t.TempDir()
	for _, p := range []string{program(t), filepath.Join(filepath.Dir(program(t)), "rnbd-net")} {
		if out, err := exec.Command(p, "man", dir).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	pages, err := filepath.Glob(filepath.Join(dir, "*.[1-8]"))
	if err != nil || len(pages) < 30 {
		t.Fatalf("%d pages: %v", len(pages), err)
	}
	var text bytes.Buffer
	for _, p := range pages {
		var warnings bytes.Buffer
		cmd := exec.Command(groff, "-man", "-Tutf8", "-ww", "-P-c", "-P-b", "-P-u", p)
		cmd.Stdout, cmd.Stderr = &text, &warnings
		if err := cmd.Run(); err != nil || warnings.Len() > 0 {
			t.Errorf("%s: %v\n%s", filepath.Base(p), err, warnings.String())
		}
	}
	for _, want := range []string{"path_uu", "rnbd map disk.img from", "The noun may be left out", "U connected, _ not", "8  it took longer than allowed\n", "path_uu                PS             each path: U connected, _ not\n", "chunk-size:", "io-mode:", "bytes-per-second:", "The first rule that fits"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no page says %q", want)
		}
	}
	for _, not := range []string{"--help", "[=", filepath.Dir(program(t))} {
		if strings.Contains(text.String(), not) {
			t.Errorf("a page says %q", not)
		}
	}
	for _, name := range []string{"rnbd.7", "rnbd-map.1", "rnbd-device-list.1", "rnbd-discover.1", "rnbd-server-run.8", "rnbd-server.yaml.5", "rnbd-client.yaml.5", "rnbd-access.5", "rnbd-net.1", "rnbd-net-bond-enslave.1", "rnbd-net-run.8"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Error(err)
		}
	}
}

// TestManPagesAreTheSameForAllUsers: packages that another user builds are to be
// the same.
func TestManPagesAreTheSameForAllUsers(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to become another user")
	}
	dir, err := os.MkdirTemp("", "man") // below TempDir other users find nothing
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	body, err := os.ReadFile(program(t))
	if err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(dir, "rnbd")
	if err := errors.Join(os.Chmod(dir, 0o777), os.WriteFile(bin, body, 0o755)); err != nil {
		t.Fatal(err)
	}
	nobody := exec.Command(bin, "man", filepath.Join(dir, "nobody"))
	nobody.Env = []string{"HOME=/nonexistent", "XDG_RUNTIME_DIR=/run/user/65534", "COLUMNS=40"}
	nobody.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	for _, cmd := range []*exec.Cmd{nobody, exec.Command(bin, "man", filepath.Join(dir, "root"))} {
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	if out, err := exec.Command("diff", "-r", filepath.Join(dir, "root"), filepath.Join(dir, "nobody")).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestManPageOfAccessHasRulesThatWork has the program read the rules in the page.
func TestManPageOfAccessHasRulesThatWork(t *testing.T) {
	dir := t.TempDir()
	if out, err := exec.Command(program(t), "man", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	page, err := os.ReadFile(filepath.Join(dir, "rnbd-access.5"))
	if err != nil {
		t.Fatal(err)
	}
	_, rules, _ := strings.Cut(string(page), ".SH EXAMPLES\n.EX\n")
	rules, _, _ = strings.Cut(rules, ".EE\n")
	if strings.Count(rules, "allow:") != 2 {
		t.Fatalf("the page has no rules:\n%s", page)
	}
	file := filepath.Join(dir, "server.yaml")
	if err := os.WriteFile(file, []byte(strings.NewReplacer(`\-`, "-", `\(dq`, `"`).Replace(rules)), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(program(t), "config", "check", "server", file).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestMakeInstall installs what is built into a folder.
func TestMakeInstall(t *testing.T) {
	lab.Tool(t, "make")
	bin := filepath.Dir(program(t))
	dir := t.TempDir()
	// -o build: what is to be installed is there.
	cmd := exec.Command("make", "-C", "../..", "-o", "build", "install", "BIN="+bin, "DESTDIR="+dir, "PREFIX=/usr")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, name := range []string{
		"bin/rnbd", "bin/rnbd-net", "bin/io-fileio", "bin/frontend-nbd", "lib/systemd/system/rnbd-server.service", "lib/systemd/system/rnbd-client.service", "lib/systemd/system/rnbd-client-nbd.socket", "../etc/rnbd/server.yaml",
		"lib/udev/rules.d/65-rnbd.rules", "share/man/man1/rnbd-map.1", "share/man/man5/rnbd-server.yaml.5", "share/man/man5/rnbd-access.5", "share/man/man7/rnbd.7",
		"share/bash-completion/completions/rnbd", "share/zsh/site-functions/_rnbd", "share/fish/vendor_completions.d/rnbd.fish",
		"share/man/man1/rnbd-net.1", "share/man/man1/rnbd-net-link-add.1", "share/man/man8/rnbd-net-run.8", "share/man/man8/rnbd-net-registry-run.8",
		"share/bash-completion/completions/rnbd-net", "share/zsh/site-functions/_rnbd-net", "share/fish/vendor_completions.d/rnbd-net.fish",
	} {
		if st, err := os.Stat(filepath.Join(dir, "usr", name)); err != nil || st.Size() == 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
	if out, err := exec.Command(filepath.Join(dir, "usr/bin/rnbd"), "version").CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
