package kernelvm

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/kernelvm/vm"
)

// recording is a capture of the packets between host and guest on a link.
type recording struct {
	file string
	cmd  *exec.Cmd
}

// record captures the RoCE packets of a link during the test. If it fails, the last of
// them are shown, decoded. The file is kept if RNBD_KEEP_CAPTURES names a folder for it.
func record(t testing.TB, g *vm.Guest, link int) *recording {
	t.Helper()
	keep := os.Getenv("RNBD_KEEP_CAPTURES")
	if keep == "" {
		keep = t.TempDir()
	}
	r := &recording{file: filepath.Join(keep, fmt.Sprintf("%d-link%d.pcap", time.Now().Unix(), link))}
	argv := append(g.InNetns(), "tcpdump", "-i", fmt.Sprintf("br%d", link), "-Z", "root", "-U", "--immediate-mode", "-B", "65536", "-w", r.file, "udp port 4791")
	r.cmd = exec.Command(argv[0], argv[1:]...)
	stderr, err := r.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := r.cmd.Start(); err != nil {
		t.Fatalf("tcpdump: %v", err)
	}
	stderr.Read(make([]byte, 100)) // "listening on": nothing is missed from here on
	t.Cleanup(func() {
		r.stop()
		if t.Failed() {
			t.Logf("the last packets of link %d:\n%s", link, r.decode(60))
		}
	})
	return r
}

func (r *recording) stop() {
	if r.cmd.ProcessState != nil {
		return
	}
	time.Sleep(50 * time.Millisecond) // packets on their way into the file
	_ = r.cmd.Process.Signal(syscall.SIGINT)
	_ = r.cmd.Wait()
}

// decode prints the last n packets, a line each.
func (r *recording) decode(n int) string {
	out, err := exec.Command("tshark", "-n", "-r", r.file).Output()
	if err != nil {
		return err.Error() + "\n" + string(out)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
