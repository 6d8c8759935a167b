// Package names spells names that other hosts and file systems choose.
//
// The name of a session, of a device or of a host is a sequence of bytes on the wire
// and in a file system. Commands, the control API, metrics, records and control files
// show its spelling, which is valid UTF-8 and printable, and take the spelling back.
//
//	names.Spell("caf\xe9.img")     // caf\xe9.img, 12 printable characters
//	names.Parse(`caf\xe9.img`)     // the name again
//
// In a spelling a backslash is written twice. A byte of an unprintable character, or
// one that is not UTF-8, is written \xNN, with two hexadecimal digits.
package names

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

const hexDigits = "0123456789abcdef"

// Spell returns the spelling of name. Two names never have the same spelling.
func Spell(name string) string {
	return escape(name, func(r rune) bool { return r == '\\' || !unicode.IsPrint(r) })
}

// Parse returns the name of a spelling: Parse(Spell(name)) is name. A backslash that
// begins neither \\ nor \xNN stands for itself, and so does each other byte. The
// result has at most as many bytes as spelling.
func Parse(spelling string) string {
	if !strings.Contains(spelling, `\`) {
		return spelling
	}
	out := make([]byte, 0, len(spelling))
	for i := 0; i < len(spelling); {
		b, n := parseByte(spelling[i:])
		out = append(out, b)
		i += n
	}
	return string(out)
}

// parseByte returns the byte at the beginning of s, and the length of its spelling.
func parseByte(s string) (byte, int) {
	switch {
	case strings.HasPrefix(s, `\\`):
		return '\\', 2
	case len(s) >= 4 && s[0] == '\\' && s[1] == 'x':
		high, low := strings.IndexByte(hexDigits, lower(s[2])), strings.IndexByte(hexDigits, lower(s[3]))
		if high >= 0 && low >= 0 {
			return byte(high<<4 | low), 4
		}
	}
	return s[0], 1
}

func lower(c byte) byte {
	if c >= 'A' && c <= 'F' {
		return c + 'a' - 'A'
	}
	return c
}

// Canonical returns the spelling of the name that a user has typed, as a spelling or
// as the bytes of the name.
func Canonical(typed string) string { return Spell(Parse(typed)) }

// Text returns a text for people with the unprintable characters as \xNN. Line feeds,
// tabs and backslashes stay: a text is shown only, and quotes names itself.
func Text(text string) string {
	return escape(text, func(r rune) bool { return !unicode.IsPrint(r) && r != '\n' && r != '\t' })
}

// Valid returns s with each byte that is not UTF-8 as \xNN, for an argument that may
// be a spelling already.
func Valid(s string) string { return escape(s, func(rune) bool { return false }) }

// maxLine is the length of a Line in bytes, without the dots.
const maxLine = 256

// Line is Text in one line, cut at 256 bytes.
func Line(text string) string {
	cut := len(text) > maxLine
	if cut {
		text = text[:maxLine]
	}
	out := escape(text, func(r rune) bool { return !unicode.IsPrint(r) })
	if len(out) > maxLine {
		out, cut = strings.ToValidUTF8(out[:maxLine], ""), true
	}
	if cut {
		out += "..."
	}
	return out
}

// escape writes each rune that special names, and each byte that is not UTF-8, as an
// escape. It allocates nothing for a text without any.
func escape(s string, special func(rune) bool) string {
	i := indexSpecial(s, special)
	if i < 0 {
		return s
	}
	out := append(make([]byte, 0, len(s)+16), s[:i]...)
	for i < len(s) {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == '\\' && special(r):
			out = append(out, `\\`...)
		case r == utf8.RuneError && n == 1 || special(r):
			for _, b := range []byte(s[i : i+n]) {
				out = append(out, '\\', 'x', hexDigits[b>>4], hexDigits[b&15])
			}
		default:
			out = append(out, s[i:i+n]...)
		}
		i += n
	}
	return string(out)
}

// indexSpecial returns the index of the first rune that escape changes, -1 for none.
func indexSpecial(s string, special func(rune) bool) int {
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		if r == utf8.RuneError && n == 1 || special(r) {
			return i
		}
		i += n
	}
	return -1
}
