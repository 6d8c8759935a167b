package e2e

import (
	"encoding/json"
	"io"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

// stages of 'device show stats json', by stage and operation.
func stages(t *testing.T, r result) map[string]float64 {
	t.Helper()
	r.want(t, 0)
	var shown struct {
		Latency []struct {
			Stage, Op   string
			Count, Mean float64
			P99, Max    float64
		}
	}
	if err := json.Unmarshal([]byte(r.out), &shown); err != nil {
		t.Fatalf("%v\n%s", err, r.out)
	}
	counts := map[string]float64{}
	for _, s := range shown.Latency {
		counts[s.Stage+" "+s.Op] = s.Count
		if s.Stage != "queue" && (s.Mean <= 0 || s.Max < s.P99 || s.P99 <= 0) {
			t.Errorf("%s of stage %s: mean %v, p99 %v, max %v ns", s.Op, s.Stage, s.Mean, s.P99, s.Max)
		}
	}
	return counts
}

// scrape reads the series of a daemon from the address that its log names.
func scrape(t *testing.T, log string) map[string]float64 {
	t.Helper()
	m := regexp.MustCompile(`msg="metrics are served".* address=(\S+)`).FindStringSubmatch(log)
	if m == nil {
		t.Fatalf("no address of metrics in the log:\n%s", log)
	}
	resp, err := http.Get("http://" + m[1] + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%s, %v", resp.Status, err)
	}
	series := map[string]float64{}
	for line := range strings.Lines(string(text)) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), "} "); ok && line[0] != '#' {
			series[name+"}"], _ = strconv.ParseFloat(value, 64)
		}
	}
	return series
}

// Every process times its part of each request, and all say the same number,
// wherever one asks.
func TestStatisticsOfRequests(t *testing.T) {
	metrics := []string{"--metrics", "127.0.0.1:0"}
	r := newRig(t, rigOptions{size: 1 << 20, server: lab.ServerOptions{Extra: metrics}, client: lab.ClientOptions{Extra: metrics}})
	c := r.dial()
	buf := make([]byte, 4096)
	for range 7 {
		if _, err := c.WriteAt(buf, 4096); err != nil {
			t.Fatal(err)
		}
	}
	for range 5 {
		if _, err := c.ReadAt(buf, 8192); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}

	// The front end counts its answers.
	eventually(t, "the front end has counted the flush", func() bool {
		return stages(t, r.cli("device", "show", r.device.Name, "stats", "json"))["frontend flush"] == 1
	})
	onClient := stages(t, r.cli("device", "show", r.device.Name, "stats", "json"))
	onServer := stages(t, r.serverCLI("device", "show", "disk.img", "stats", "json"))
	clientSeries, serverSeries := scrape(t, r.client.Log()), scrape(t, r.server.Log())
	for _, op := range []struct {
		name string
		n    float64
	}{{"write", 7}, {"read", 5}, {"flush", 1}} {
		for _, stage := range []string{"frontend", "queue", "wire"} {
			if got := onClient[stage+" "+op.name]; got != op.n {
				t.Errorf("client, stage %s: %v of operation %s, want %v", stage, got, op.name, op.n)
			}
			series := `rnbd_client_request_duration_seconds_count{device="` + r.device.Name + `",op="` + op.name + `",stage="` + stage + `"}`
			if got := clientSeries[series]; got != op.n {
				t.Errorf("%s is %v, want %v", series, got, op.n)
			}
		}
		for _, stage := range []string{"queue", "plugin", "disk"} {
			if got := onServer[stage+" "+op.name]; got != op.n {
				t.Errorf("server, stage %s: %v of operation %s, want %v", stage, got, op.name, op.n)
			}
			series := `rnbd_server_request_duration_seconds_count{device="` + r.image + `",op="` + op.name + `",stage="` + stage + `"}`
			if got := serverSeries[series]; got != op.n {
				t.Errorf("%s is %v, want %v", series, got, op.n)
			}
		}
	}
	for series, want := range map[string]float64{
		`rnbd_client_plugin_up{kind="frontend",plugin="nbd"}`: 1,
		`rnbd_client_sessions{state="connected"}`:             1,
	} {
		if got := clientSeries[series]; got != want {
			t.Errorf("%s is %v, want %v", series, got, want)
		}
	}
}

// Levels of subsystems change while a daemon runs, in its plugins too.
func TestLogLevelsChangeAtRunTime(t *testing.T) {
	r := newRig(t, rigOptions{size: 1 << 20})
	r.serverCLI("log").want(t, 0, "rtrs", "plugins", "iwarp", "control", "server")
	if strings.Contains(r.server.Log(), "level=DEBUG") {
		t.Error("debug lines at level info")
	}
	r.serverCLI("log", "control=debug", "plugins=debug").want(t, 0, "debug")
	r.serverCLI("device", "list").want(t, 0)
	if log := r.server.Log(); !strings.Contains(log, `level=DEBUG msg="control call" subsystem=control call=ListDevices`) {
		t.Errorf("the call is not logged:\n%s", log)
	}
	r.serverCLI("log", "all=error").want(t, 0, "error")
	r.serverCLI("log", "nosuch=debug").want(t, exitNotFound, "nosuch", "rtrs")
	r.serverCLI("log", "rtrs=loud").want(t, exitUsage, "loud", "debug")
	r.serverCLI("log", "rtrs").want(t, exitUsage, "SUBSYSTEM=LEVEL")
	r.serverCLI("log", "json").want(t, 0, `"subsystem": "rtrs"`, `"level": "error"`)
}
