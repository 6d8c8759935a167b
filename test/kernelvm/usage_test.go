package kernelvm

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

// seconds is how long a test may go on: short usually, long in the long form.
func seconds(short, long int) int {
	if os.Getenv("RNBD_LONG") != "" {
		return long
	}
	return short
}

// A file system on the kernel's block device, served by us.
func TestFilesystemOnKernelClient(t *testing.T) {
	for _, col := range columns {
		t.Run(col.fabric, func(t *testing.T) {
			b := cell{column: col, from: kernel, to: ours, invalidate: true}.set(t)
			filesystem(t, b)
		})
	}
}

func filesystem(t *testing.T, b *bench) {
	d := b.mapDisk(t, "rw", fast)
	out := b.g.Run(t, "sh", "-euc", `
		mkfs.ext4 -q -F "$1"
		mkdir -p /mnt/fs && mount -o discard "$1" /mnt/fs
		cp -r "$2"/test/kernelvm /mnt/fs/tree
		dd if=/dev/urandom of=/mnt/fs/random bs=64k count=64 conv=fsync status=none
		sha256sum /mnt/fs/random > /tmp/sum
		umount /mnt/fs
		fsck.ext4 -f -n "$1"
		mount "$1" /mnt/fs
		sha256sum -c /tmp/sum
		diff -r "$2"/test/kernelvm /mnt/fs/tree
		rm /mnt/fs/random && fstrim /mnt/fs
		umount /mnt/fs
		fsck.ext4 -f -n "$1"`, "sh", d.path, repositoryRoot())
	if !strings.Contains(out, "random: OK") {
		t.Errorf("output:\n%s", out)
	}
	b.unmap(t, d)
}

// fio writes and verifies, many requests at a time.
func TestFioVerify(t *testing.T) {
	for _, col := range columns {
		for _, pair := range [][2]side{{kernel, ours}, {ours, kernel}} {
			c := cell{column: col, from: pair[0], to: pair[1], invalidate: true}
			t.Run(c.String(), func(t *testing.T) {
				b := c.set(t)
				fioVerify(t, b)
			})
		}
	}
}

func fioVerify(t *testing.T, b *bench) {
	d := b.mapDisk(t, "rw", 0, fast)
	var out string
	err := b.repeat(t, d, func() (err error) {
		out, err = b.c.Fio(timeout(t, 3*time.Minute), d, "--rw=randrw", "--bsrange=4k-128k", "--iodepth=32", "--size=16m",
			"--verify=crc32c", "--verify_fatal=1", "--verify_backlog=64", "--do_verify=1",
			"--time_based", fmt.Sprintf("--runtime=%d", seconds(10, 60)))
		return err
	})
	if err != nil {
		t.Errorf("fio: %v\n%s", err, out)
	}
	b.unmap(t, d)
}
