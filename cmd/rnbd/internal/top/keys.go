package top

import "unicode/utf8"

// Key is a character, or one of those below.
type Key rune

// Keys that are no characters.
const (
	Escape Key = -1 - iota
	Enter
	Erase
	EraseAll
	Up
	Down
	PageUp
	PageDown
	Home
	End
)

// finals are the keys of the last byte of a control sequence.
var finals = map[byte]Key{'A': Up, 'B': Down, 'H': Home, 'F': End}

// tildes are the keys of the number of a control sequence that ends in ~.
var tildes = map[string]Key{"1": Home, "4": End, "5": PageUp, "6": PageDown, "7": Home, "8": End}

// Decode returns the keys of bytes from a terminal. rest is the begin of a character
// or a control sequence, to be put before the next bytes; with final no more are
// expected, and rest is empty. Keys without a use are left out.
func Decode(in []byte, final bool) (keys []Key, rest []byte) {
	for len(in) > 0 {
		key, n := first(in, final)
		if n == 0 {
			return keys, in
		}
		if key != 0 {
			keys = append(keys, key)
		}
		in = in[n:]
	}
	return keys, nil
}

// first returns the first key and its length; 0 bytes: more has to be read.
func first(in []byte, final bool) (Key, int) {
	switch b := in[0]; {
	case b == 0x1b:
		return sequence(in, final)
	case b == '\r' || b == '\n':
		return Enter, 1
	case b == 0x7f || b == 0x08:
		return Erase, 1
	case b == 0x15:
		return EraseAll, 1
	case b < ' ':
		return 0, 1
	case !utf8.FullRune(in) && !final:
		return 0, 0
	}
	r, n := utf8.DecodeRune(in)
	if r == utf8.RuneError {
		return 0, n
	}
	return Key(r), n
}

// maxSequence bounds the bytes of a control sequence. A longer one is none.
const maxSequence = 16

// sequence is first for bytes that begin with an escape.
func sequence(in []byte, final bool) (Key, int) {
	if len(in) == 1 {
		if final {
			return Escape, 1
		}
		return 0, 0
	}
	if in[1] != '[' && in[1] != 'O' {
		return Escape, 1
	}
	for i := 2; i < min(len(in), maxSequence); i++ {
		if b := in[i]; b >= 0x40 && b <= 0x7e {
			if b == '~' {
				return tildes[string(in[2:i])], i + 1
			}
			return finals[b], i + 1
		}
	}
	if len(in) >= maxSequence || final {
		return Escape, 1
	}
	return 0, 0
}
