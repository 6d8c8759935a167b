package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/spell"
)

// Checker is a struct that can check its values. key is the yaml key of the
// value, empty if it is none alone.
type Checker interface {
	Check() (key string, err error)
}

// A file that a program wrote begins with sealBegin and ends with sealEnd, so that
// one that was cut is told from a whole one: half a mapping may be one with other
// rights.
const (
	sealBegin = `# Up to the line "# end" this was `
	sealEnd   = "# end\n"
)

// Seal returns text with a first and a last line by which Decode sees that the file
// is whole. comment follows "this was", as "written by ...".
func Seal(comment string, text []byte) []byte {
	return append(append([]byte(sealBegin+comment+"\n"), text...), sealEnd...)
}

// isCut reports whether text was sealed and has lost its end.
func isCut(text []byte) bool {
	return bytes.HasPrefix(text, []byte(sealBegin)) && !bytes.HasSuffix(append(bytes.TrimRight(text, "\r\n\t "), '\n'), []byte("\n"+sealEnd))
}

// Decode decodes the text of file into the struct that into points to.
// Values that the text does not name stay. Keys that are given twice are errors.
func Decode(file string, text []byte, into any) error {
	if isCut(text) {
		return fmt.Errorf("%s: the file is cut: its last line, %q, is missing: remove the file and make it again, or complete it", file, strings.TrimSpace(sealEnd))
	}
	dec := yaml.NewDecoder(bytes.NewReader(text))
	var doc yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return nil // an empty file
	case err != nil:
		return fmt.Errorf("%s: %w", file, err)
	}
	if err := dec.Decode(new(yaml.Node)); err != io.EOF {
		return fmt.Errorf("%s: there is more than one document, or one is broken", file)
	}
	d := decoder{file: file}
	d.value(doc.Content[0], reflect.ValueOf(into).Elem(), "")
	return errors.Join(d.errs...)
}

// decoder collects the errors of one file.
type decoder struct {
	file string
	errs []error
}

func (d *decoder) fail(n *yaml.Node, format string, args ...any) {
	d.errs = append(d.errs, fmt.Errorf("%s: line %d, column %d: %w", d.file, n.Line, n.Column, fmt.Errorf(format, args...)))
}

// value decodes n, the value of key, into v.
func (d *decoder) value(n *yaml.Node, v reflect.Value, key string) {
	switch {
	case n.Kind == yaml.ScalarNode && n.Tag == "!!null":
		return
	case n.Kind == yaml.AliasNode:
		d.value(n.Alias, v, key)
	case v.Kind() == reflect.Struct:
		d.object(n, v, key)
	case v.Kind() == reflect.Slice && v.Type().Elem().Kind() == reflect.Struct:
		d.list(n, v, key)
	default:
		if err := n.Decode(v.Addr().Interface()); err != nil {
			d.fail(n, "%s: %s is no %s", key, shown(n), kindName(v.Type()))
		}
	}
}

func shown(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a group of keys"
	case yaml.SequenceNode:
		return "a list"
	}
	return fmt.Sprintf("%q", n.Value)
}

func (d *decoder) list(n *yaml.Node, v reflect.Value, key string) {
	if n.Kind != yaml.SequenceNode {
		d.fail(n, "%s: %s is no list", key, shown(n))
		return
	}
	list := reflect.MakeSlice(v.Type(), 0, len(n.Content))
	for _, e := range n.Content {
		if e.Kind == yaml.ScalarNode && e.Tag == "!!null" {
			d.fail(e, "%s: an entry of the list is empty", key)
			continue
		}
		one := reflect.New(v.Type().Elem()).Elem()
		d.value(e, one, key)
		list = reflect.Append(list, one)
	}
	v.Set(list)
}

func (d *decoder) object(n *yaml.Node, v reflect.Value, key string) {
	if n.Kind != yaml.MappingNode {
		d.fail(n, "%s is no group of keys", strings.TrimPrefix(key+": "+shown(n), ": "))
		return
	}
	fields := fieldsOf(v)
	before := len(d.errs)
	seen := map[string]*yaml.Node{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, value := n.Content[i], n.Content[i+1]
		f, ok := fields.find(k.Value)
		switch {
		case !ok:
			d.fail(k, "unknown key %q%s", k.Value, spell.Suggest(k.Value, fields.names()))
		case seen[k.Value] != nil:
			d.fail(k, "key %q stands in line %d already", k.Value, seen[k.Value].Line)
		default:
			d.value(value, f.value, k.Value)
		}
		seen[k.Value] = value
	}
	if c, ok := v.Addr().Interface().(Checker); ok && len(d.errs) == before {
		if key, err := c.Check(); err != nil {
			at := n
			if seen[key] != nil {
				at = seen[key]
			}
			d.fail(at, "%w", err)
		}
	}
}

// field is one key of a struct.
type field struct {
	name  string
	value reflect.Value
}

type fields []field

func (all fields) find(name string) (field, bool) {
	for _, f := range all {
		if f.name == name {
			return f, true
		}
	}
	return field{}, false
}

func (all fields) names() (out []string) {
	for _, f := range all {
		out = append(out, f.name)
	}
	return out
}

func fieldsOf(v reflect.Value) (out fields) {
	for i := range v.NumField() {
		name, flags, _ := strings.Cut(v.Type().Field(i).Tag.Get("yaml"), ",")
		switch {
		case flags == "inline":
			out = append(out, fieldsOf(v.Field(i))...)
		case name != "" && name != "-":
			out = append(out, field{name, v.Field(i)})
		}
	}
	return out
}

// kindName names a type as users know it.
func kindName(t reflect.Type) string {
	switch {
	case t.String() == "time.Duration":
		return "duration, as 30s or 5m"
	case t.Kind() == reflect.Slice:
		return "list of words"
	case t.Kind() == reflect.Map:
		return "group of KEY: VALUE"
	case t.Kind() == reflect.Bool:
		return "truth value, true or false"
	case t.Kind() == reflect.String:
		return "text"
	}
	return "whole number"
}

// Files lists the configuration files of a folder, *.yaml, in the order of their
// names. A folder that is not there has none.
func Files(folder string) ([]string, error) {
	entries, err := os.ReadDir(folder)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var files []string
	for _, e := range entries {
		if name := e.Name(); !strings.HasPrefix(name, ".") && filepath.Ext(name) == ".yaml" {
			files = append(files, filepath.Join(folder, name))
		}
	}
	return files, nil
}
