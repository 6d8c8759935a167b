package browser

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// patience bounds the wait for the browser.
const patience = time.Minute

// names are the programs that will do, the smallest first.
var names = []string{"chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"}

// find returns the path of a Chromium. Without one the test is skipped; in CI it
// fails, since there it is installed.
func find(t testing.TB) string {
	t.Helper()
	for _, name := range names {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	if os.Getenv("CI") != "" && os.Geteuid() == 0 {
		t.Fatal("there is no Chromium, and CI must have one: make tools-for-test gets it")
	}
	t.Skip("there is no Chromium: make tools-for-test gets it")
	return ""
}

// Browser is a Chromium without a window.
type Browser struct {
	t    testing.TB
	pipe *pipe
}

// Start starts a browser that ends with the test.
func Start(t testing.TB) *Browser {
	t.Helper()
	program := find(t)
	profile, err := os.MkdirTemp("", "rnbd-browser-")
	if err != nil {
		t.Fatal(err)
	}
	// Pictures are drawn by the processor, and nothing is asked of the network on
	// the browser's own behalf. Root may not use its sandbox.
	cmd := exec.Command(program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic",
		"--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
		"--user-data-dir="+profile, "--remote-debugging-pipe", "about:blank")
	theirIn, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	out, theirOut, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	log := &strings.Builder{}
	cmd.ExtraFiles, cmd.Stderr = []*os.File{theirIn, theirOut}, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	err = cmd.Start()
	theirIn.Close()
	theirOut.Close()
	if err != nil {
		t.Fatal(err)
	}
	b := &Browser{t: t, pipe: newPipe(in)}
	var reader sync.WaitGroup
	reader.Go(func() { b.pipe.run(out) })
	t.Cleanup(func() {
		_, _ = b.pipe.send("", "Browser.close", nil) // it may have crashed
		killed := time.AfterFunc(patience, func() { syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) })
		in.Close()
		err := cmd.Wait()
		killed.Stop()
		syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // what it left of its group
		reader.Wait()
		out.Close()
		for end := time.Now().Add(patience); os.RemoveAll(profile) != nil && time.Now().Before(end); { // killed processes still write to it
			time.Sleep(20 * time.Millisecond)
		}
		if t.Failed() {
			t.Logf("the browser: %v\n%s", err, log)
		}
	})
	return b
}

// Options are those of a page.
type Options struct {
	Width, Height int    // of the window, in pixels
	Dark          bool   // the user prefers a dark page
	Token         string // the password that the user types when the page asks for one; empty: the user gives up
}

// Page is a page in a tab of its own.
type Page struct {
	t       testing.TB
	pipe    *pipe
	session string
	url     *url.URL
	token   string
	width   int

	mu       sync.Mutex
	asked    int      // times that a password was asked for
	problems []string // what no page may do
}

