package report

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"strings"

	"go.yaml.in/yaml/v3"
)

// A document is made of these, whatever its format. Members keep their order.
type (
	object []member
	member struct {
		name  string
		value any // object, array or a cell
	}
	array struct {
		item   string // element name of one in XML
		values []any
	}
)

func (o Options) list(t Table) array {
	a := array{item: t.Item}
	for _, r := range t.Rows {
		a.values = append(a.values, o.object(t, r))
	}
	return a
}

func (o Options) object(t Table, r Row) object {
	var out object
	for i, c := range t.Columns {
		v := r.Cells[i]
		if list, ok := v.([]string); ok {
			a := array{item: "item"}
			for _, s := range list {
				a.values = append(a.values, s)
			}
			v = a
		}
		out = append(out, member{c.Name, v})
	}
	if !o.NoTree {
		for _, sub := range r.Sub {
			out = append(out, member{sub.Name, o.list(sub)})
		}
	}
	return out
}

// encode writes a document; root is its name in XML.
func encode(b *bytes.Buffer, o Options, root string, v any) error {
	switch o.Format {
	case "json":
		var raw bytes.Buffer
		o.json(&raw, v)
		if err := json.Indent(b, raw.Bytes(), "", "  "); err != nil {
			return err
		}
		b.WriteByte('\n')
		return nil
	case "xml":
		b.WriteString(xml.Header)
		o.xml(b, root, v, "")
		return nil
	}
	enc := yaml.NewEncoder(b)
	enc.SetIndent(2)
	if err := enc.Encode(o.yaml(v)); err != nil {
		return err
	}
	return enc.Close()
}

func (o Options) json(b *bytes.Buffer, v any) {
	switch v := v.(type) {
	case object:
		b.WriteByte('{')
		for i, m := range v {
			if i > 0 {
				b.WriteByte(',')
			}
			b.WriteString(quote(m.name) + ":")
			o.json(b, m.value)
		}
		b.WriteByte('}')
	case array:
		b.WriteByte('[')
		for i, e := range v.values {
			if i > 0 {
				b.WriteByte(',')
			}
			o.json(b, e)
		}
		b.WriteByte(']')
	default:
		s, quoted := plain(v, o.Unit)
		switch {
		case quoted:
			s = quote(s)
		case v == nil:
			s = "null"
		}
		b.WriteString(s)
	}
}

// quote is a JSON string. Names and addresses are legible in it: "<" stays.
func quote(s string) string {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(s); err != nil {
		return `""`
	}
	return strings.TrimSuffix(b.String(), "\n")
}

func (o Options) xml(b *bytes.Buffer, name string, v any, indent string) {
	b.WriteString(indent + "<" + name + ">")
	switch v := v.(type) {
	case object:
		b.WriteByte('\n')
		for _, m := range v {
			o.xml(b, m.name, m.value, indent+"  ")
		}
		b.WriteString(indent)
	case array:
		b.WriteByte('\n')
		for _, e := range v.values {
			o.xml(b, v.item, e, indent+"  ")
		}
		b.WriteString(indent)
	default:
		s, _ := plain(v, o.Unit)
		xml.EscapeText(b, []byte(s))
	}
	b.WriteString("</" + name + ">\n")
}

func (o Options) yaml(v any) *yaml.Node {
	switch v := v.(type) {
	case object:
		n := &yaml.Node{Kind: yaml.MappingNode}
		for _, m := range v {
			n.Content = append(n.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: m.name}, o.yaml(m.value))
		}
		return n
	case array:
		n := &yaml.Node{Kind: yaml.SequenceNode}
		for _, e := range v.values {
			n.Content = append(n.Content, o.yaml(e))
		}
		return n
	}
	s, quoted := plain(v, o.Unit)
	n := &yaml.Node{Kind: yaml.ScalarNode, Value: s}
	switch {
	case quoted:
		n.SetString(s)
	case v == nil:
		n.Value = "null"
	}
	return n
}

// writeCSV writes a table without its sub-tables.
func writeCSV(b *bytes.Buffer, o Options, t Table) error {
	w := csv.NewWriter(b)
	var line []string
	if !o.NoHeaders {
		for _, c := range t.Columns {
			line = append(line, c.Name)
		}
		w.Write(line)
	}
	for _, r := range t.Rows {
		line = line[:0]
		for _, v := range r.Cells {
			if list, ok := v.([]string); ok {
				v = strings.Join(list, " ")
			}
			s, _ := plain(v, o.Unit)
			line = append(line, s)
		}
		w.Write(line)
	}
	w.Flush()
	if err := w.Error(); err != nil {
		return fmt.Errorf("csv: %w", err)
	}
	return nil
}
