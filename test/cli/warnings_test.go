package cli

import (
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

// TestALostPathIsOneWarning kills the server for a while: the
// log has the loss, the return, and no line for each attempt between.
func TestALostPathIsOneWarning(t *testing.T) {
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{SearchPath: l.Image("a.img", 1<<20), Plugins: []string{"fileio"}})
	c := l.Client(lab.ClientOptions{Extra: []string{"--log-format", "json"}})
	l.Map(c, "a.img", s, func(r *controlpb.MapRequest) { r.Session = "s" })
	if err := s.Kill(); err != nil {
		t.Fatal(err)
	}
	logged(t, c, "session lost its last path")
	time.Sleep(3 * time.Second) // attempts; they must leave no trace
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	logged(t, c, "session is back")
	log := c.Log()
	for _, bad := range []string{`"cause":null`, `"cause":"<nil>"`, `"from":1`, `"msg":"rtrs: path connecting"`, `"msg":"rtrs: path connecting_err"`} {
		if strings.Contains(log, bad) {
			t.Errorf("the log has %s", bad)
		}
	}
	if !strings.Contains(log, `"msg":"rtrs: path reconnecting"`) || !strings.Contains(log, `"from":"connected"`) {
		t.Errorf("the loss is not logged, by the names of states:\n%s", log)
	}
	if n := strings.Count(log, `"msg":"rtrs: path reconnecting"`); n > 2 {
		t.Errorf("%d lines of attempts", n)
	}
}

// logged waits until the client's log has a text.
func logged(t *testing.T, c *lab.Client, text string) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !strings.Contains(c.Log(), text); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("the log does not have %q in 30 s", text)
		}
	}
}
