// Package explain explains errnos, exit codes and states to users of rnbd,
// with remedies.
package explain

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Kinds of entries.
const (
	Errno         = "errno"
	ExitCode      = "exit code"
	ClientDevice  = "device state on the client"
	ServerDevice  = "device state on the server"
	Path          = "path state"
	Session       = "session state"
	Plugin        = "plugin state"
	DoctorOutcome = "doctor outcome"
	Condition     = "condition"
)

// Entry explains one value that rnbd prints.
type Entry struct {
	Kind    string // one of the kinds above
	Name    string // as it is printed: EIO, closed, "failed: plugin state lost"
	Number  int    // of an errno or exit code; -1: none
	Meaning string
	Do      string // empty: nothing is to be done
}

// All returns every entry, sorted by kind, then by number or name.
func All() []Entry {
	var all []Entry
	for e, text := range errnos {
		all = append(all, Entry{Errno, errnoName(e), int(e), text.meaning, text.do})
	}
	for code, text := range exitCodes {
		all = append(all, Entry{ExitCode, strconv.Itoa(code), code, text.meaning, text.do})
	}
	for _, s := range states {
		s.Number = -1
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b Entry) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Number, b.Number), cmp.Compare(a.Name, b.Name))
	})
	return all
}

// errnoName is the name that the code and the documents use.
func errnoName(e syscall.Errno) string {
	if e == syscall.EOPNOTSUPP {
		return "EOPNOTSUPP" // x/sys names it ENOTSUP
	}
	return unix.ErrnoName(e)
}

// Find returns the entries for word: a name in any case, a number, possibly
// negative, or the beginning of a state such as "failed". Names win over
// beginnings.
func Find(word string) (found []Entry) {
	word = strings.TrimSpace(word)
	number, err := strconv.Atoi(word)
	if err != nil {
		number = -1
	} else if number < 0 {
		number = -number
	}
	var begin []Entry
	for _, e := range All() {
		switch {
		case strings.EqualFold(e.Name, word), number >= 0 && e.Number == number, e.Number > 0 && e.Kind == Errno && strings.EqualFold(syscall.Errno(e.Number).Error(), word):
			found = append(found, e)
		case number < 0 && word != "" && (hasPrefixFold(e.Name, word) || e.Number < 0 && hasPrefixFold(word, e.Name)):
			begin = append(begin, e)
		}
	}
	if len(found) == 0 {
		return begin
	}
	return found
}

func hasPrefixFold(s, prefix string) bool {
	return len(s) >= len(prefix) && strings.EqualFold(s[:len(prefix)], prefix)
}

// Names returns the words that Find accepts, each once.
func Names() (names []string) {
	for _, e := range All() {
		if !slices.Contains(names, e.Name) {
			names = append(names, e.Name)
		}
	}
	return names
}
