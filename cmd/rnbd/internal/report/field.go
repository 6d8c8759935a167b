package report

import (
	"fmt"
	"slices"
	"strings"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/spell"
)

// Info describes a field. Name is for programs and command lines, Header for
// tables.
type Info struct {
	Name, Header, Doc string
	Kind              Kind
	// Rank is the place of the column in the order in which narrow tables leave columns
	// out, the highest first; 0: never.
	Rank int
}

// Kind says how a narrow table shortens values. Numbers are never shortened.
type Kind uint8

const (
	Text  Kind = iota // at the end
	Name              // in the middle; different names stay different
	Exact             // not at all: states, addresses
)

// Field is one property of a T. Get returns a string, bool, uint64, int64,
// float64, []string, time.Duration, Bytes, Sectors, Count, or nil where t has no such
// property.
type Field[T any] struct {
	Info
	Get func(t T) any
}

// F makes a field.
func F[T any](name, header, doc string, get func(T) any) Field[T] {
	return Field[T]{Info{Name: name, Header: header, Doc: doc}, get}
}

// As returns the field with a kind.
func (f Field[T]) As(k Kind) Field[T] {
	f.Kind = k
	return f
}

// Infos describes fields.
func Infos[T any](fields []Field[T]) (out []Info) {
	for _, f := range fields {
		out = append(out, f.Info)
	}
	return out
}

// All selects every field.
const All = "all"

// Select chooses fields: "a,b" these, "+a,-b" the usual ones with and without,
// "all" every one. A sign holds for the names behind it until the next sign.
// An empty spec gives the usual ones, named by usual.
func Select[T any](fields []Field[T], usual []string, spec string) ([]Field[T], error) {
	names, err := selectNames(Infos(fields), usual, spec)
	if err != nil {
		return nil, err
	}
	out := make([]Field[T], 0, len(names))
	for _, n := range names {
		i := slices.IndexFunc(fields, func(f Field[T]) bool { return f.Name == n })
		out = append(out, fields[i])
	}
	return out, nil
}

func selectNames(infos []Info, usual []string, spec string) ([]string, error) {
	var all []string
	for _, f := range infos {
		all = append(all, f.Name)
	}
	words := strings.FieldsFunc(spec, func(r rune) bool { return r == ',' || r == ' ' })
	selected := slices.Clone(usual)
	if len(words) > 0 && !strings.ContainsAny(words[0][:1], "+-") {
		selected = nil
	}
	sign := byte('+')
	for _, w := range words {
		if w[0] == '+' || w[0] == '-' {
			sign, w = w[0], w[1:]
		}
		names := []string{w}
		if w == All {
			names = all
		} else if !slices.Contains(all, w) {
			return nil, fmt.Errorf("there is no field %q%s", w, spell.Suggest(w, all))
		}
		for _, n := range names {
			selected = slices.DeleteFunc(selected, func(have string) bool { return have == n && (sign == '-' || len(names) == 1) })
			if sign == '+' && !slices.Contains(selected, n) {
				selected = append(selected, n)
			}
		}
	}
	if len(selected) == 0 {
		return nil, fmt.Errorf("no field is left of %q", spec)
	}
	return selected, nil
}

// IsSpec reports whether a word of a command line chooses fields: it has a sign
// or a comma, or is the name of a field.
func IsSpec(infos []Info, word string) bool {
	if word == All || strings.HasPrefix(word, "+") || strings.HasPrefix(word, "-") && len(word) > 1 || strings.Contains(word, ",") {
		return true
	}
	return slices.ContainsFunc(infos, func(f Info) bool { return f.Name == word })
}