// Open loads a page. It is not checked whether it loads well.
func (b *Browser) Open(address string, o Options) *Page {
	b.t.Helper()
	p := &Page{t: b.t, pipe: b.pipe, token: o.Token}
	var target struct{ TargetID string }
	var session struct{ SessionID string }
	var err error
	if p.url, err = url.Parse(address); err != nil {
		b.t.Fatal(err)
	}
	b.must(b.pipe.call("", "Target.createTarget", map[string]any{"url": "about:blank"}, &target))
	b.must(b.pipe.call("", "Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &session))
	p.session = session.SessionID
	b.pipe.mu.Lock()
	b.pipe.events[p.session] = p.event
	b.pipe.mu.Unlock()
	for _, method := range []string{"Page.enable", "Runtime.enable", "Log.enable"} {
		b.must(p.call(method, nil, nil))
	}
	b.must(p.call("Fetch.enable", map[string]any{"handleAuthRequests": true}, nil))
	p.Window(o.Width, o.Height, o.Dark)
	b.must(p.call("Page.navigate", map[string]any{"url": address}, nil))
	return p
}

// Window changes the size of the window, and whether the user prefers a dark page.
func (p *Page) Window(width, height int, dark bool) {
	p.t.Helper()
	p.width = width
	scheme := "light"
	if dark {
		scheme = "dark"
	}
	err := errors.Join(
		p.call("Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false}, nil),
		p.call("Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{{"name": "prefers-color-scheme", "value": scheme}}}, nil))
	if err != nil {
		p.t.Fatal(err)
	}
}

func (b *Browser) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

func (p *Page) call(method string, params, result any) error {
	return p.pipe.call(p.session, method, params, result)
}

// event is told what happens on the page. It runs on the pipe's reader, and only
// sends.
func (p *Page) event(method string, params json.RawMessage) {
	var e struct {
		RequestID string
		Request   struct{ URL string }
		Message   string
		Entry     struct{ Level, Text, URL string }
		Details   struct {
			Text      string
			Exception struct{ Description string }
		} `json:"exceptionDetails"`
	}
	if err := json.Unmarshal(params, &e); err != nil {
		p.problem("%s: %v", method, err)
		return
	}
	switch method {
	case "Fetch.requestPaused":
		if u, err := url.Parse(e.Request.URL); err != nil || u.Host != p.url.Host && u.Scheme != "data" {
			p.problem("it asks another host: %s", e.Request.URL)
		}
		_, _ = p.pipe.send(p.session, "Fetch.continueRequest", map[string]any{"requestId": e.RequestID})
	case "Fetch.authRequired":
		_, _ = p.pipe.send(p.session, "Fetch.continueWithAuth", map[string]any{"requestId": e.RequestID, "authChallengeResponse": p.password()})
	case "Page.javascriptDialogOpening":
		p.problem("it opens a dialog: %s", e.Message)
		_, _ = p.pipe.send(p.session, "Page.handleJavaScriptDialog", map[string]any{"accept": true})
	case "Runtime.exceptionThrown":
		p.problem("its script fails: %s %s", e.Details.Text, e.Details.Exception.Description)
	case "Log.entryAdded":
		if e.Entry.Level == "error" {
			p.problem("%s %s", e.Entry.Text, e.Entry.URL)
		}
	}
}

// password is the user's answer. A user whose password was wrong gives up.
func (p *Page) password() map[string]string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.asked++; p.asked > 1 || p.token == "" {
		return map[string]string{"response": "CancelAuth"}
	}
	return map[string]string{"response": "ProvideCredentials", "username": "anyone", "password": p.token}
}

func (p *Page) problem(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.problems = append(p.problems, fmt.Sprintf(format, args...))
}

// Problems are what the page should not have done so far: requests to other hosts,
// errors of scripts, refusals by its policy, dialogs.
func (p *Page) Problems() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]string(nil), p.problems...)
}

// Close closes the page, and fails the test if the page has problems.
func (p *Page) Close() {
	p.t.Helper()
	for _, problem := range p.Problems() {
		p.t.Errorf("%s: %s", p.url, problem)
	}
	if err := p.call("Page.close", nil, nil); err != nil {
		p.t.Error(err)
	}
}

// Eval evaluates an expression on the page and decodes its value into v, which may be
// nil.
func (p *Page) Eval(expression string, v any) {
	p.t.Helper()
	if err := p.eval(expression, v); err != nil {
		p.t.Fatal(err)
	}
}

func (p *Page) eval(expression string, v any) error {
	var r struct {
		Result  struct{ Value json.RawMessage }
		Details *struct {
			Text      string
			Exception struct{ Description string }
		} `json:"exceptionDetails"`
	}
	err := p.call("Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true, "awaitPromise": true}, &r)
	switch {
	case err != nil:
		return err
	case r.Details != nil:
		return fmt.Errorf("%s: %s %s", expression, r.Details.Text, r.Details.Exception.Description)
	case r.Result.Value == nil || v == nil: // undefined, or not wanted
		return nil
	}
	return json.Unmarshal(r.Result.Value, v)
}

// Await waits until an expression is true.
func (p *Page) Await(what, expression string) {
	p.t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		var is bool
		err := p.eval("Boolean("+expression+")", &is) // the page may be loading
		if is {
			return
		}
		if time.Now().After(end) {
			var text string
			p.Eval(`document.body ? document.body.innerText : ""`, &text)
			p.t.Fatalf("not in %v: %s (%v, %q); the page shows\n%s", patience, what, err, p.Problems(), text)
		}
	}
}

// Screenshot writes a picture of the whole page as a PNG.
func (p *Page) Screenshot(path string) {
	p.t.Helper()
	var height int
	p.Eval(`document.documentElement.scrollHeight`, &height)
	var r struct{ Data string }
	clip := map[string]int{"x": 0, "y": 0, "width": p.width, "height": height, "scale": 1}
	if err := p.call("Page.captureScreenshot", map[string]any{"captureBeyondViewport": true, "clip": clip}, &r); err != nil {
		p.t.Fatal(err)
	}
	b, err := base64.StdEncoding.DecodeString(r.Data)
	if err == nil {
		err = os.WriteFile(path, b, 0o644)
	}
	if err != nil {
		p.t.Fatal(err)
	}
}
