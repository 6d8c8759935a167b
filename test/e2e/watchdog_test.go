package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/slowdisk"
)

// hungSide is a daemon as the test of the watchdog looks at it.
type hungSide struct {
	kind, device, stage, path string // path: a part of what it names
	log                       func() string
	socket                    string
}

// TestADiskThatHangsIsReported holds the writes of a disk. Both daemons say which
// device has requests that hang, in which stage and on which path: in the log, the
// metrics, the values of the status page, and with "device show". When the disk goes
// on, they say it no more.
func TestADiskThatHangsIsReported(t *testing.T) {
	disk := slowdisk.New(t, 8<<20)
	l := lab.New(t) // ends before the disk
	extra := []string{"--metrics", "127.0.0.1:0", "--hung-after", "1s"}
	s := l.Server(lab.ServerOptions{SearchPath: "/", Plugins: []string{"fileio"}, Extra: extra})
	c := l.Client(lab.ClientOptions{Extra: extra})
	name := strings.TrimPrefix(disk.Path(), "/")
	d := l.Map(c, name, s)
	user := dialNBD(t, c, d.Name)
	if _, err := user.WriteAt(make([]byte, 4096), 0); err != nil {
		t.Fatal(err)
	}
	disk.HoldWrites()
	held := make(chan error, 3)
	for i := range int64(3) {
		go func() {
			_, err := user.WriteAt(make([]byte, 4096), i*4096)
			held <- err
		}()
	}
	sides := []hungSide{
		{"client", d.Name, "wire", s.Addrs[0], c.Log, c.Socket},
		{"server", disk.Path(), "plugin", "127.0.0.1", s.Log, s.Socket},
	}
	for _, one := range sides {
		one.isReported(t, 3)
	}
	disk.Release()
	for range 3 {
		if err := <-held; err != nil {
			t.Errorf("a write that hung: %v", err)
		}
	}
	for _, one := range sides {
		one.isOver(t)
	}
}

// hung is what "device show" says.
func (h *hungSide) hung(t *testing.T) string {
	t.Helper()
	name := h.device
	r := rnbd(t, h.kind, "device", "show", name, "hung", "csv", "noheaders", "--socket", h.socket)
	r.want(t, 0)
	return strings.TrimSpace(r.out)
}

// pageDevice is the device on the status page.
func (h *hungSide) pageDevice(t *testing.T) (hung int, at string) {
	t.Helper()
	r, err := http.Get(pageOf(t, h.log()) + "status.json")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	var state struct {
		Devices []struct {
			Hung   int
			HungAt string `json:"hung_at"`
		}
	}
	if err := json.NewDecoder(r.Body).Decode(&state); err != nil || len(state.Devices) != 1 {
		t.Fatalf("%v, %+v", err, state)
	}
	return state.Devices[0].Hung, state.Devices[0].HungAt
}

func (h *hungSide) isReported(t *testing.T, requests int) {
	t.Helper()
	series := fmt.Sprintf(`rnbd_%s_device_hung_requests{device="%s",stage="%s"}`, h.kind, h.device, h.stage)
	eventually(t, fmt.Sprintf("the metrics of the %s have %d requests that hang", h.kind, requests), func() bool {
		return scrape(t, h.log())[series] == float64(requests)
	})
	if age := scrape(t, h.log())[fmt.Sprintf(`rnbd_%s_device_oldest_hung_request_seconds{device="%s"}`, h.kind, h.device)]; age < 1 || age > 120 {
		t.Errorf("the oldest request of the %s is %v s old", h.kind, age)
	}
	line := regexp.MustCompile(`level=WARN msg="requests hang" .*device=` + regexp.QuoteMeta(h.device) + ` .*older_than=1s stage=` + h.stage + ` path=\S*` + regexp.QuoteMeta(h.path) + `\S* .*op=write`)
	if !line.MatchString(h.log()) {
		t.Errorf("the log of the %s does not match %s", h.kind, line)
	}
	shown := h.hung(t)
	for _, word := range []string{fmt.Sprint(requests), h.stage, h.path, "write"} {
		if !strings.Contains(shown, word) {
			t.Errorf("the %s shows %q, without %q", h.kind, shown, word)
		}
	}
	if n, at := h.pageDevice(t); n != requests || !strings.HasPrefix(at, h.stage+" ") || !strings.Contains(at, h.path) {
		t.Errorf("the page of the %s has %d requests that hang in %q", h.kind, n, at)
	}
}

// isOver waits until nothing hangs. The log says so after a calm time, for which only
// the long form waits.
func (h *hungSide) isOver(t *testing.T) {
	t.Helper()
	eventually(t, "nothing hangs at the "+h.kind, func() bool {
		for series, n := range scrape(t, h.log()) {
			if strings.Contains(series, "_hung_request") && n != 0 {
				return false
			}
		}
		n, at := h.pageDevice(t)
		return n == 0 && at == "" && strings.Trim(h.hung(t), `"`) == ""
	})
	if long() {
		eventually(t, "the log of the "+h.kind+" says that it is over", func() bool {
			return strings.Contains(h.log(), `msg="requests do not hang any more"`)
		})
	}
}
