package metrics

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

const monitoring = "../../../../docs/use/monitoring"

// families returns the labels of each metric that a daemon can show.
func families() map[string][]string {
	out := map[string][]string{}
	name := regexp.MustCompile(`fqName: "(\w+)"`)
	labels := regexp.MustCompile(`variableLabels: \{([\w,]*)\}`)
	for _, d := range []*Daemon{Client(controlpb.UnimplementedClientDaemonServer{}), Server(controlpb.UnimplementedServerDaemonServer{})} {
		ch := make(chan *prometheus.Desc, 100)
		d.Describe(ch)
		close(ch)
		for desc := range ch {
			out[name.FindStringSubmatch(desc.String())[1]] = strings.Split(labels.FindStringSubmatch(desc.String())[1], ",")
		}
	}
	return out
}

// check compares the names and labels of a query with those of the daemons.
func check(t *testing.T, query string) {
	t.Helper()
	all := families()
	known := []string{"le", "instance", "job", "__name__"}
	query = strings.ReplaceAll(query, "(client|server)", "client") // of __name__
	names := regexp.MustCompile(`rnbd_\w+`).FindAllString(query, -1)
	if len(names) == 0 {
		t.Errorf("no metric in %s", query)
	}
	for _, n := range names {
		for _, suffix := range []string{"_bucket", "_count", "_sum"} {
			n = strings.TrimSuffix(n, suffix)
		}
		labels, ok := all[n]
		if !ok {
			t.Errorf("no daemon has %s: %s", n, query)
		}
		known = append(known, labels...)
	}
	for _, by := range regexp.MustCompile(`by \(([^)]*)\)`).FindAllStringSubmatch(query, -1) {
		for _, l := range strings.Split(by[1], ", ") {
			if !slices.Contains(known, l) {
				t.Errorf("no metric has the label %s: %s", l, query)
			}
		}
	}
	for _, l := range regexp.MustCompile(`(\w+)=~?"`).FindAllStringSubmatch(query, -1) {
		if !slices.Contains(known, l[1]) {
			t.Errorf("no metric has the label %s: %s", l[1], query)
		}
	}
}

func TestDashboardAsksForWhatDaemonsHave(t *testing.T) {
	b, err := os.ReadFile(filepath.Join(monitoring, "dashboard.json"))
	if err != nil {
		t.Fatal(err)
	}
	var board struct {
		Panels []struct {
			ID      int
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(b, &board); err != nil || len(board.Panels) < 10 {
		t.Fatalf("%d panels, %v", len(board.Panels), err)
	}
	for _, p := range board.Panels {
		for _, q := range p.Targets {
			check(t, q.Expr)
		}
	}
}

func TestAlertsAskForWhatDaemonsHave(t *testing.T) {
	b, err := os.ReadFile(filepath.Join(monitoring, "alerts.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	all := regexp.MustCompile(`(?m)^ +expr: (.*)$`).FindAllStringSubmatch(string(b), -1)
	if len(all) < 8 {
		t.Fatalf("%d rules", len(all))
	}
	for _, expr := range all {
		check(t, expr[1])
	}
}

// promtool finds the program in the path, or where make check has put it.
func promtool(t *testing.T) string {
	t.Helper()
	if path, err := exec.LookPath("promtool"); err == nil {
		return path
	}
	path, err := filepath.Abs("../../../../.cache/prometheus/usr/bin/promtool")
	if err == nil {
		_, err = os.Stat(path)
	}
	if err != nil && os.Getenv("CI") != "" && os.Geteuid() == 0 {
		t.Fatal("promtool is missing: make tools-for-test gets it")
	}
	if err != nil {
		t.Skip("promtool is not installed: make tools-for-test gets it")
	}
	return path
}

func TestAlertRulesPassPromtool(t *testing.T) {
	tool := promtool(t)
	for _, args := range [][]string{{"check", "rules", "alerts.yaml"}, {"test", "rules", "alerts_test.yaml"}} {
		c := exec.Command(tool, args...)
		c.Dir = monitoring
		if out, err := c.CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
}

func TestConfigurationPassesPromtool(t *testing.T) {
	tool := promtool(t)
	for _, page := range []string{"README.md", filepath.Join("..", "operations.md")} {
		b, err := os.ReadFile(filepath.Join(monitoring, page))
		if err != nil {
			t.Fatal(err)
		}
		found := 0
		for _, block := range regexp.MustCompile("(?ms)^```ya?ml\n(.*?)^```").FindAllStringSubmatch(string(b), -1) {
			if !strings.Contains(block[1], "scrape_configs:") {
				continue
			}
			found++
			name := filepath.Join(t.TempDir(), "prometheus.yaml")
			if err := os.WriteFile(name, []byte(block[1]), 0o600); err != nil {
				t.Fatal(err)
			}
			if out, err := exec.Command(tool, "check", "config", "--syntax-only", name).CombinedOutput(); err != nil {
				t.Errorf("%s: promtool check config: %v\n%s", page, err, out)
			}
		}
		if found != 1 {
			t.Errorf("%s has %d configurations of Prometheus, want 1", page, found)
		}
	}
}
