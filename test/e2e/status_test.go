package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/names"
	"github.com/rnbd-go/rnbd/test/browser"
	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/nbdclient"
)

// Names that a peer may choose.
const (
	evilSession = `<script>alert(1)<\script>`
	evilDevice  = `"><img src=x onerror=alert(2)>&amp;.img`
)

// pageOf is the address of the port for metrics, from the log of a daemon.
func pageOf(t *testing.T, log string) string {
	t.Helper()
	m := regexp.MustCompile(`msg="metrics are served".* address=(\S+)`).FindStringSubmatch(log)
	if m == nil {
		t.Fatalf("no address of metrics in the log:\n%s", log)
	}
	return "http://" + m[1] + "/"
}

// keepBusy writes and reads a device until the test ends.
func keepBusy(t *testing.T, user *nbdclient.Client) {
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		var err error
		for i := int64(0); err == nil && ctx.Err() == nil; i++ {
			if _, err = user.WriteAt(make([]byte, 4096), i%256*4096); err == nil {
				_, err = user.ReadAt(make([]byte, 4096), i%256*4096)
			}
		}
		ended <- err
	}()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("the load: %v", err)
		}
	})
}

// TestStatusPage has a browser show both daemons, with names that would be markup,
// and compares what it shows with what the daemons say. A browser without the token
// sees that it needs one, and nothing else. Pictures are kept in the folder that
// RNBD_SCREENSHOTS names.
func TestStatusPage(t *testing.T) {
	const token = "0123456789abcdef"
	b := browser.Start(t)
	l := lab.New(t)
	dir := l.Image("plain.img", 8<<20)
	l.Image(evilDevice, 1<<20)
	extra := []string{"--metrics", "127.0.0.1:0"}
	s := l.Server(lab.ServerOptions{SearchPath: dir, Addrs: []string{"127.0.0.1", "127.0.0.2"}, Plugins: []string{"fileio"}, Extra: extra})
	file := writeFile(t, filepath.Join(l.Dir, "token"), token)
	c := l.Client(lab.ClientOptions{Extra: append(extra, "--metrics-token-file", file)})
	plain := l.Map(c, "plain.img", s, func(r *controlpb.MapRequest) { r.Session = evilSession })
	l.Map(c, evilDevice, s, func(r *controlpb.MapRequest) { r.Session = evilSession })
	rnbd(t, "path", "disconnect", evilSession, "127.0.0.2", "--socket", c.Socket).want(t, 0)
	eventually(t, "the server has lost the path", func() bool {
		l, err := s.API.ListSessions(t.Context(), &controlpb.ListRequest{})
		return err == nil && len(l.Sessions) == 1 && len(l.Sessions[0].Paths) == 1
	})
	keepBusy(t, dialNBD(t, c, plain.Name))

	for _, path := range []string{"", "status.json"} {
		p := b.Open(pageOf(t, c.Log())+path, browser.Options{Width: 800, Height: 600, Token: "a wrong one"})
		p.Await("it is refused", `document.body?.innerText.startsWith("the token is missing or wrong")`)
	}
	for _, side := range []struct{ kind, page, socket, folder string }{
		{"client", pageOf(t, c.Log()), c.Socket, ""}, {"server", pageOf(t, s.Log()), s.Socket, dir + "/"},
	} {
		p := b.Open(side.page, browser.Options{Width: 1280, Height: 800, Token: token})
		p.Await("it shows the load", `document.querySelector('[data-key="requests/s"] dd')?.textContent.match(/^[1-9]/)`)
		p.Await("the history has a point", `document.querySelector("svg.plot path.series[d^=M]")`)
		showsTheDaemon(t, p, side.kind, side.socket)
		showsNamesAsTheyAre(t, p)
		for _, w := range []struct {
			width int
			dark  bool
		}{{1280, false}, {1280, true}, {800, false}, {400, false}, {400, true}} {
			p.Window(w.width, 800, w.dark)
			fits(t, p, w.width, w.dark)
			showsEveryCell(t, p, w.width)
			if folder := os.Getenv("RNBD_SCREENSHOTS"); folder != "" {
				p.Screenshot(filepath.Join(folder, fmt.Sprintf("%s-%d-dark-%v.png", side.kind, w.width, w.dark)))
			}
		}
		p.Close()
	}
}

// TestStatusPage_SaysWhatNeedsAttention takes the server of a device away.
func TestStatusPage_SaysWhatNeedsAttention(t *testing.T) {
	b := browser.Start(t)
	l := lab.New(t)
	dir := l.Image("postgres-primary-europe-west-with-a-long-name-01.img", 8<<20)
	s := l.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"}})
	c := l.Client(lab.ClientOptions{Extra: []string{"--metrics", "127.0.0.1:0", "--loss", "fail"}})
	d := l.Map(c, "postgres-primary-europe-west-with-a-long-name-01.img", s, func(r *controlpb.MapRequest) { r.Name = "postgres-primary-europe-west-01" })
	p := b.Open(pageOf(t, c.Log()), browser.Options{Width: 1280, Height: 800})
	p.Await("it shows the device", `document.querySelector("#devices tbody tr")`)
	var hidden bool
	if p.Eval(`document.getElementById("verdict").hidden`, &hidden); !hidden {
		t.Error("something needs attention while all is well")
	}
	if err := s.Kill(); err != nil {
		t.Fatal(err)
	}
	p.Await("the device is closed", `document.querySelector("#devices td.below")?.textContent.startsWith("device-closed: ")`)
	p.Await("the session has no server", `document.querySelector("#sessions td.below")?.textContent.startsWith("server-away: ")`)
	var verdict string
	p.Eval(`document.getElementById("verdict").innerText`, &verdict)
	if !strings.HasPrefix(verdict, "2 things need attention: ") || !strings.Contains(verdict, "device-closed "+d.Name) {
		t.Errorf("the verdict: %q", verdict)
	}
	for _, width := range []int{1280, 1000, 400, 320} {
		p.Window(width, 800, false)
		fits(t, p, width, false)
		showsEveryCell(t, p, width)
		if folder := os.Getenv("RNBD_SCREENSHOTS"); folder != "" {
			p.Screenshot(filepath.Join(folder, fmt.Sprintf("attention-%d.png", width)))
		}
	}
	p.Close()
}

