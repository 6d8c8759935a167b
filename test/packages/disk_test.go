package packages

import (
	_ "embed"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/test/kernelvm/kernel"
	"github.com/rnbd-go/rnbd/test/kernelvm/vm"
)

// proof runs in the guest after each boot.
//
//go:embed testdata/proof.sh
var proof string

// guestFiles are the files that the administrator of the guest has written.
func guestFiles() map[string]string {
	return map[string]string{
		"/etc/hostname": "guest\n",
		"/etc/fstab": "/dev/vda / ext4 defaults 0 1\n" +
			"/dev/rnbd/s1/data.img /data ext4 _netdev,nofail,x-systemd.device-timeout=600s,x-systemd.mount-timeout=600s 0 2\n",
		"/etc/rnbd/client.d/data.yaml":      "mappings:\n  - {device: data.img, server: [127.0.0.1], session: s1}\n",
		"/etc/rnbd/client.d/strict.yaml":    "confine: strict\n",
		"/etc/rnbd/server.d/strict.yaml":    "confine: strict\n",
		"/root/plan":                        strings.Join(plan(), "\n") + "\n",
		"/root/version":                     second,
		"/root/proof":                       proof,
		"/etc/systemd/system/proof.service": "[Unit]\nAfter=multi-user.target\n[Service]\nExecStart=/root/proof\n[Install]\nWantedBy=graphical.target\n",
	}
}

// idle are units that the guest has no use for.
const idle = "getty.target getty-static.service apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer"

// guestModules are those that the guest's own programs load.
var guestModules = []string{"ublk_drv", "nbd", "fuse", "ext4", "virtio_blk", "crc32c_generic", "autofs4"}

// guestDisk makes a disk with the packages installed, and returns the folder with
// disk, kernel and initial RAM disk.
func guestDisk(t *testing.T) (dir string) {
	type fetched struct {
		kernel.Kernel
		error
	}
	fetch := make(chan fetched, 1)
	go func() {
		k, err := kernel.Prepare()
		fetch <- fetched{k, err}
	}()
	upgrade := first
	if long {
		upgrade = second
	}
	h := newHost(t, prepare(t, bootRoot, first, upgrade), upgrade)
	h.run(install + "/mnt/first/*.deb")
	for name, text := range guestFiles() {
		if err := os.WriteFile(h.path(name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	h.run("mkdir -p /data /srv/rnbd /root/upgrade /var/log/journal && rm -rf /var/cache/apt/* /var/lib/apt/lists/*")
	if long {
		h.run("cp /mnt/second/*.deb /root/upgrade")
	}
	h.run("truncate -s 64M /srv/rnbd/data.img && mkfs.ext4 -q -F /srv/rnbd/data.img && truncate -s 1M /srv/rnbd/other.img")
	h.run("systemctl enable rnbd-server.service rnbd-client.service proof.service && systemctl set-default graphical.target && systemctl mask " + idle)
	k := <-fetch
	if k.error != nil {
		t.Fatal(k.error)
	}
	giveModules(t, h, k.Kernel)
	dir, err := os.MkdirTemp(temp, "guest-")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(k.Image, filepath.Join(dir, "kernel")); err != nil {
		t.Fatal(err)
	}
	if err := vm.RamDisk(filepath.Join(dir, "initrd"), k.Kernel, "/dev/vda", "virtio_blk", "crc32c_generic", "ext4"); err != nil {
		t.Fatal(err)
	}
	script := `set -e; cd "$0"; umount mnt/first mnt/second dev/* proc run tmp dev 2>/dev/null || true; ! mountpoint -q dev
		rmdir mnt/first mnt/second; mke2fs -q -t ext4 -d . "$1/disk" 2G`
	if out, err := h.outside("sh", "-c", script, h.root, dir); err != nil {
		t.Fatalf("make the disk: %v\n%s", err, out)
	}
	return dir
}

// giveModules copies modules of the kernel, with all that they depend on, to where
// the guest's modprobe finds them.
func giveModules(t *testing.T, h *host, k kernel.Kernel) {
	t.Helper()
	const script = `set -e; release="$1" from="$2" to="$3"; shift 3
		mkdir -p "$to/lib/modules/$release"
		cd "$from/$release" && cp modules.builtin* modules.order "$to/lib/modules/$release"
		modprobe -C /dev/null -S "$release" -d "$from/../.." --show-depends -a "$@" | awk '/^insmod/ { print $2 }' | sort -u | while read -r file; do
			file=$(realpath "$file"); cp --parents "${file#$(realpath .)/}" "$to/lib/modules/$release"
		done
		depmod -b "$to" "$release"`
	args := append([]string{"-c", script, "sh", k.Release, k.Modules, h.path("/")}, guestModules...)
	if out, err := exec.Command("sh", args...).CombinedOutput(); err != nil {
		t.Fatalf("modules for the guest: %v\n%s", err, out)
	}
}
