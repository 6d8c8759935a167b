package e2e

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/slowdisk"
)

// monitoringTool finds prometheus or promtool, in the path or where make check has
// put it.
func monitoringTool(t *testing.T, name string) string {
	t.Helper()
	path := filepath.Join(lab.Root(), ".cache/prometheus/usr/bin", name)
	if _, err := os.Stat(path); err == nil {
		return path
	}
	return lab.Tool(t, name)
}

// TestPrometheus has a real Prometheus scrape both daemons under load. promtool has
// nothing to say about the pages, each query of the dashboard finds something, and the
// alert rules notice requests that fail and requests that hang.
func TestPrometheus(t *testing.T) {
	prometheus, promtool := monitoringTool(t, "prometheus"), monitoringTool(t, "promtool")
	disk := slowdisk.New(t, 8<<20)
	l := lab.New(t) // ends before the disk
	extra := []string{"--metrics", "127.0.0.1:0", "--hung-after", "1s"}
	image := filepath.Join(l.Image("disk.img", 8<<20), "disk.img")
	s := l.Server(lab.ServerOptions{SearchPath: "/", Plugins: []string{"fileio"}, Extra: extra})
	c := l.Client(lab.ClientOptions{Extra: extra})
	keepBusy(t, dialNBD(t, c, l.Map(c, strings.TrimPrefix(image, "/"), s).Name))
	user := dialNBD(t, c, l.Map(c, strings.TrimPrefix(disk.Path(), "/"), s).Name)
	fail := func() {
		disk.SetError(syscall.EIO)
		if _, err := user.WriteAt(make([]byte, 4096), 0); err == nil {
			t.Error("a write to a disk that fails succeeds")
		}
		disk.SetError(0)
	}
	fail() // a counter of failed requests begins with the first

	pages := []string{pageOf(t, s.Log()), pageOf(t, c.Log())}
	api := startPrometheus(t, prometheus, pages)
	for _, page := range pages {
		lint(t, promtool, page+"metrics")
	}
	for title, queries := range dashboard(t) {
		for _, q := range queries {
			q = strings.ReplaceAll(q, "$__rate_interval", "30s")
			eventually(t, fmt.Sprintf("the panel %q has data: %s", title, q), func() bool { return hasData(t, api, q) })
		}
	}
	rulesAre(t, api, nil)
	fail()
	disk.HoldWrites()
	held := make(chan error, 1)
	go func() {
		_, err := user.WriteAt(make([]byte, 4096), 4096)
		held <- err
	}()
	rulesAre(t, api, map[string]string{"RnbdRequestsFail": "firing", "RnbdRequestsHang": "pending"})
	disk.Release()
	if err := <-held; err != nil {
		t.Errorf("the write that hung: %v", err)
	}
	rulesAre(t, api, map[string]string{"RnbdRequestsFail": "firing"})
}

// startPrometheus runs a Prometheus with the alert rules that scrapes the pages every
// second, and returns the address of its API.
func startPrometheus(t *testing.T, program string, pages []string) string {
	t.Helper()
	dir := t.TempDir()
	targets := ""
	for _, p := range pages {
		targets += strconv.Quote(strings.Trim(strings.TrimPrefix(p, "http://"), "/")) + ", "
	}
	config := writeFile(t, filepath.Join(dir, "prometheus.yml"), fmt.Sprintf("global: {scrape_interval: 1s, evaluation_interval: 1s}\n"+
		"rule_files: [%q]\nscrape_configs: [{job_name: rnbd, static_configs: [{targets: [%s]}]}]\n",
		filepath.Join(lab.Root(), "docs/use/monitoring/alerts.yaml"), targets))
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(program, "--config.file="+config, "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address=127.0.0.1:0")
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("prometheus:\n%s", text)
		}
	})
	var addr string
	eventually(t, "prometheus listens", func() bool {
		text, _ := os.ReadFile(log.Name())
		if m := regexp.MustCompile(`address=(127\.0\.0\.1:[1-9]\d*)`).FindSubmatch(text); m != nil {
			addr = string(m[1])
		}
		return addr != ""
	})
	return "http://" + addr + "/api/v1/"
}

// lint has promtool look at a page.
func lint(t *testing.T, promtool, page string) {
	t.Helper()
	r, err := http.Get(page)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	cmd := exec.Command(promtool, "check", "metrics")
	cmd.Stdin = r.Body
	if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("promtool check metrics on %s: %v\n%s", page, err, out)
	}
}

// dashboard returns the queries of the panels, by title.
func dashboard(t *testing.T) map[string][]string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(lab.Root(), "docs/use/monitoring/dashboard.json"))
	if err != nil {
		t.Fatal(err)
	}
	var board struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(b, &board); err != nil || len(board.Panels) < 10 {
		t.Fatalf("%d panels, %v", len(board.Panels), err)
	}
	out := map[string][]string{}
	for _, p := range board.Panels {
		for _, q := range p.Targets {
			out[p.Title] = append(out[p.Title], q.Expr)
		}
	}
	return out
}

// askPrometheus decodes the data of an answer.
func askPrometheus(t *testing.T, address string, data any) {
	t.Helper()
	r, err := http.Get(address)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	answer := struct {
		Status string
		Data   any
	}{Data: data}
	if err := json.Unmarshal(text, &answer); err != nil || answer.Status != "success" {
		t.Fatalf("%s: %v\n%s", address, err, text)
	}
}

// hasData reports whether a query has a result that is a number.
func hasData(t *testing.T, api, query string) bool {
	t.Helper()
	var data struct{ Result []struct{ Value [2]any } }
	askPrometheus(t, api+"query?query="+url.QueryEscape(query), &data)
	for _, r := range data.Result {
		text, _ := r.Value[1].(string)
		if v, err := strconv.ParseFloat(text, 64); err == nil && !math.IsNaN(v) {
			return true
		}
	}
	return false
}

// rulesAre waits until each rule was evaluated without an error, and has the state in
// want; others are inactive.
func rulesAre(t *testing.T, api string, want map[string]string) {
	t.Helper()
	type rule struct{ Name, Health, State, LastError string }
	eventually(t, fmt.Sprintf("all rules are inactive, but %v", want), func() bool {
		var data struct{ Groups []struct{ Rules []rule } }
		askPrometheus(t, api+"rules", &data)
		n := 0
		for _, g := range data.Groups {
			for _, r := range g.Rules {
				if r.Health == "err" {
					t.Fatalf("%s: %s", r.Name, r.LastError)
				}
				if r.Health != "ok" || r.State != cmp.Or(want[r.Name], "inactive") {
					return false
				}
				n++
			}
		}
		return n >= 8
	})
}
