package faults

import (
	"bytes"
	"errors"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/nbdclient"
)

// memoryServer serves names mem* from memory and files of dir.
func memoryServer(l *lab.T, dir string, extra ...string) *lab.Server {
	return l.Server(lab.ServerOptions{
		SearchPath: dir, Plugins: []string{"memory", "fileio"},
		Extra: append([]string{"--io-mode", "mem*=memory", "--io-config", "memory:size=1048576"}, extra...),
	})
}

// TestAPluginThatLosesItsStateIsNotReplayed kills io-memory with requests in
// flight: whoever had data there is told, and nobody is shown older data.
func TestAPluginThatLosesItsStateIsNotReplayed(t *testing.T) {
	l := lab.New(t)
	s := memoryServer(l, l.Image("disk.img", 16<<20))
	c := l.Client(lab.ClientOptions{})
	mem, file := l.Map(c, "mem0", s), l.Map(c, "disk.img", s)
	other := startLoad(t, c, file.Name, loadOptions{})
	n := mustDial(t, c, mem.Name)
	data := bytes.Repeat([]byte{7}, 4096)
	if _, err := n.WriteAt(data, 0); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- writeUntilError(n) }()
	time.Sleep(20 * time.Millisecond)
	pid := killPlugin(t, s, "memory")
	if err := <-ended; !errors.Is(err, syscall.EIO) {
		t.Errorf("a write of the lost disk ends with %v, want EIO", err)
	}
	eventually(t, enough, "the plugin runs again", func() bool {
		p, err := s.Plugin("memory")
		return err == nil && p.Pid != 0 && int(p.Pid) != pid
	})
	for range 3 { // not only at first
		if _, err := n.ReadAt(make([]byte, 4096), 0); !errors.Is(err, syscall.EIO) {
			t.Errorf("a read of the lost disk gives %v, want EIO", err)
		}
	}
	if got := serverDevice(t, s, "mem0").State; got != "failed: plugin state lost" {
		t.Errorf("the server says the device is %q", got)
	}
	n.Close()
	remapFresh(t, l, c, s, mem.Name)
	other.awaitProgress(100)
	other.stop()
}

// writeUntilError writes to the second half until that fails.
func writeUntilError(n *nbdclient.Client) error {
	buf := make([]byte, 65536)
	for i := int64(0); ; i++ {
		if _, err := n.WriteAt(buf, 512<<10+i%8*65536); err != nil {
			return err
		}
	}
}

// remapFresh unmaps a lost disk and maps it again: it is empty and works.
func remapFresh(t *testing.T, l *lab.T, c *lab.Client, s *lab.Server, device string) {
	t.Helper()
	eventually(t, enough, "the device has no users", func() bool { return c.Unmap(device, false) == nil })
	d := l.Map(c, "mem0", s)
	n := mustDial(t, c, d.Name)
	got := make([]byte, 4096)
	if _, err := n.ReadAt(got, 0); err != nil {
		t.Fatalf("read of the new disk: %v", err)
	}
	if !bytes.Equal(got, make([]byte, 4096)) {
		t.Errorf("the new disk is not empty: % x...", got[:8])
	}
	if _, err := n.WriteAt(got, 0); err != nil {
		t.Errorf("write to the new disk: %v", err)
	}
	if state := serverDevice(t, s, "mem0").State; state != "open" {
		t.Errorf("the server says the new device is %q", state)
	}
}

// TestAPluginThatCrashesTooOftenIsGivenUp kills it three times within the
// window. Its devices fail, those of other plugins do not notice.
func TestAPluginThatCrashesTooOftenIsGivenUp(t *testing.T) {
	l := lab.New(t)
	dir := l.Image("disk.img", 16<<20)
	s := memoryServer(l, dir, "--crash-limit", "3", "--crash-window", "1m")
	c := l.Client(lab.ClientOptions{})
	mem, file := l.Map(c, "mem0", s), l.Map(c, "disk.img", s)
	memory := startLoad(t, c, mem.Name, loadOptions{workers: 4, blocks: 64})
	memory.awaitProgress(50)
	memory.stop()
	memory.end()
	n := mustDial(t, c, file.Name)

	for kill := 1; kill <= 3; kill++ {
		pid := killPlugin(t, s, "fileio")
		eventually(t, enough, "the server has decided", func() bool {
			p, err := s.Plugin("fileio")
			return err == nil && (p.Pid != 0 && int(p.Pid) != pid || strings.HasPrefix(p.State, "failed"))
		})
		_, err := n.WriteAt(make([]byte, 4096), 0)
		if kill < 3 && err != nil {
			t.Errorf("after %d kills a write gives %v", kill, err)
		}
		if kill == 3 && !errors.Is(err, syscall.EIO) {
			t.Errorf("after 3 kills a write gives %v, want EIO", err)
		}
	}
	p, err := s.Plugin("fileio")
	if err != nil || p.State != "failed: crashes too often" {
		t.Errorf("the plugin is %v, %v", p, err)
	}
	if got := serverDevice(t, s, "disk.img").State; got != "failed: plugin fileio crashes too often" {
		t.Errorf("the server says the device is %q", got)
	}
	again := startLoad(t, c, mem.Name, loadOptions{workers: 4, blocks: 64, history: memory.h})
	again.awaitProgress(50)
	again.stop()
}