// showsEveryCell checks that the cells of all tables are in the window, without scrolling
// to the side and with their whole text, and that no column of a table is hidden.
func showsEveryCell(t *testing.T, p *browser.Page, width int) {
	t.Helper()
	var lost []string
	p.Eval(`[...document.querySelectorAll("td")].filter((c) => c.textContent !== "" && (() => {
		const at = c.getBoundingClientRect();
		return at.width === 0 || at.height === 0 || at.left < 0 || at.right > innerWidth || c.scrollWidth > c.clientWidth;
	})()).map((c) => c.closest("section").id + " " + c.dataset.key + ": " + c.textContent)`, &lost)
	for _, cell := range lost {
		t.Errorf("%d pixels: not seen: %s", width, cell)
	}
}

// showsTheDaemon compares the rows of the page with those that rnbd prints.
func showsTheDaemon(t *testing.T, p *browser.Page, kind, socket string) {
	t.Helper()
	for _, table := range []struct {
		section, noun string
		same          map[string]string // columns by field of the list
	}{
		{"devices", "device", map[string]string{"devname": "name", "state": "state", "sessname": "session"}},
		{"paths", "path", map[string]string{"sessname": "session", "state": "state", "dst_addr": "destination", "fabric": "fabric"}},
		{"sessions", "session", map[string]string{"sessname": "name", "state": "state"}},
	} {
		r := rnbd(t, kind, table.noun, "list", "all", "json", "--socket", socket)
		r.want(t, 0)
		var want []map[string]any
		if err := json.Unmarshal([]byte(r.out), &want); err != nil || len(want) == 0 {
			t.Fatalf("%d objects, %v\n%s", len(want), err, r.out)
		}
		var rows []map[string]string
		p.Eval(fmt.Sprintf(`[...document.querySelectorAll("#%s tbody tr")].map((r) => Object.fromEntries([...r.cells].map((c) => [c.dataset.key, c.textContent])))`,
			table.section), &rows)
		if len(rows) != len(want) {
			t.Errorf("%s of the %s: %d rows, want %d", table.section, kind, len(rows), len(want))
		}
		for _, object := range want {
			found := false
			for _, row := range rows {
				same := true
				for field, column := range table.same {
					same = same && fmt.Sprint(object[field]) == row[column]
				}
				if size, ok := object["size"].(float64); ok && table.noun == "device" {
					same = same && fmt.Sprintf("%.0f MiB", size/(1<<20)) == row["size"]
				}
				found = found || same
			}
			if !found {
				t.Errorf("%s of the %s: no row for %v in %v", table.section, kind, object, rows)
			}
		}
	}
	var tiles map[string]string
	p.Eval(`Object.fromEntries([...document.querySelectorAll("#totals div")].map((d) => [d.dataset.key, d.lastChild.textContent]))`, &tiles)
	if tiles["devices open"] != "2 of 2" || tiles["sessions connected"] != "1 of 1" || kind == "client" && tiles["paths connected"] != "1 of 2" {
		t.Errorf("totals of the %s: %v", kind, tiles)
	}
}

// showsNamesAsTheyAre checks that names are text.
func showsNamesAsTheyAre(t *testing.T, p *browser.Page) {
	t.Helper()
	var shown string
	p.Eval(`document.body.innerText`, &shown)
	for _, name := range []string{names.Spell(evilSession), evilDevice} {
		if !strings.Contains(shown, name) {
			t.Errorf("the page does not show the name %s as it is", name)
		}
	}
	var foreign int
	p.Eval(`document.querySelectorAll("body script, img").length`, &foreign)
	if foreign != 0 {
		t.Errorf("%d elements have come out of names", foreign)
	}
}

// fits checks that the page is not wider than the window, and has the colours that
// the user prefers.
func fits(t *testing.T, p *browser.Page, width int, dark bool) {
	t.Helper()
	var got int
	p.Eval(`document.documentElement.scrollWidth`, &got)
	if got > width {
		t.Errorf("the page is %d pixels wide, the window %d", got, width)
	}
	var color []int
	p.Eval(`getComputedStyle(document.body).backgroundColor.match(/\d+/g).map(Number)`, &color)
	if (color[0] < 128) != dark {
		t.Errorf("the user prefers a dark page: %v, and its colour is %v", dark, color)
	}
}
