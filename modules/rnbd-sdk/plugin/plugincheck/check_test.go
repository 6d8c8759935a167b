package plugincheck

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite the generated part of docs/extend/plugin-test.md")

// TestPageListsTheChecks compares the table of the page with the code's.
func TestPageListsTheChecks(t *testing.T) {
	const file = "../../../../docs/extend/plugin-test.md"
	page, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var table strings.Builder
	table.WriteString("<!-- checks -->\n| check | a plugin must |\n|---|---|\n")
	for _, c := range Checks() {
		fmt.Fprintf(&table, "| `%s` | %s |\n", c.ID, c.Title)
	}
	table.WriteString("<!-- end -->")
	want := regexp.MustCompile(`(?s)<!-- checks -->.*<!-- end -->`).ReplaceAllLiteralString(string(page), table.String())
	if want == string(page) {
		return
	}
	if !*update {
		t.Fatalf("%s differs from the code: go test ./modules/rnbd-sdk/plugin/plugincheck -update", file)
	}
	if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestChecksAreNamedOnce: ids are names for scripts.
func TestChecksAreNamedOnce(t *testing.T) {
	var ids []string
	for _, c := range Checks() {
		if slices.Contains(ids, c.ID) || !regexp.MustCompile(`^[a-z]+(-[a-z]+)+$`).MatchString(c.ID) {
			t.Errorf("id %q is in use, or no id", c.ID)
		}
		for _, need := range c.Needs {
			if !slices.Contains(ids, need) {
				t.Errorf("%s needs %s, which does not run before it", c.ID, need)
			}
		}
		ids = append(ids, c.ID)
	}
}
