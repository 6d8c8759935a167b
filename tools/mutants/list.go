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

// mutant is an entry of a list: lines are replaced, most often one.
type mutant struct {
	name   string
	breaks string // the fault that it makes
	edits  []lineEdit
	pkg    string // folder of the tests
	run    string // go test -run
}

// lineEdit replaces one line of one file.
type lineEdit struct {
	file string
	in   string // start of the line that opens the declaration; empty: anywhere
	old  string // the line, without indentation
	new  string // empty: the line is removed
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
//	name: the fault that it makes
//		file  path from the root of the repository
//		in    start of the line of the function or declaration (optional)
//		-     line
//		+     its replacement (optional)
//		test  [folder] pattern
//
// A mutant of several lines has file, in, - and + again for each. The tests are in
// the folder of the first file unless another one is named. Lines that begin with #
// are comments.
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
		if err := all[len(all)-1].setField(strings.TrimSpace(line)); err != nil {
			return nil, fmt.Errorf("%d: %w", n, err)
		}
	}
	for i := range all {
		if !all[i].isComplete() {
			return nil, fmt.Errorf(" %s lacks file, - or test", all[i].name)
		}
	}
	return all, scan.Err()
}

// isComplete reports whether nothing is missing.
func (m *mutant) isComplete() bool {
	for _, e := range m.edits {
		if e.old == "" {
			return false
		}
	}
	return len(m.edits) > 0 && m.run != ""
}

// setField takes one line of an entry.
func (m *mutant) setField(line string) error {
	key, value, _ := strings.Cut(line, " ")
	value = strings.TrimSpace(value)
	if key == "file" {
		m.edits = append(m.edits, lineEdit{file: value})
		return nil
	}
	if len(m.edits) == 0 {
		return fmt.Errorf("%q before the file", line)
	}
	e := &m.edits[len(m.edits)-1]
	switch key {
	case "in":
		e.in = value
	case "-":
		e.old = value
	case "+":
		e.new = value
	case "test":
		var ok bool
		if m.pkg, m.run, ok = strings.Cut(value, " "); !ok {
			m.pkg, m.run = path.Dir(m.edits[0].file), value
		}
	default:
		return fmt.Errorf("%q is none of file, in, -, + and test", key)
	}
	return nil
}

// applyTo returns src with the line replaced. The line must be there once, within
// the declaration if one is named.
func (e *lineEdit) applyTo(src string) (string, error) {
	lines := strings.Split(src, "\n")
	from, to, err := e.declLines(lines)
	if err != nil {
		return "", err
	}
	at := -1
	for i := from; i < to; i++ {
		if strings.TrimSpace(lines[i]) != e.old {
			continue
		}
		if at >= 0 {
			return "", fmt.Errorf("lines %d and %d of %s are both %q", at+1, i+1, e.file, e.old)
		}
		at = i
	}
	if at < 0 {
		return "", fmt.Errorf("no line of %s is %q", e.file, e.old)
	}
	indent := lines[at][:strings.Index(lines[at], e.old)]
	lines[at] = indent + e.new
	return strings.Join(lines, "\n"), nil
}

// declLines finds the declaration: from its first line to the next one that closes
// it, or that is as little indented.
func (e *lineEdit) declLines(lines []string) (from, to int, err error) {
	if e.in == "" {
		return 0, len(lines), nil
	}
	from = slices.IndexFunc(lines, func(l string) bool { return strings.HasPrefix(l, e.in) })
	if from < 0 {
		return 0, 0, fmt.Errorf("no line of %s begins with %q", e.file, e.in)
	}
	for to = from + 1; to < len(lines) && (lines[to] == "" || lines[to][0] == '\t'); to++ {
	}
	return from, to, nil
}
