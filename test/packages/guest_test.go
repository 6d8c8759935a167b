package packages

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The guest maps a file of its own server and mounts it by fstab. A script runs
// after each boot, says on the console what it finds, and boots again.
const (
	mapping = "mappings:\n  - device: data.img\n    server: [127.0.0.1]\n    session: s1\n    loss: queue:10s\n"
	fstab   = "/dev/vda / ext4 defaults 0 1\n/dev/rnbd/s1/data.img /data ext4 _netdev,nofail,x-systemd.mount-timeout=60s 0 2\n"
	unit    = "[Unit]\nAfter=multi-user.target\n[Service]\nType=oneshot\nTimeoutStartSec=infinity\nExecStart=/root/proof\n[Install]\nWantedBy=graphical.target\n"
	proof   = `#!/bin/sh
n=$(($(cat /root/boots 2>/dev/null) + 1))
echo $n >/root/boots
say() { echo "PROOF $n $*" >/dev/ttyS0; }
until_true() { for i in $(seq 600); do if eval "$1" >/dev/null 2>&1; then return 0; fi; sleep 0.5; done; say "never: $1"; return 1; }
units="rnbd-server.service rnbd-client.service rnbd-server.socket rnbd-client.socket rnbd-client-nbd.socket"
reboot_now() { say reboot; systemctl --no-block reboot; exit; }
say begin
until_true 'mountpoint /data'
say mounted $(findmnt -n -o FSTYPE /data) after $(cut -d' ' -f1 /proc/uptime) s
for u in $units; do say active $u $(systemctl is-active $u); done
for u in rnbd-server rnbd-client; do say service $u $(systemctl show -p Type -p WatchdogUSec -p NRestarts $u | sort | tr '\n' ' '); done
say failed $(systemctl list-units --failed --plain --no-legend | cut -d' ' -f1 | tr '\n' ' ')
[ $n = 1 ] || { (cd /data && sha256sum --quiet -c sum) >/dev/null 2>&1 && say data kept || say data lost; }
case $n in
1) # an upgrade under systemd, with the file system in use
	dpkg -i /root/second/*.deb >/root/dpkg.log 2>&1 && say upgraded || say upgrade fails $(tail -n 3 /root/dpkg.log)
	until_true 'rnbd server show && rnbd client show'
	say version $(rnbd version | head -n 1)
	;;
2) # a server that hangs is killed by the watchdog, and started again
	old=$(systemctl show -P MainPID rnbd-server)
	kill -STOP $old
	until_true "[ \$(systemctl show -P MainPID rnbd-server) -gt 0 ] && [ \$(systemctl show -P MainPID rnbd-server) != $old ] && systemctl is-active rnbd-server"
	say restarted $(systemctl show -P NRestarts rnbd-server)
	until_true 'rnbd session list | grep connected'
	;;
esac
dd if=/dev/urandom of=/data/file bs=64k count=32 2>/dev/null && (cd /data && sha256sum file >sum && sync) && say wrote || say cannot write
case $n in
5) # the server is gone for good, with writes not yet on its disk, and the host goes down
	systemctl mask --runtime rnbd-server.service rnbd-server.socket
	cp /data/file /data/dirty
	systemctl kill -s KILL rnbd-server
	say killed
	reboot_now ;;
6)
	umount /data && dpkg --purge rnbd-client rnbd-server rnbd-plugins rnbd rnbd-net rnbd-sdk-doc >/root/dpkg.log 2>&1 && say purged || say purge fails $(tail -n 3 /root/dpkg.log)
	say left $(ls -d /etc/rnbd /run/rnbd /etc/systemd/system/*/rnbd* /etc/systemd/system/rnbd* 2>/dev/null) $(pgrep -l 'rnbd|io-|frontend' | tr '\n' ' ') $(systemctl list-units --plain --no-legend 'rnbd*' | cut -d' ' -f1 | tr '\n' ' ')
	journalctl -q -o cat -u 'rnbd*' | grep -E 'SECCOMP|Operation not permitted|goroutine ' | head -n 5 | while read -r line; do say "journal $line"; done
	say off
	systemctl --no-block poweroff; exit ;;
*)
	reboot_now ;;
esac
`
)

// downLimit bounds the time from the order to boot until the next boot, of an
// emulated machine with other work beside it. On a quiet one it is seconds; with
// a dead server systemd waits 90 s for the mount and 40 s for the client.
const downLimit = 6 * time.Minute

// A Debian guest boots with the packages installed, mounts a file system from
// fstab over an rnbd disk, and boots five times more. Once the server is killed
// before the shutdown.
func TestGuestBootsWithThePackages(t *testing.T) {
	require(t, "mmdebstrap", "nsenter", "mke2fs")
	if !long {
		t.Skip("long form: boots a guest six times")
	}
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil {
		t.Skip("qemu-system-x86_64 is not installed")
	}
	g := bootGuest(t, guestDisk(t))
	for n := 1; n <= 6; n++ {
		g.boot(n)
	}
}

