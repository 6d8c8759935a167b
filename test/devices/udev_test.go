package devices

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

// testUdev has the example rule make the links, and a daemon that makes none.
func testUdev(t *testing.T, s *stack) {
	if *udev == "" {
		t.Skip("long form")
	}
	c := s.lab.Client(lab.ClientOptions{Frontend: s.frontend, Extra: append([]string{"--device-links=",
		"--frontend-plugin", s.frontend + "=" + filepath.Join(s.lab.Bin, "frontend-"+s.frontend)}, quick...)})
	startUdev(t, c.Socket, filepath.Join(s.lab.Bin, "rnbd"))

	image := s.image(t, 16<<20)
	d, err := c.Map(image, s.server, func(r *controlpb.MapRequest) { r.Session = "by-udev" })
	must(t, err)
	defer func() { c.Unmap(d.Name, true) }()
	link := filepath.Join("/dev/rnbd/by-udev", strings.ReplaceAll(image, "/", "!"))
	leads := func() bool { target, err := filepath.EvalSymlinks(link); return err == nil && target == d.Endpoint }
	eventually(t, "udev makes the link", leads)
	if _, err := os.Stat(c.Links); !os.IsNotExist(err) {
		t.Errorf("the daemon makes links: %v", err)
	}

	// Nobody answers while the daemon is away, and events come all the same.
	must(t, c.Kill())
	if s.frontend == "ublk" { // rules of other packages read disks of nbd, and wait while they have no connection
		uevent(t, d.Endpoint)
		settle(t)
	}
	if !leads() {
		t.Error("the link went with the daemon")
	}
	must(t, c.Start())
	eventually(t, "the next daemon serves the disk", func() bool {
		now, err := c.Device(d.Name)
		return err == nil && now.State == "open" && now.LastError == ""
	})
	settle(t)
	if !leads() {
		t.Error("the next daemon has no link")
	}

	other, err := s.client.Map(s.image(t, 16<<20), s.server, func(r *controlpb.MapRequest) { r.Session = "of-another-daemon" })
	must(t, err)
	uevent(t, other.Endpoint)
	settle(t)
	if _, err := os.Lstat("/dev/rnbd/of-another-daemon"); !os.IsNotExist(err) {
		t.Errorf("a disk of another daemon has a link: %v", err)
	}
	must(t, s.client.Unmap(other.Name, false))

	must(t, c.Unmap(d.Name, false))
	eventually(t, "the link goes with the disk", func() bool { _, err := os.Lstat(link); return os.IsNotExist(err) })
}

// startUdev runs udev with the rule alone, for a daemon at socket, until the
// end of the test.
func startUdev(t *testing.T, socket, program string) {
	rule := readFile(filepath.Join(lab.Root(), "docs/use/examples/65-rnbd.rules"))
	if !strings.Contains(rule, "/usr/bin/rnbd client device udev") {
		t.Fatalf("the rule runs no command:\n%s", rule)
	}
	const rules = "/run/udev/rules.d"
	must(t, os.MkdirAll(rules, 0o755))
	must(t, os.WriteFile(rules+"/65-rnbd.rules", []byte(strings.ReplaceAll(rule, "/usr/bin/rnbd", program)), 0o644))
	must(t, os.WriteFile(rules+"/10-socket.rules", []byte(`ENV{RNBD_SOCKET}="`+socket+`"`+"\n"), 0o644))
	var log strings.Builder
	daemon := exec.Command(filepath.Join(*udev, "bin", "udevadm"))
	daemon.Args[0] = "systemd-udevd" // it is a link to the other name
	daemon.Stdout, daemon.Stderr = &log, &log
	must(t, daemon.Start())
	t.Cleanup(func() {
		daemon.Process.Signal(syscall.SIGTERM)
		daemon.Wait()
		if t.Failed() {
			t.Logf("udev says:\n%s", log.String())
		}
	})
	eventually(t, "udev answers", func() bool {
		_, err := attempt(filepath.Join(*udev, "bin", "udevadm"), "control", "--ping")
		return err == nil
	})
}

func settle(t *testing.T) {
	t.Helper()
	run(t, filepath.Join(*udev, "bin", "udevadm"), "settle", "--timeout=120")
}

// uevent has the kernel tell udev of the disk once more.
func uevent(t *testing.T, node string) {
	t.Helper()
	must(t, os.WriteFile("/sys/class/block/"+filepath.Base(node)+"/uevent", []byte("change"), 0))
}
