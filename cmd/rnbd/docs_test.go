package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
)

var update = flag.Bool("update", false, "rewrite the generated parts of docs/use/cli.md")

const cliPage = "../../docs/use/cli.md"

// TestCLIPageIsGenerated compares the tables of docs/use/cli.md with the code's.
func TestCLIPageIsGenerated(t *testing.T) {
	page, err := os.ReadFile(cliPage)
	if err != nil {
		t.Fatal(err)
	}
	parts := map[string]string{"commands": commandTable()}
	for _, n := range nouns() {
		if len(n.fields) > 0 {
			parts["fields "+n.name] = fieldTable(n)
		}
	}
	parts["fields bench"] = fieldTable(&noun{fields: report.Infos(benchFields), usual: func(daemonSet) []string { return benchUsual }})
	found := 0
	want := regexp.MustCompile(`(?s)<!-- (commands|fields \w+) -->\n.*?<!-- end -->`).ReplaceAllStringFunc(string(page), func(old string) string {
		found++
		head, _, _ := strings.Cut(old, "\n")
		return head + "\n" + parts[strings.TrimSuffix(strings.TrimPrefix(head, "<!-- "), " -->")] + "<!-- end -->"
	})
	if found != len(parts) {
		t.Errorf("%s has %d generated parts, want %d", cliPage, found, len(parts))
	}
	if want == string(page) {
		return
	}
	if !*update {
		t.Fatalf("%s differs from the code: go test ./cmd/rnbd -update", cliPage)
	}
	if err := os.WriteFile(cliPage, []byte(want), 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestSchemaIsGenerated compares docs/use/config.schema.json with the options of the
// daemons.
func TestSchemaIsGenerated(t *testing.T) {
	const file = "../../docs/use/config.schema.json"
	var want bytes.Buffer
	if err := writeSchema(&want); err != nil {
		t.Fatal(err)
	}
	have, err := os.ReadFile(file)
	if err == nil && bytes.Equal(have, want.Bytes()) {
		return
	}
	if !*update {
		t.Fatalf("%s differs from the code (%v): go test ./cmd/rnbd -update", file, err)
	}
	if err := os.WriteFile(file, want.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}

func fieldTable(n *noun) string {
	var b strings.Builder
	b.WriteString("| field | header | | usual |\n|---|---|---|---|\n")
	for _, f := range n.fields {
		shown := ""
		client, server := slices.Contains(n.usual(onClient), f.Name), slices.Contains(n.usual(onServer), f.Name)
		switch {
		case client && server:
			shown = "yes"
		case client:
			shown = "client"
		case server:
			shown = "server"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", f.Name, f.Header, f.Doc, shown)
	}
	return b.String()
}

func commandTable() string {
	var b strings.Builder
	b.WriteString("| command | on | |\n|---|---|---|\n")
	on := map[daemonSet]string{onClient: "client", onServer: "server", onBoth: "both"}
	all := nouns()
	line := func(prefix string, v *verb) {
		use := strings.TrimSpace(strings.ReplaceAll(prefix+v.name+" "+v.args, "|", `\|`))
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", use, on[v.on], strings.ReplaceAll(v.short, "|", `\|`))
	}
	for _, v := range generalVerbs(all) {
		line("", v)
	}
	for _, n := range all {
		for _, v := range n.verbs {
			if v.bare {
				line("["+n.name+"] ", v)
			} else {
				line(n.name+" ", v)
			}
		}
	}
	return b.String()
}
