package devices

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/devices/writelog"
)

// medium is a disk of the server that can lose its power: a RAM disk under the
// device-mapper target log-writes.
//
// A cut has to take away the contents of a volatile cache, and nothing else.
// The target flakey does not: with drop_writes all earlier writes stay, flushed
// or not, and a server that never flushes would pass. log-writes tells the
// writes that flushes and FUA have made durable, in that order; all other
// writes are lost with the cut. No disk may do worse.
//
// One thing it does that no disk does: a write that no flush has covered comes
// into the log behind a later FUA write of the same place. A test must not do
// that.
type medium struct {
	t         *testing.T
	disk, log string
	durable   []byte // without the data that a cut takes away
	cuts      int
}

const (
	mediumName = "rnbd-medium"
	mediumNode = "/dev/mapper/" + mediumName
)

// newMedium makes a blank disk, without power.
func newMedium(t *testing.T, size int) *medium {
	t.Helper()
	run(t, "modprobe", "dm-log-writes")
	t.Setenv("DM_DISABLE_UDEV", "1") // dmsetup has to make the node
	m := &medium{t: t, disk: "/dev/ram2", log: "/dev/ram3", durable: make([]byte, size)}
	m.restore()
	t.Cleanup(func() {
		takeAway(t, mediumNode, func() bool { _, err := os.Lstat(mediumNode); return err == nil }, "dmsetup", "remove", mediumName)
	})
	return m
}

// mkfs prepares the disk with a file system.
func (m *medium) mkfs(argv ...string) {
	m.t.Helper()
	run(m.t, append(argv, m.disk, fmt.Sprintf("%dk", len(m.durable)>>10))...)
	f, err := os.Open(m.disk)
	must(m.t, err)
	defer f.Close()
	_, err = io.ReadFull(f, m.durable)
	must(m.t, err)
}

// restore gives the RAM disk the durable data.
func (m *medium) restore() {
	m.t.Helper()
	f, err := os.OpenFile(m.disk, os.O_WRONLY, 0)
	must(m.t, err)
	defer f.Close()
	_, err = f.Write(m.durable)
	must(m.t, err)
	must(m.t, f.Sync())
}

// powerOn makes mediumNode of the RAM disk.
func (m *medium) powerOn() {
	m.t.Helper()
	// With a UUID it is the same volume after each cut, as a disk is.
	run(m.t, "dmsetup", "create", mediumName, "--uuid", mediumName, "--table", fmt.Sprintf("0 %d log-writes %s %s", len(m.durable)/512, m.disk, m.log))
}

// cut marks a possible moment of the power cut. Users of the disk do not
// notice; after the power is off, revert makes the disk as of then.
func (m *medium) cut() (mark string) {
	m.t.Helper()
	m.cuts++
	mark = fmt.Sprint("cut", m.cuts)
	run(m.t, "dmsetup", "message", mediumName, "0", "mark", mark)
	return mark
}

// powerOff takes the disk away from a server that is dead.
func (m *medium) powerOff() {
	m.t.Helper()
	eventually(m.t, "nobody uses the medium", func() bool { _, err := attempt("dmsetup", "remove", mediumName); return err == nil })
}

// revert makes the disk as it would be after a cut. Cuts of one time with
// power are taken in order.
func (m *medium) revert(mark string) {
	m.t.Helper()
	log, err := os.Open(m.log)
	must(m.t, err)
	defer log.Close()
	_, err = writelog.Replay(log, mark, m.durable)
	must(m.t, err)
	m.restore()
}

// unmount unmounts dir once nobody uses it.
func unmount(t *testing.T, dir string) {
	t.Helper()
	eventually(t, dir+" is unmounted", func() bool {
		_, err := attempt("umount", dir)
		return err == nil || !mounted(dir)
	})
}

func mounted(dir string) bool {
	return strings.Contains(readFile("/proc/mounts"), " "+filepath.Clean(dir)+" ")
}

// takeAway is for the end of a test, since a server may close a disk later than
// its client: it runs a command until what is gone.
func takeAway(t *testing.T, what string, there func() bool, argv ...string) {
	t.Helper()
	var err error
	for end := time.Now().Add(30 * time.Second); there(); time.Sleep(200 * time.Millisecond) {
		if _, err = attempt(argv...); err != nil && time.Now().After(end) {
			t.Errorf("%s is left: %v", what, err)
			return
		}
	}
}
