package access

import (
	"errors"
	"fmt"
	"path"
	"strings"
	"unicode"
)

// glob is a pattern of words between slashes. Within a word *, ? and [a-z] mean
// the same as in path.Match; the word ** matches any number of words.
type glob []string

// anyWords is the word of a glob that matches any number of words.
const anyWords = "**"

// maxPattern is the largest length of a pattern, in bytes, that of a name.
const maxPattern = 4096

func parseGlob(pattern string) (glob, error) {
	switch {
	case pattern == "":
		return nil, errors.New("it is empty")
	case len(pattern) > maxPattern:
		return nil, fmt.Errorf("it is longer than %d bytes", maxPattern)
	case !printable(pattern):
		return nil, errors.New("it has control characters")
	}
	g := glob(strings.Split(pattern, "/"))
	for _, word := range g {
		if word != anyWords && strings.Contains(word, anyWords) {
			return nil, fmt.Errorf("%q: ** stands alone between slashes, for any number of words", word)
		}
		if _, err := path.Match(word, ""); err != nil {
			return nil, fmt.Errorf("%q: a bracket is not closed, or \\ is at the end", word)
		}
	}
	return g, nil
}

// match reports whether g stands for the whole of s. No glob matches a string
// with control characters.
func (g glob) match(s string) bool {
	return printable(s) && g.matchWords(strings.Split(s, "/"))
}

// matchWords compares word by word. At a mismatch the last ** takes one word
// more. Earlier ** are not tried again: the last one can take any word that
// they could.
func (g glob) matchWords(words []string) bool {
	g1, w1 := -1, 0 // where to continue when the last ** takes one word more
	i, w := 0, 0
	for w < len(words) {
		switch {
		case i < len(g) && g[i] == anyWords:
			g1, w1 = i, w
			i++
		case i < len(g) && matchWord(g[i], words[w]):
			i++
			w++
		case g1 >= 0:
			w1++
			i, w = g1+1, w1
		default:
			return false
		}
	}
	for i < len(g) && g[i] == anyWords {
		i++
	}
	return i == len(g)
}

func matchWord(pattern, word string) bool {
	ok, err := path.Match(pattern, word)
	return ok && err == nil
}

func printable(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return unicode.IsControl(r) || r == unicode.ReplacementChar })
}
