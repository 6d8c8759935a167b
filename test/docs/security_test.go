package docs

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/iwarp"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/rocev2"
	"github.com/rnbd-go/rnbd/test/lab"
)

var (
	limitRow    = regexp.MustCompile("(?m)^\\| `([a-z-]+)` \\| (\\d+)( GiB)? \\|")
	limitInHelp = regexp.MustCompile(`([a-z-]+)=(\d+)`)
	infoTimeout = regexp.MustCompile(`has (\w+) \(` + "`--info-timeout`")
	fabricRow   = regexp.MustCompile("(?m)^\\| `(iwarp|rocev2)` \\| (\\d+) \\| (\\d+) \\|")
)

// The limits of SECURITY.md are those of the program, no more and no less.
func TestSecurityLimitsAreTheServers(t *testing.T) {
	page := read(t, "SECURITY.md")
	h := newHelp(t)
	help, err := exec.CommandContext(t.Context(), h.bin, "server", "run", "--help").Output()
	if err != nil {
		t.Fatal(err)
	}
	stated := map[string]string{}
	for _, m := range limitRow.FindAllStringSubmatch(page, -1) {
		if m[1] == "iwarp" || m[1] == "rocev2" {
			continue
		}
		n, err := strconv.ParseInt(m[2], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		if m[3] != "" {
			n <<= 30
		}
		stated[m[1]] = fmt.Sprint(n)
	}
	found := 0
	for line := range strings.Lines(string(help)) {
		if strings.Contains(line, "--limit ") {
			for _, m := range limitInHelp.FindAllStringSubmatch(line, -1) {
				if found++; stated[m[1]] != m[2] {
					t.Errorf("the server has %s=%s, SECURITY.md says %q", m[1], m[2], stated[m[1]])
				}
			}
		}
		if m := infoTimeout.FindStringSubmatch(page); strings.Contains(line, "--info-timeout ") && (m == nil || !strings.Contains(line, "(default "+m[1]+")")) {
			t.Errorf("SECURITY.md says %q of %s", m, line)
		}
	}
	if found != len(stated) || found < 10 {
		t.Errorf("SECURITY.md has %d limits and the server %d", len(stated), found)
	}
}

// The limits of the fabrics are in their configuration.
func TestSecurityLimitsAreTheFabrics(t *testing.T) {
	i, r := iwarp.DefaultConfig(), rocev2.DefaultConfig()
	has := map[string][2]int{
		"iwarp":  {i.MaxHandshakes, i.MaxHandshakesPerAddress},
		"rocev2": {r.MaxHandshakes, r.MaxHandshakesPerAddress},
	}
	rows := fabricRow.FindAllStringSubmatch(read(t, "SECURITY.md"), -1)
	if len(rows) != len(has) {
		t.Fatalf("SECURITY.md has limits of %d fabrics, want %d", len(rows), len(has))
	}
	for _, m := range rows {
		if want := has[m[1]]; m[2] != fmt.Sprint(want[0]) || m[3] != fmt.Sprint(want[1]) {
			t.Errorf("%s has %v, SECURITY.md says %s and %s", m[1], want, m[2], m[3])
		}
	}
}

var (
	testName  = regexp.MustCompile("`((?:Test|Fuzz)\\w+)`")
	testFuncs = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w*)\(`)
)

// tests are those of a folder, by name.
func tests(t *testing.T, folder string) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	files, err := filepath.Glob(filepath.Join(lab.Root(), folder, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		rel, err := filepath.Rel(lab.Root(), f)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range testFuncs.FindAllStringSubmatch(read(t, rel), -1) {
			names[m[1]] = true
		}
	}
	return names
}

// Every row of the table of hostile peers names tests that exist, and every
// test that is one of them by its name is in a row.
func TestSecurityNamesTheTestsOfHostilePeers(t *testing.T) {
	_, table, ok := strings.Cut(read(t, "SECURITY.md"), "## What a hostile peer can try\n")
	if !ok {
		t.Fatal("SECURITY.md has no table of hostile peers")
	}
	table, _, _ = strings.Cut(table, "\n## ")
	named, rows := map[string]bool{}, 0
	for line := range strings.Lines(table) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | ")
		if !strings.HasPrefix(line, "| ") || strings.HasPrefix(line, "| peer ") {
			continue
		}
		if rows++; len(cells) != 4 {
			t.Errorf("%d cells in %s", len(cells), line)
			continue
		}
		of := 0
		for _, part := range strings.Split(cells[3], ";") {
			folder, list, _ := strings.Cut(strings.TrimSpace(part), ": ")
			have := tests(t, folder)
			for _, m := range testName.FindAllStringSubmatch(list, -1) {
				of++
				named[folder+" "+m[1]] = true
				if !have[m[1]] {
					t.Errorf("SECURITY.md: %s has no %s", folder, m[1])
				}
			}
		}
		if of == 0 {
			t.Errorf("no test of %q", cells[1])
		}
	}
	if rows < 10 {
		t.Errorf("only %d rows were understood", rows)
	}
	for _, folder := range testFolders(t) {
		for name := range tests(t, folder) {
			if strings.HasPrefix(name, "TestHostile") && !named[folder+" "+name] {
				t.Errorf("%s of %s is in no row of SECURITY.md", name, folder)
			}
		}
	}
}

// hostilePeers are all that the threat model knows.
var hostilePeers = []string{
	"stranger", "client", "client with keys", "tenant", "server", "plugin, front end", "storage plugin under `--confine=try`", "NBD client",
	"local user", "member of the control group", "on the network path", "supply chain",
}

func TestSecurityHasEveryPeer(t *testing.T) {
	_, table, _ := strings.Cut(read(t, "SECURITY.md"), "## What a hostile peer can try\n")
	table, _, _ = strings.Cut(table, "\n## ")
	for _, peer := range hostilePeers {
		if !strings.Contains(table, "\n| "+peer+" | ") {
			t.Errorf("SECURITY.md has no row of the peer %q", peer)
		}
	}
}

// testFolders are all folders with tests, relative to the top of the tree.
func testFolders(t *testing.T) (list []string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "find", lab.Root(), "-name", "*_test.go", "-printf", "%P\n").Output()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for line := range strings.Lines(string(out)) {
		if dir := filepath.Dir(strings.TrimSpace(line)); !seen[dir] {
			seen[dir] = true
			list = append(list, dir)
		}
	}
	return list
}
