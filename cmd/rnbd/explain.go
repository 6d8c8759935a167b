package main

import (
	"fmt"
	"io"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/explain"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/spell"
)

var explainFields = []report.Field[explain.Entry]{
	report.F("name", "Name", "as it is printed", func(e explain.Entry) any { return e.Name }),
	report.F("kind", "Kind", "errno, exit code or a kind of state", func(e explain.Entry) any { return e.Kind }),
	report.F("number", "Number", "of an errno or exit code", func(e explain.Entry) any {
		if e.Number < 0 {
			return nil
		}
		return int64(e.Number)
	}),
	report.F("meaning", "Meaning", "in words", func(e explain.Entry) any { return e.Meaning }),
	report.F("do", "To do", "what helps", func(e explain.Entry) any { return e.Do }),
}

func newExplain() *cobra.Command {
	c := &cobra.Command{
		Use: "explain [ERRNO|CODE|STATE]...", Short: "Say what an errno, an exit code or a state means",
		Long: `Say what an errno, an exit code of this command or a state of a device, session,
path or plugin means, and what to do about it. An errno is a name, a number or
its text. Without a word everything is listed.`,
		Example: "  rnbd explain EREMCHG\n  rnbd explain 7\n  rnbd explain reconnecting\n  rnbd explain 'failed: plugin state lost'",
		Args:    args(cobra.ArbitraryArgs),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return explain.Names(), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, words []string) error {
			o, err := readFlags(cmd)
			if err != nil {
				return err
			}
			found, err := explained(words)
			if err != nil {
				return err
			}
			if o.Machine() {
				return report.List(cmd.OutOrStdout(), o.Options, report.Build("entries", "entry", explainFields, found))
			}
			return tellExplained(cmd.OutOrStdout(), found)
		},
	}
	return c
}

// explained finds the entries of words. Words that mean nothing one by one are
// tried as one: a state has several.
func explained(words []string) (found []explain.Entry, err error) {
	if len(words) == 0 {
		return explain.All(), nil
	}
	if whole := explain.Find(strings.Join(words, " ")); len(whole) > 0 {
		return whole, nil
	}
	for _, w := range words {
		of := explain.Find(w)
		if len(of) == 0 {
			return nil, fmt.Errorf("nothing is known of %q%s: %w", w, spell.Suggest(w, explain.Names()), syscall.ENOENT)
		}
		found = append(found, of...)
	}
	return found, nil
}

func tellExplained(w io.Writer, found []explain.Entry) error {
	var b strings.Builder
	for _, e := range found {
		title := fmt.Sprintf("%s (%s)", e.Name, e.Kind)
		if e.Kind == explain.Errno {
			title = fmt.Sprintf("%s (errno %d: %s)", e.Name, e.Number, syscall.Errno(e.Number))
		}
		fmt.Fprintf(&b, "%s\n  %s\n", title, e.Meaning)
		if e.Do != "" {
			fmt.Fprintf(&b, "  -> %s\n", e.Do)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}