// guestDisk makes a disk with the packages installed, and returns the folder with
// disk, kernel and initial RAM disk.
func guestDisk(t *testing.T) string {
	h := newHost(t, prepare(t, bootRoot))
	h.run(install + "/mnt/first/*.deb")
	for name, text := range map[string]string{
		"/etc/rnbd/client.d/data.yaml": mapping, "/etc/fstab": fstab, "/root/proof": proof, "/etc/systemd/system/proof.service": unit, "/etc/hostname": "guest\n",
	} {
		if err := os.WriteFile(h.path(name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	h.run("mkdir -p /data /srv/rnbd /root/second /var/log/journal && cp /mnt/second/*.deb /root/second && rm -rf /var/cache/apt/* /var/lib/apt/lists/*")
	h.run("truncate -s 64M /srv/rnbd/data.img && mkfs.ext4 -q -F /srv/rnbd/data.img")
	h.run("systemctl enable rnbd-server.service rnbd-client.service proof.service && systemctl set-default graphical.target && systemctl mask getty@tty1.service")
	dir, err := os.MkdirTemp(temp, "guest-")
	if err != nil {
		t.Fatal(err)
	}
	script := `set -e; cd "$0"; umount mnt/first mnt/second dev/* proc run tmp dev 2>/dev/null || true; ! mountpoint -q dev
		mke2fs -q -t ext4 -d . "$1/disk" 3G; cp boot/vmlinuz-* "$1/kernel"; cp boot/initrd.img-* "$1/initrd"`
	if out, err := h.outside("sh", "-c", script, h.root, dir); err != nil {
		t.Fatalf("make the disk: %v\n%s", err, out)
	}
	return dir
}

// guest is a virtual machine, seen by its console.
type guest struct {
	t       *testing.T
	console chan string // its lines
	log     []string    // the last of them
}

func bootGuest(t *testing.T, dir string) *guest {
	t.Helper()
	cmd := exec.Command("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35", "-accel", "tcg,thread=single", "-cpu", "max",
		"-smp", "2", "-m", "1024", "-kernel", filepath.Join(dir, "kernel"), "-initrd", filepath.Join(dir, "initrd"),
		"-append", "root=/dev/vda rw console=ttyS0 net.ifnames=0 panic=-1 systemd.journald.forward_to_console=0 watchdog_thresh=60 rcupdate.rcu_cpu_stall_timeout=120",
		"-drive", "if=virtio,format=raw,cache=unsafe,file="+filepath.Join(dir, "disk"), "-serial", "stdio")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	g := &guest{t: t, console: make(chan string, 1<<16)}
	go func() {
		defer close(g.console)
		for in := bufio.NewScanner(out); in.Scan(); {
			g.console <- strings.TrimRight(in.Text(), "\r")
		}
	}()
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		if t.Failed() {
			t.Logf("console:\n%s", strings.Join(g.log, "\n"))
		}
	})
	return g
}

// wait returns what the proof says next that begins with one of the texts, and
// before that what it says besides.
func (g *guest) wait(n int, limit time.Duration, ends ...string) (said []string) {
	g.t.Helper()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
			g.t.Fatalf("boot %d: nothing of %q within %v; it says\n%s", n, ends, limit, strings.Join(said, "\n"))
		case line, open := <-g.console:
			if !open {
				g.t.Fatalf("boot %d: the guest is off; it says\n%s", n, strings.Join(said, "\n"))
			}
			if g.log = append(g.log, line); len(g.log) > 200 {
				g.log = g.log[1:]
			}
			_, text, ok := strings.Cut(line, fmt.Sprintf("PROOF %d ", n))
			if !ok {
				continue
			}
			said = append(said, text)
			for _, end := range ends {
				if strings.HasPrefix(text, end) {
					return said
				}
			}
		}
	}
}

// boot follows boot number n to its end.
func (g *guest) boot(n int) {
	g.t.Helper()
	start := time.Now()
	g.wait(n, downLimit, "begin")
	g.t.Logf("boot %d: up after %v", n, time.Since(start).Round(time.Second))
	said := g.wait(n, 20*time.Minute, "reboot", "off", "never")
	g.t.Logf("boot %d:\n  %s", n, strings.Join(said, "\n  "))
	all := "\n" + strings.Join(said, "\n") + "\n"
	wants := []string{"\nmounted ext4 after ", "\nactive rnbd-server.service active\n", "\nactive rnbd-client.service active\n", "\nactive rnbd-server.socket active\n",
		"\nactive rnbd-client.socket active\n", "\nactive rnbd-client-nbd.socket active\n", "\nfailed\n", "\nwrote\n",
		"\nservice rnbd-server NRestarts=0 Type=notify WatchdogUSec=30s\n", "\nservice rnbd-client NRestarts=0 Type=notify WatchdogUSec=30s\n"}
	if n > 1 {
		wants = append(wants, "\ndata kept\n")
	}
	switch n {
	case 1:
		wants = append(wants, "\nupgraded\n", "\nversion rnbd "+second+"\n")
	case 2:
		wants = append(wants, "\nrestarted 1\n")
	case 5:
		wants = append(wants, "\nkilled\n")
	case 6:
		wants = append(wants, "\npurged\n", "\nleft\n")
	}
	for _, want := range wants {
		if !strings.Contains(all, want) {
			g.t.Errorf("boot %d does not say %q", n, strings.TrimSpace(want))
		}
	}
	for _, never := range []string{"\njournal ", "\nnever"} {
		if strings.Contains(all, never) {
			g.t.Errorf("boot %d says %q", n, strings.TrimSpace(never))
		}
	}
}
