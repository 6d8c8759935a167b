package config

import (
	"strings"
	"testing"
)

type closed struct {
	common `yaml:",inline"`
	TLS    string   `yaml:"tls"`
	Rules  []thing  `yaml:"nbd-access"`
	Loss   string   `yaml:"loss"`
	Things []export `yaml:"things"`
}

type export struct {
	Name    string            `yaml:"name"`
	Device  string            `yaml:"device"`
	Server  []string          `yaml:"server"`
	Loss    string            `yaml:"loss"`
	Options map[string]string `yaml:"options"`
}

const cutHead = sealBegin + "written by a program\n"

// Inspect finds the first thing beside the list in a broken file, and the names in
// the list.
func TestWhatABrokenFileHas(t *testing.T) {
	for _, c := range []struct{ name, text, other, names string }{
		{"unknown key in an entry", "things:\n  - name: a\n    devcie: x\n", "", "a"},
		{"the list's key is misspelt", "thigns:\n  - name: a\n", "", "a"},
		{"a name that is misspelt", "things:\n  - nmae: a\n  - {name: b}\n", "", "a b"},
		{"key that is like none", "things:\n  - name: a\n    frobnicate: 1\n", "", "a"},
		{"wrong value", "things: {name: a, server: {b: c}}\n", "", "a"},
		{"key of both is one of the entry", "things:\n  - name: a\n    loss: [x]\n", "", "a"},
		{"list that stands twice", "things: [{name: a}]\nthings: [{name: b}]\n", "", "a b"},
		{"options may have any key", "things:\n  - name: a\n    bad: 1\n    options: {anything: x}\n", "", "a"},

		{"setting", "tls: require\nthings: [{nmae: a}]\n", `line 1: key "tls"`, "a"},
		{"setting that is misspelt", "things: [{name: a}]\ntsl: require\n", `line 2: key "tsl"`, "a"},
		{"setting of a later version", "things: [{name: a}]\nfrobnicate: 1\n", `line 2: key "frobnicate"`, "a"},
		{"setting that an entry has too", "loss: x\nthings: [{bad: a}]\n", `line 1: key "loss"`, ""},
		{"setting by a wrong indentation", "things:\n  - name: a\n    tls: require\n", `line 3: key "tls"`, "a"},
		{"the same, misspelt", "things:\n  - name: a\n    nbd-acess: []\n", `line 3: key "nbd-acess"`, "a"},
		{"two documents", "things: []\n---\ntls: require\n", "there is more than one document", ""},
		{"a list of settings", "- tls: require\n", "line 1: no group of keys", ""},
		{"merged settings", "<<: {tls: require}\nthings: []\n", `line 1: key "<<"`, ""},

		{"no YAML: a bracket", "# mine\nthings:\n  - {name: a, server: [x}\n  - {name: 'b'}\n", "", "a b"},
		{"no YAML: a list without indentation", "things:\n- name: a\n  server: [x\n", "", "a"},
		{"no YAML: a tab", "---\nthings:\n  - device: x\n\tname: a\n", "", "a"},
		{"no YAML: bracket on a line of its own", "things: [\n  {name: a,\n]\n", "", "a"},
		{"no YAML: addresses, and a value with a colon", "things:\n  - {name: a, server: [\"10.0.0.1:1%iwarp\", \"[fe80::1]:2\"], loss: queue:5m\n", "", "a"},

		{"no YAML: setting", "things:\n  - {name: a\ntls: require\n", `line 3: "tls: require"`, "a"},
		{"no YAML: setting first", "tls: require\nthings:\n  - {name: a\n", `line 1: "tls: require"`, "a"},
		{"no YAML: setting without a colon", "things:\n  - {name: a\ntls require\n", `line 3: "tls require"`, "a"},
		{"no YAML: the same, indented", "things:\n  - {name: a\n  tls require\n", `line 3: "tls"`, "a"},
		{"no YAML: setting by a wrong indentation", "things:\n  - name: a\n tls: require\n", `line 3: "tls"`, "a"},
		{"no YAML: setting in braces", "things:\n  - {device: x,tls: require, [\n", `line 2: key "tls"`, ""},
		{"no YAML: all in braces", "{things: [{name: a}], 'tls': x\n", `line 1: "{things: [{name: a}], 'tls': x"`, ""},
		{"no YAML: quoted", "things: [\n\"nbd-access\": [\n", `line 2: "\"nbd-access\": ["`, ""},
		{"no YAML: zeros", "things:\n  - {name: a\n\x00\x00\n", "line 3: a control character", "a"},
		{"no YAML: no end of the last line", "things:\n  - {name: a", "its last line has no end: the file may be cut", "a"},

		{"cut", cutHead + "things:\n  - name: b\n    de", "", "f b"},
		{"cut in a quotation", cutHead + "things:\n  - name: \"b", "", "f b"},
		{"cut, and settings behind it", cutHead + "things:\n  - name: b\ntls: require\n", `line 4: key "tls"`, "f b"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := Decode("f.yaml", []byte(c.text), new(closed)); err == nil && !strings.HasPrefix(c.name, "options") {
				t.Error("it is not broken")
			}
			got := Inspect("/x/f.yaml", []byte(c.text), new(closed), "things")
			if got.Other != c.other || strings.Join(got.Names, " ") != c.names {
				t.Errorf("other %q, names %q\nwant  %q, names %q", got.Other, got.Names, c.other, c.names)
			}
		})
	}
}

// A setting is found wherever in a broken file it stands.
func FuzzASettingIsFound(f *testing.F) {
	f.Add("things:\n  - {name: a\n", "  - {name: b}\n")
	f.Add("things: [{nmae: a}]\n", "")
	f.Add("{", "}")
	f.Fuzz(func(t *testing.T, before, after string) {
		for _, text := range []string{before + "\ntls: require\n" + after, before + "\n  tls: require\n" + after} {
			o := new(closed)
			if err := Decode("f", []byte(text), o); err == nil || strings.ContainsAny(before, "#|>\"'") {
				continue // it is whole, or the setting is within a text
			}
			if got := Inspect("f", []byte(text), new(closed), "things"); got.Other == "" {
				t.Errorf("%q has nothing else: %+v", text, got)
			}
		}
	})
}
