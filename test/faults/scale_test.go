package faults

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/browser"
	"github.com/rnbd-go/rnbd/test/lab"
)

// TestAThousandDevices has a client keep 1,000 mappings of its configuration: after
// a kill they are back within 30 s, rnbd list takes less than 1 s, rnbd top and what it
// asks the daemon less than 5 % of a processor, and the status page is shown within
// 1 s.
func TestAThousandDevices(t *testing.T) {
	if !long() {
		t.Skip("a thousand devices are of the long form: make faults")
	}
	const n = 1000
	l := lab.New(t)
	dir := ""
	for i := range n {
		dir = l.Image(fmt.Sprintf("d%d.img", i), 1<<20)
	}
	extra := []string{"--metrics", "127.0.0.1:0"}
	s := l.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"}, Extra: extra})
	c := l.Client(lab.ClientOptions{Extra: append(extra, "--config-dir", keepAll(t, l, s, n))})
	awaitOpen(t, c, n)
	if err := c.Kill(); err != nil {
		t.Fatal(err)
	}
	at := time.Now()
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	awaitOpen(t, c, n)
	restored := time.Since(at)

	program := filepath.Join(l.Bin, "rnbd")
	list := best(3, func() time.Duration {
		at := time.Now()
		out, err := exec.Command(program, "client", "device", "list", "noheaders", "nototals", "--socket", c.Socket).CombinedOutput()
		if lines := strings.Count(string(out), "\n"); err != nil || lines != n {
			t.Fatalf("list: %v, %d lines", err, lines)
		}
		return time.Since(at)
	})
	const screens = 20
	before := processorTime(t, c.PID())
	top := exec.Command(program, "client", "top", "--batch", strconv.Itoa(screens), "--socket", c.Socket)
	if out, err := top.CombinedOutput(); err != nil || strings.Count(string(out), "\nd7 ") != screens {
		t.Fatalf("top: %v, %.2000s", err, out)
	}
	daemon := processorTime(t, c.PID()) - before
	used := daemon + top.ProcessState.UserTime() + top.ProcessState.SystemTime()
	w := startLoad(t, c, "d7", loadOptions{workers: 2})
	page := lastPage(t, c.Log())
	values := best(3, func() time.Duration { return readStatus(t, page, n) })
	b := browser.Start(t)
	shown := best(3, func() time.Duration {
		p := b.Open(page, browser.Options{Width: 1280, Height: 800})
		defer p.Close()
		p.Await("the first devices are shown", `document.querySelectorAll("#devices tbody tr").length === 100`)
		var ms float64 // since the page was asked for
		p.Eval(`performance.getEntriesByName("shown")[0].startTime`, &ms)
		p.Eval(`document.querySelector("#devices button:not([hidden])").click()`, nil)
		p.Await("all devices are shown", fmt.Sprintf(`document.querySelectorAll("#devices tbody tr").length === %d`, n))
		return time.Duration(ms * float64(time.Millisecond))
	})
	w.stop()
	t.Logf("%d devices: back after %v; list %v; %d screens of top, one a second, %v of a processor, %v of it in the daemon; values of the page %v, the page in a browser %v",
		n, restored, list, screens, used, daemon, values, shown)
	for _, bound := range []struct {
		what       string
		took, most time.Duration
	}{
		{"the restore", restored, 30 * time.Second}, {"list", list, time.Second}, {"top", used, screens * time.Second / 20},
		{"the values of the page", values, time.Second}, {"the page", shown, time.Second},
	} {
		if bound.took > bound.most {
			t.Errorf("%s took %v, want %v at most", bound.what, bound.took, bound.most)
		}
	}
}

// keepAll writes a folder of configuration with mappings d0, d1 and so on.
func keepAll(t *testing.T, l *lab.T, s *lab.Server, n int) string {
	t.Helper()
	var text strings.Builder
	text.WriteString("mappings:\n")
	for i := range n {
		fmt.Fprintf(&text, "  - {device: d%d.img, server: [%q], name: d%d, session: s, loss: \"queue:1m\"}\n", i, s.Addrs[0], i)
	}
	folder := filepath.Join(l.Dir, "client.d")
	if err := os.Mkdir(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "all.yaml"), []byte(text.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	return folder
}

// awaitOpen waits until the client has n open devices.
func awaitOpen(t *testing.T, c *lab.Client, n int) {
	t.Helper()
	eventually(t, 2*time.Minute, fmt.Sprintf("%d devices are open", n), func() bool {
		l, err := c.API.ListDevices(t.Context(), &controlpb.ListRequest{Brief: true})
		open := 0
		for _, d := range l.GetDevices() {
			if d.State == "open" && d.Endpoint != "" {
				open++
			}
		}
		return err == nil && open == n
	})
}

// best is the shortest time that some runs return.
func best(runs int, run func() time.Duration) time.Duration {
	shortest := run()
	for range runs - 1 {
		shortest = min(shortest, run())
	}
	return shortest
}

// processorTime is what a process has used so far.
func processorTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	f := strings.Fields(rest)
	user, _ := strconv.Atoi(f[11])
	system, _ := strconv.Atoi(f[12])
	return time.Duration(user+system) * 10 * time.Millisecond // ticks of 100 Hz, whatever the kernel's
}

// lastPage is the address of the port for metrics of the latest run of a daemon.
func lastPage(t *testing.T, log string) string {
	t.Helper()
	m := regexp.MustCompile(`msg="metrics are served".* address=(\S+)`).FindAllStringSubmatch(log, -1)
	if m == nil {
		t.Fatal("no address of metrics in the log")
	}
	return "http://" + m[len(m)-1][1] + "/"
}

// readStatus reads the values of the status page, and returns how long that took.
func readStatus(t *testing.T, page string, devices int) time.Duration {
	t.Helper()
	time.Sleep(1100 * time.Millisecond) // an answer is kept for a second
	at := time.Now()
	r, err := http.Get(page + "status.json")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	var state struct{ Devices []any }
	if err := json.NewDecoder(r.Body).Decode(&state); err != nil || len(state.Devices) != devices {
		t.Fatalf("%v, %d devices", err, len(state.Devices))
	}
	return time.Since(at)
}
