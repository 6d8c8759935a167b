package names

import (
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

func TestSpellings(t *testing.T) {
	for name, want := range map[string]string{
		"disk.img":             "disk.img",
		"é €":                  "é €",
		"caf\xe9.img":          `caf\xe9.img`,
		`CORP\alice`:           `CORP\\alice`,
		`dev\x2d1`:             `dev\\x2d1`,
		"a\nb\x1b[2J\x7f":      `a\x0ab\x1b[2J\x7f`,
		"\u202etxt":            `\xe2\x80\xaetxt`,
		"\u0085":               `\xc2\x85`,
		"\ufffd":               "\ufffd",
		"":                     "",
		"\x00":                 `\x00`,
		strings.Repeat(`\`, 3): strings.Repeat(`\`, 6),
	} {
		if got := Spell(name); got != want {
			t.Errorf("Spell(%q) is %s, want %s", name, got, want)
		}
	}
}

func TestParseTakesWhatUsersType(t *testing.T) {
	for typed, want := range map[string]string{
		`a\b`: `a\b`, `a\`: `a\`, `\x4`: `\x4`, `\xE9`: "\xe9", `\xzz`: `\xzz`, `\\x41`: `\x41`, "raw\xe9": "raw\xe9", `\x`: `\x`,
	} {
		if got := Parse(typed); got != want {
			t.Errorf("Parse(%q) is %q, want %q", typed, got, want)
		}
	}
	if got := Canonical("caf\xe9" + `\`); got != `caf\xe9\\` {
		t.Errorf("a name that is typed raw is %s", got)
	}
}

func TestTexts(t *testing.T) {
	if got := Text("\"s\\xff\" is\ngone\x1b[2J\xff"); got != "\"s\\xff\" is\ngone\\x1b[2J\\xff" {
		t.Errorf("a text: %q", got)
	}
	if got := Valid("a\\b\x1b\xff"); got != "a\\b\x1b\\xff" {
		t.Errorf("an argument: %q", got)
	}
	for in, want := range map[string]string{
		"a\nb\xff":                        `a\x0ab\xff`,
		strings.Repeat("x", 300):          strings.Repeat("x", 256) + "...",
		strings.Repeat("é", 300):          strings.Repeat("é", 128) + "...",
		strings.Repeat("\x1b", 300):       strings.Repeat(`\x1b`, 64) + "...",
		strings.Repeat("x", 254) + "\x1b": strings.Repeat("x", 254) + `\x...`,
		"plain \"quoted\"":                "plain \"quoted\"",
	} {
		if got := Line(in); got != want {
			t.Errorf("Line(%q) is %q", in, got)
		}
	}
}

func FuzzSpellingsAreReversible(f *testing.F) {
	for _, s := range []string{"", "a", `\`, `\x41`, "\xff\xe9", "a\n\u202e", `\\x`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, name string) {
		s := Spell(name)
		if Parse(s) != name {
			t.Errorf("%q is spelled %s, and that stands for %q", name, s, Parse(s))
		}
		if Canonical(s) != s {
			t.Errorf("the spelling %s is changed into %s", s, Canonical(s))
		}
		for _, text := range []string{s, Line(name)} {
			if !utf8.ValidString(text) || strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
				t.Errorf("%q is not printable", text)
			}
		}
		if !utf8.ValidString(Text(name)) || !utf8.ValidString(Valid(name)) || len(Line(name)) > maxLine+3 {
			t.Errorf("texts of %q", name)
		}
	})
}
