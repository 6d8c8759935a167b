package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/spell"
)

// Remains describes a text that Decode refuses.
type Remains struct {
	// Other is the first thing that the text has, or may have, beside the list;
	// empty: nothing.
	Other string
	// Names are the values of the keys "name" in the list. A file that was sealed
	// is named after its only entry.
	Names []string
}

// Inspect looks for anything but the entries of one list in a text of a file that
// Decode refuses to read into the struct that into points to. It decides against
// the text in doubt: a setting that is overlooked may have been one that protects.
func Inspect(file string, text []byte, into any, list string) Remains {
	v := reflect.ValueOf(into).Elem()
	f, _ := fieldsOf(v).find(list)
	i := inspector{list: list, settings: fieldsOf(v).names(), entry: fieldsOf(reflect.New(f.value.Type().Elem()).Elem()).names()}
	sealed := bytes.HasPrefix(text, []byte(sealBegin))
	if sealed {
		i.found.Names = append(i.found.Names, strings.TrimSuffix(filepath.Base(file), filepath.Ext(file)))
	}
	docs, err := documents(text)
	switch {
	case err != nil:
		if !sealed && !bytes.HasSuffix(text, []byte("\n")) {
			i.other(0, "its last line has no end: the file may be cut")
		}
		i.lines(string(text))
	case len(docs) != 1:
		i.other(0, "there is more than one document")
	default:
		i.top(docs[0].Content[0])
	}
	return i.found
}

// documents parses all documents of text, two at most.
func documents(text []byte) (docs []*yaml.Node, err error) {
	dec := yaml.NewDecoder(bytes.NewReader(text))
	for len(docs) < 2 {
		doc := new(yaml.Node)
		if err := dec.Decode(doc); err != nil {
			if len(docs) == 1 && errors.Is(err, io.EOF) {
				break
			}
			return nil, err
		}
		docs = append(docs, doc)
	}
	return docs, nil
}

type inspector struct {
	list            string
	settings, entry []string // keys of the struct, and of an entry of the list
	found           Remains
}

func (i *inspector) other(line int, what string) {
	if i.found.Other == "" {
		if line > 0 {
			what = fmt.Sprintf("line %d: %s", line, what)
		}
		i.found.Other = what
	}
}

// isList reports whether a key stands for the list.
func (i *inspector) isList(key string) bool {
	return key == i.list || !slices.Contains(i.settings, key) && spell.Nearest(key, i.settings) == i.list
}

// isName reports whether a key in the list stands for "name".
func (i *inspector) isName(key string) bool {
	return key == "name" || !slices.Contains(i.entry, key) && spell.Nearest(key, i.entry) == "name"
}

// nested judges a key in the list: one of a setting may be there by a wrong
// indentation.
func (i *inspector) nested(key string, line int) {
	if i.isList(key) || slices.Contains(i.entry, key) {
		return
	}
	if near := spell.Nearest(key, slices.Concat(i.entry, i.settings)); slices.Contains(i.settings, key) || slices.Contains(i.settings, near) && !slices.Contains(i.entry, near) {
		i.other(line, fmt.Sprintf("key %q", key))
	}
}

// top inspects a text that is YAML.
func (i *inspector) top(n *yaml.Node) {
	if n.Kind != yaml.MappingNode {
		i.other(n.Line, "no group of keys")
		return
	}
	for k := 0; k+1 < len(n.Content); k += 2 {
		if key := n.Content[k]; !i.isList(key.Value) {
			i.other(key.Line, fmt.Sprintf("key %q", key.Value))
		}
		i.tree(n.Content[k+1])
	}
}

// tree inspects the value of the list.
func (i *inspector) tree(n *yaml.Node) {
	if n.Kind != yaml.MappingNode {
		for _, e := range n.Content {
			i.tree(e)
		}
		return
	}
	for k := 0; k+1 < len(n.Content); k += 2 {
		key, value := n.Content[k], n.Content[k+1]
		i.nested(key.Value, key.Line)
		if i.isName(key.Value) && value.Kind == yaml.ScalarNode {
			i.found.Names = append(i.found.Names, value.Value)
		}
		i.tree(value)
	}
}

var (
	lineKey   = regexp.MustCompile(`^["']?([A-Za-z_][\w-]*)["']?\s*:`)
	lineWord  = regexp.MustCompile(`^[\s-]*["']?([A-Za-z_][\w-]*)`)
	listPart  = regexp.MustCompile(`^(\s|-\s|-$|[\]}])`)
	anyKey    = regexp.MustCompile(`(?:^|[\s{,\[-])["']?([A-Za-z_][\w-]*)["']?\s*:`)
	keysValue = regexp.MustCompile(`^\s*["']?([^\s"',}\]#]+)`)
)

// lines inspects a text that is no YAML: its lines must look like those of the list.
func (i *inspector) lines(text string) {
	begun := false
	for at, line := range strings.Split(text, "\n") {
		line = strings.TrimRight(line, "\r\t ")
		trimmed := strings.TrimLeft(line, "\t ")
		top := lineKey.FindStringSubmatch(line)
		switch {
		case trimmed == "" || trimmed[0] == '#' || line == "---" && !begun:
			continue
		case strings.ContainsFunc(line, func(r rune) bool { return r < ' ' && r != '\t' }):
			i.other(at+1, "a control character")
		case top != nil && i.isList(top[1]):
			begun = true
		case !begun || top != nil || !listPart.MatchString(line):
			i.other(at+1, fmt.Sprintf("%q", line))
		default:
			i.line(line, at+1)
		}
	}
}

// line inspects a line of the list.
func (i *inspector) line(line string, at int) {
	if word := lineWord.FindStringSubmatch(line); word != nil && slices.Contains(i.settings, word[1]) && !slices.Contains(i.entry, word[1]) {
		i.other(at, fmt.Sprintf("%q", word[1]))
	}
	for _, m := range anyKey.FindAllStringSubmatchIndex(line, -1) {
		key := line[m[2]:m[3]]
		i.nested(key, at)
		if value := keysValue.FindStringSubmatch(line[m[1]:]); value != nil && i.isName(key) {
			i.found.Names = append(i.found.Names, value[1])
		}
	}
}
