package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
)

// mutant is an entry of the list: one line of one file is replaced.
type mutant struct {
	name   string
	breaks string // what goes wrong
	file   string
	in     string // start of the line that opens the declaration; empty: anywhere
	old    string // the line, without indentation
	new    string // empty: the line is removed
	pkg    string // folder of the tests
	run    string // go test -run
}

func readList(name string) ([]mutant, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	mutants, err := parseList(f)
	if err != nil {
		return nil, fmt.Errorf("%s:%w", name, err)
	}
	return mutants, nil
}

// parseList reads entries of the form
//
//	name: what it breaks
//		file  path from the root of the repository
//		in    start of the line of the function or declaration (optional)
//		-     line
//		+     what stands there instead (optional)
//		test  [folder] pattern
//
// The tests are in the folder of the file unless another one is named. Lines
// that begin with # are comments.
func parseList(r io.Reader) (all []mutant, err error) {
	scan := bufio.NewScanner(r)
	for n := 1; scan.Scan(); n++ {
		line := scan.Text()
		switch {
		case strings.TrimSpace(line) == "" || line[0] == '#':
			continue
		case line[0] != '\t':
			name, breaks, ok := strings.Cut(line, ": ")
			if !ok || strings.Contains(name, " ") {
				return nil, fmt.Errorf("%d: %q is not \"name: what it breaks\"", n, line)
			}
			if slices.ContainsFunc(all, func(m mutant) bool { return m.name == name }) {
				return nil, fmt.Errorf("%d: %s is there already", n, name)
			}
			all = append(all, mutant{name: name, breaks: breaks})
			continue
		case len(all) == 0:
			return nil, fmt.Errorf("%d: %q before the first name", n, line)
		}
		if err := all[len(all)-1].set(strings.TrimSpace(line)); err != nil {
			return nil, fmt.Errorf("%d: %w", n, err)
		}
	}
	for i := range all {
		if m := &all[i]; m.file == "" || m.old == "" || m.run == "" {
			return nil, fmt.Errorf(" %s lacks file, - or test", m.name)
		}
	}
	return all, scan.Err()
}

// set takes one line of an entry.
func (m *mutant) set(line string) error {
	key, value, _ := strings.Cut(line, " ")
	value = strings.TrimSpace(value)
	switch key {
	case "file":
		m.file = value
	case "in":
		m.in = value
	case "-":
		m.old = value
	case "+":
		m.new = value
	case "test":
		var ok bool
		if m.pkg, m.run, ok = strings.Cut(value, " "); !ok {
			m.pkg, m.run = path.Dir(m.file), value
		}
	default:
		return fmt.Errorf("%q is none of file, in, -, + and test", key)
	}
	return nil
}

// apply returns src with the line replaced. The line must be there once, within
// the declaration if one is named.
func (m *mutant) apply(src string) (string, error) {
	lines := strings.Split(src, "\n")
	from, to, err := m.span(lines)
	if err != nil {
		return "", err
	}
	at := -1
	for i := from; i < to; i++ {
		if strings.TrimSpace(lines[i]) != m.old {
			continue
		}
		if at >= 0 {
			return "", fmt.Errorf("lines %d and %d of %s are both %q", at+1, i+1, m.file, m.old)
		}
		at = i
	}
	if at < 0 {
		return "", fmt.Errorf("no line of %s is %q", m.file, m.old)
	}
	indent := lines[at][:strings.Index(lines[at], m.old)]
	lines[at] = indent + m.new
	return strings.Join(lines, "\n"), nil
}

// span finds the declaration: from its first line to the next one that closes
// it, or that is as little indented.
func (m *mutant) span(lines []string) (from, to int, err error) {
	if m.in == "" {
		return 0, len(lines), nil
	}
	from = slices.IndexFunc(lines, func(l string) bool { return strings.HasPrefix(l, m.in) })
	if from < 0 {
		return 0, 0, fmt.Errorf("no line of %s begins with %q", m.file, m.in)
	}
	for to = from + 1; to < len(lines) && (lines[to] == "" || lines[to][0] == '\t'); to++ {
	}
	return from, to, nil
}
