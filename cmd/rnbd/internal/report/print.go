package report

import (
	"bytes"
	"fmt"
	"io"
	"strings"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/fit"
)

// Formats are the names of the forms of output.
var Formats = []string{"table", "csv", "json", "xml", "yaml", Wide}

// Options are the options of printing.
type Options struct {
	Format    string // one of Formats; empty: table
	Unit      byte   // one of Units; 0: tables choose, programs get bytes and sectors
	NoTree    bool   // without sub-tables
	NoHeaders bool
	NoTotals  bool
	Width     int  // columns that tables may take; 0: any number
	Color     bool // states in tables have colours
	Screen    bool // a person reads it: tables say what needs attention
}

// Wide is the table without a limit on its width, and with more fields.
const Wide = "wide"

// Machine reports whether a program reads it.
func (o Options) Machine() bool { return o.Format != "" && o.Format != "table" && o.Format != Wide }

// List prints a list.
func List(w io.Writer, o Options, t Table) error {
	return o.print(w, func(b *bytes.Buffer) error {
		switch o.Format {
		case "csv":
			return writeCSV(b, o, t)
		case "json", "yaml", "xml":
			return encode(b, o, t.Name, o.list(t))
		}
		o.verdict(b, t)
		o.grid(b, t)
		return nil
	})
}

// verdict is the line above the first table t, if something needs attention.
func (o Options) verdict(b *bytes.Buffer, t Table) {
	limit := o.Width
	if limit == 0 {
		limit = -1
	}
	line := fit.Verdict(t.Attention, limit)
	if line == "" || o.NoHeaders || !o.Screen {
		return
	}
	if line = printable(line); o.Color {
		line = paint("closed", line)
	}
	fmt.Fprintf(b, "%s\n\n", line)
}

// Lists prints several lists of different kinds.
func Lists(w io.Writer, o Options, tables ...Table) error {
	return o.print(w, func(b *bytes.Buffer) error {
		if o.Machine() && o.Format != "csv" {
			all := object{}
			for _, t := range tables {
				all = append(all, member{t.Name, o.list(t)})
			}
			return encode(b, o, "rnbd", all)
		}
		if o.Format != "csv" {
			o.verdict(b, tables[0])
		}
		for i, t := range tables {
			if i > 0 {
				b.WriteByte('\n')
			}
			if o.Format == "csv" {
				if err := writeCSV(b, o, t); err != nil {
					return err
				}
				continue
			}
			if !o.NoHeaders {
				fmt.Fprintln(b, strings.ToUpper(t.Name[:1])+t.Name[1:])
			}
			o.grid(b, t)
		}
		return nil
	})
}

// Show prints one object: the first row of t.
func Show(w io.Writer, o Options, t Table) error {
	return o.print(w, func(b *bytes.Buffer) error {
		switch o.Format {
		case "csv":
			return writeCSV(b, o, t)
		case "json", "yaml", "xml":
			return encode(b, o, t.Item, o.object(t, t.Rows[0]))
		}
		o.card(b, t)
		return nil
	})
}

// print writes all or nothing.
func (o Options) print(w io.Writer, f func(*bytes.Buffer) error) error {
	var b bytes.Buffer
	if err := f(&b); err != nil {
		return err
	}
	_, err := w.Write(b.Bytes())
	return err
}
