package faults

import (
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
)

// TestKillingAnNBDServerBehindThePlugin kills the plugin io-nbd, the NBD server that it has
// started, and the daemon. The servers keep what they have acknowledged in the page cache.
func TestKillingAnNBDServerBehindThePlugin(t *testing.T) {
	for tool, run := range map[string]string{
		"nbdkit": "nbdkit --filter=delay file IMAGE wdelay=1ms",
		"qemu-storage-daemon": "qemu-storage-daemon --blockdev driver=file,node-name=f,filename=IMAGE --nbd-server addr.type=unix,addr.path=$socket,max-connections=0" +
			" --export type=nbd,id=e,node-name=f,name=,writable=on",
	} {
		t.Run(tool, func(t *testing.T) {
			lab.Tool(t, tool)
			l := lab.New(t)
			dir := l.Image("disk.img", 64<<20)
			image := filepath.Join(dir, "disk.img")
			s := l.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"nbd"}, Extra: []string{
				"--crash-limit", "1000", "--plugin-allow", "nbd=programs", "--io-mode", "*=nbd", "--io-config", "nbd:lock=" + image,
				"--io-config", "nbd:keeps=acknowledged", "--io-config", "nbd:run=" + strings.ReplaceAll(run, "IMAGE", image)}})
			c := l.Client(lab.ClientOptions{Extra: []string{"--loss", "queue:60s"}})
			d := l.Map(c, "vol", s)
			rounds := pick(2, 20)
			f := startFio(t, time.Duration(rounds)*3*time.Second, "64m", "8m", c.URI(d.Name))
			for range rounds {
				time.Sleep(200 * time.Millisecond)
				awaitNext(t, s, killPlugin(t, s, "nbd"), tool)
				killChild(t, s, tool)
				if err := s.Kill(); err != nil {
					t.Fatal(err)
				}
				if err := s.Start(); err != nil {
					t.Fatal(err)
				}
				awaitNext(t, s, 0, tool)
			}
			r := f.wait()
			t.Logf("no error in %d verified requests; the longest took %v", r.Requests, r.Longest.Round(time.Millisecond))
		})
	}
}

// awaitNext waits until another process of nbd than pid runs, and its NBD server.
func awaitNext(t *testing.T, s *lab.Server, pid int, tool string) {
	t.Helper()
	eventually(t, 2*enough, "the plugin and its NBD server run", func() bool {
		p, err := s.Plugin("nbd")
		return err == nil && p.Pid != 0 && int(p.Pid) != pid && lab.ChildOf(int(p.Pid), tool) != 0
	})
}

// killChild kills the NBD server of nbd, and waits until the next one runs.
func killChild(t *testing.T, s *lab.Server, tool string) {
	t.Helper()
	p, err := s.Plugin("nbd")
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(lab.ChildOf(int(p.Pid), tool), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	awaitNext(t, s, int(p.Pid), tool)
}
