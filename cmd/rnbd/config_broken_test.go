package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/handover"
)

// startClientWith reads a folder of files as a client that starts does.
func startClientWith(t *testing.T, pre *handover.Predecessor, files map[string]string, flags ...string) (*clientOptions, string, error) {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cmd, o := clientRun()
	for i := range flags {
		flags[i] = strings.ReplaceAll(flags[i], "DIR", dir)
	}
	if err := cmd.ParseFlags(append([]string{"--config-dir", dir}, flags...)); err != nil {
		t.Fatal(err)
	}
	err := o.loadAtStart(cmd, pre)
	return o, dir, err
}

func namesOf(o *clientOptions) string {
	var names []string
	for _, m := range o.Mappings {
		names = append(names, m.Name)
	}
	return strings.Join(names, " ")
}

const soundFile = "mappings:\n  - {device: a.img, server: [10.0.0.1], name: a}\n"

func TestABrokenFileLeavesTheMappingsOfOthers(t *testing.T) {
	for _, c := range []struct{ name, text, mappings, problem string }{
		{"unknown key", "mappings:\n  - {device: b.img, server: [10.0.0.1], name: b}\n  - {name: c, devcie: c.img, server: [10.0.0.1]}\n", "a d", `b.yaml: line 3, column 15: unknown key "devcie"; did you mean "device"?`},
		{"wrong value", "mappings:\n  - {device: b.img, server: [nowhere], name: b}\n", "a d", "b.yaml: line 2, column 29"},
		{"no YAML", "mappings:\n  - {device: b.img, server: [10.0.0.1}\n", "a d", "b.yaml: yaml: line 1: "},
		{"the key is misspelt", "mapings:\n  - {device: b.img, server: [10.0.0.1], name: b}\n", "a d", `unknown key "mapings"; did you mean "mappings"?`},
		{"a cut file of --persist", "# Up to the line \"# end\" this was written by \"rnbd map --persist\"; x\nmappings:\n  - device: b.img\n    server: [10.0.0.1]\n", "a d", "b.yaml: the file is cut"},
		{"a name that another file has", "mappings:\n  - {devcie: b.img, server: [10.0.0.1], name: a}\n", "d", `the mapping of a.img as "a" is not made`},
	} {
		t.Run(c.name, func(t *testing.T) {
			o, dir, err := startClientWith(t, nil, map[string]string{
				"a.yaml": soundFile, "b.yaml": c.text, "d.yaml": "mappings:\n  - {device: d.img, server: [10.0.0.1], name: d}\npumps: 3\n",
			})
			if err != nil {
				t.Fatal(err)
			}
			said := strings.Join(o.broken.problems, "\n")
			if namesOf(o) != c.mappings || o.Pumps != 3 || !strings.Contains(said, c.problem) || !strings.HasPrefix(said, dir+"/b.yaml: ") {
				t.Errorf("mappings %q, %d pumps, and problems\n%s\nwant %q and %q", namesOf(o), o.Pumps, said, c.mappings, c.problem)
			}
		})
	}
}

// A start without a setting that may protect is refused.
func TestABrokenFileThatMayProtectEndsTheStart(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{"rules of NBD clients", "nbd-access:\n  - {allow: rx}\n", `line 1: key "nbd-access"`},
		{"TLS", soundFile + "tls: require\npumsp: 2\n", `line 3: key "tls"`},
		{"TLS, misspelt", soundFile + "tsl: require\n", `unknown key "tsl"; did you mean "tls"?`},
		{"confinement, by a wrong indentation", "mappings:\n  - device: b.img\n    confine: strict\n", `line 3: key "confine"`},
		{"key that this version does not know", soundFile + "frobnicate: 1\n", `line 3: key "frobnicate"`},
		{"no YAML", "mappings:\n  - {device: b.img\nnbd-access: []\n", `line 3: "nbd-access: []"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, dir, err := startClientWith(t, nil, map[string]string{"a.yaml": soundFile, "b.yaml": c.text})
			if err == nil || exitCode(err) != exitUsage || !strings.Contains(err.Error(), dir+"/b.yaml: the daemon does not start without the file") || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %s", err, c.want)
			}
		})
	}
}

func TestBrokenFilesThatEndTheStart(t *testing.T) {
	const bad = "mappings:\n  - {devcie: b.img}\n"
	if o, _, err := startClientWith(t, new(handover.Predecessor), map[string]string{"a.yaml": soundFile, "b.yaml": bad}); err == nil {
		t.Errorf("a process that takes over does without a file: %q", namesOf(o))
	}
	if o, _, err := startClientWith(t, nil, map[string]string{"a.yaml": soundFile, "client": bad}, "--config", "DIR/client"); err == nil {
		t.Errorf("the file of --config is left out: %q", namesOf(o))
	}
	if o, _, err := startClientWith(t, nil, map[string]string{"a.yaml": soundFile, "b.yaml": soundFile}); err == nil || !strings.Contains(err.Error(), "two mappings") {
		t.Errorf("a name that stands twice: %v, %q", err, namesOf(o))
	}
	dir := t.TempDir()
	if err := os.Symlink("nowhere", filepath.Join(dir, "b.yaml")); err != nil {
		t.Fatal(err)
	}
	if o, _, err := startClientWith(t, nil, nil, "--config-dir", dir); err == nil {
		t.Errorf("a file that cannot be read is left out: %q", namesOf(o))
	}
}

// A server has rules and limits in any of its files, and takes all or none.
func TestAServerTakesAllFiles(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"a.yaml": "search-path: /srv\n", "b.yaml": "acess: []\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cmd, o := serverRun()
	if err := cmd.ParseFlags([]string{"--config-dir", dir}); err != nil {
		t.Fatal(err)
	}
	if err := o.load(cmd); err == nil || exitCode(err) != exitUsage {
		t.Errorf("got %v", err)
	}
}
