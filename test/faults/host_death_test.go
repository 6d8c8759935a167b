package faults

import (
	"bytes"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
)

// orphanLimit is how long plugins may outlive their host: 1 s on a machine of
// our own, more where other work takes the processors away.
func orphanLimit() time.Duration {
	if long() {
		return time.Second
	}
	return 20 * time.Second
}

// TestPluginsEndWithTheirHost kills the daemons under load.
func TestPluginsEndWithTheirHost(t *testing.T) {
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{SearchPath: l.Image("disk.img", 16<<20), Plugins: []string{"fileio", "blockio"}})
	c := l.Client(lab.ClientOptions{})
	d := l.Map(c, "disk.img", s)
	startLoad(t, c, d.Name, loadOptions{reconnect: true, allow: func(error) bool { return true }}).awaitProgress(50)

	var storage []int
	for _, name := range []string{"fileio", "blockio"} {
		p, err := s.Plugin(name)
		if err != nil {
			t.Fatal(err)
		}
		storage = append(storage, int(p.Pid))
	}
	front, err := c.Plugin("nbd")
	if err != nil {
		t.Fatal(err)
	}
	endsWith(t, "server", s.Kill, storage...)
	endsWith(t, "client", c.Kill, int(front.Pid))
}

// endsWith fails the test if a process of pids outlives the kill by more than
// the limit.
func endsWith(t *testing.T, host string, kill func() error, pids ...int) {
	t.Helper()
	start := time.Now()
	if err := kill(); err != nil {
		t.Fatal(err)
	}
	for _, pid := range pids {
		for alive(pid) {
			if time.Since(start) > orphanLimit() {
				t.Errorf("process %d lives %v after its %s was killed", pid, time.Since(start), host)
				return
			}
			time.Sleep(time.Millisecond)
		}
	}
	t.Logf("%d plugins ended %v after their %s", len(pids), time.Since(start).Round(time.Millisecond), host)
}

// alive reports whether a process runs. A dead one that its parent has not
// looked at does not.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, _ := bytes.Cut(stat, []byte(") "))
	return !bytes.HasPrefix(rest, []byte("Z")) && !bytes.HasPrefix(rest, []byte("X"))
}
