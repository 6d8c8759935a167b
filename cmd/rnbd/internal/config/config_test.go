package config

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

type common struct {
	Level string `yaml:"log-level"`
	Left  string `yaml:"-"`
}

type thing struct {
	Device string   `yaml:"device"`
	Server []string `yaml:"server"`
}

func (t *thing) Check() (string, error) {
	if t.Device == "bad" {
		return "device", errors.New("device: it is bad")
	}
	if t.Device == "" {
		return "", errors.New("device is missing")
	}
	return "", nil
}

type root struct {
	common `yaml:",inline"`
	Pumps  int               `yaml:"pumps"`
	Spin   time.Duration     `yaml:"spin"`
	On     bool              `yaml:"on"`
	Listen []string          `yaml:"listen"`
	Things []thing           `yaml:"things"`
	Extra  map[string]string `yaml:"extra"`
}

func TestAFileIsRead(t *testing.T) {
	r := root{Pumps: 7, Listen: []string{"old"}}
	err := Decode("f", []byte("log-level: warn\nspin: 30s\non: true\nlisten: [a, b]\nthings:\n  - device: d\n    server: [x]\n  - {device: e}\nextra: {k: v}\n"), &r)
	if err != nil {
		t.Fatal(err)
	}
	if r.Level != "warn" || r.Pumps != 7 || r.Spin != 30*time.Second || !r.On || len(r.Listen) != 2 || len(r.Things) != 2 || r.Things[0].Server[0] != "x" || r.Extra["k"] != "v" {
		t.Errorf("got %+v", r)
	}
	for _, empty := range []string{"", "# only a comment\n", "pumps:\n"} {
		if err := Decode("f", []byte(empty), &r); err != nil || r.Pumps != 7 {
			t.Errorf("%q: %v, pumps %d", empty, err, r.Pumps)
		}
	}
}

func TestErrorsNameTheirPlace(t *testing.T) {
	for _, c := range []struct{ name, in, want string }{
		{"unknown key", "pumps: 1\nlog-levle: warn\n", `f: line 2, column 1: unknown key "log-levle"; did you mean "log-level"?`},
		{"key that is like none", "frobnicate: 1\n", `f: line 1, column 1: unknown key "frobnicate"`},
		{"unknown key in a list", "things:\n  - device: a\n    devcie: b\n", `f: line 3, column 5: unknown key "devcie"; did you mean "device"?`},
		{"field that is left out", "left: x\n", `f: line 1, column 1: unknown key "left"`},
		{"no number", "pumps: many\n", `f: line 1, column 8: pumps: "many" is no whole number`},
		{"no duration", "spin: soon\n", `f: line 1, column 7: spin: "soon" is no duration, as 30s or 5m`},
		{"no truth value", "on: 7\n", `f: line 1, column 5: on: "7" is no truth value, true or false`},
		{"group in place of a list", "listen: {a: b}\n", `f: line 1, column 9: listen: a group of keys is no list of words`},
		{"text in place of a list", "things: x\n", `f: line 1, column 9: things: "x" is no list`},
		{"entry of a list that is empty", "things:\n  - device: a\n  -\n", `f: line 3, column 4: things: an entry of the list is empty`},
		{"list in place of a group", "- a\n", `f: line 1, column 1: a list is no group of keys`},
		{"key that stands twice", "pumps: 1\npumps: 2\n", `f: line 2, column 1: key "pumps" stands in line 1 already`},
		{"value that its struct refuses", "things:\n  - server: [x]\n    device: bad\n", `f: line 3, column 13: device: it is bad`},
		{"group that its struct refuses", "things:\n  - server: [x]\n", `f: line 2, column 5: device is missing`},
		{"two errors", "a: 1\nb: 2\n", "f: line 1, column 1: unknown key \"a\"\nf: line 2, column 1: unknown key \"b\""},
		{"two documents", "pumps: 1\n---\npumps: 2\n", "f: there is more than one document, or one is broken"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := Decode("f", []byte(c.in), new(root)); err == nil || err.Error() != c.want {
				t.Errorf("got  %v\nwant %s", err, c.want)
			}
		})
	}
}

// A file that ends anywhere is read as far as it goes, or refused with its name.
func TestAFileThatEndsAnywhere(t *testing.T) {
	text := "log-level: warn\npumps: 12\nlisten:\n  - a:1\nthings:\n  - device: disk.img\n    server: [10.0.0.1]\n"
	for n := range len(text) {
		if err := Decode("f", []byte(text[:n]), new(root)); err != nil && !strings.HasPrefix(err.Error(), "f: ") {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
}

func TestFilesOfAFolder(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"b.yaml", "a.yaml", "c.yml", ".d.yaml", "e.yaml.new", "README"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	files, err := Files(dir)
	if err != nil || len(files) != 2 || filepath.Base(files[0]) != "a.yaml" || filepath.Base(files[1]) != "b.yaml" {
		t.Errorf("files %v, %v", files, err)
	}
	if files, err := Files(filepath.Join(dir, "none")); err != nil || files != nil {
		t.Errorf("of no folder: %v, %v", files, err)
	}
}
