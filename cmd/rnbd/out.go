package main

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// show prints a message of the control API: as JSON, or as the table that
// rows makes of it.
func show(cmd *cobra.Command, m proto.Message, rows func(w io.Writer)) error {
	if outputOf(cmd.Root()) == "json" {
		b, err := protojson.MarshalOptions{Multiline: true, Indent: "  ", UseProtoNames: true, EmitUnpopulated: true}.Marshal(m)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(cmd.OutOrStdout(), string(b))
		return err
	}
	w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
	rows(w)
	return w.Flush()
}

func row(w io.Writer, cells ...any) {
	for i, c := range cells {
		if i > 0 {
			io.WriteString(w, "\t")
		}
		if s := fmt.Sprint(c); s != "" {
			io.WriteString(w, s)
		} else {
			io.WriteString(w, "-")
		}
	}
	io.WriteString(w, "\n")
}

// size prints bytes with a binary unit.
func size(n uint64) string {
	const units = "BKMGTPE"
	f, u := float64(n), 0
	for f >= 1024 && u < len(units)-1 {
		f /= 1024
		u++
	}
	return strings.TrimSuffix(fmt.Sprintf("%.1f", f), ".0") + units[u:u+1]
}
