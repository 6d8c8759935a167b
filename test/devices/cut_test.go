package devices

import (
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/test/faults"
)

// cutTarget is a way from writers to a medium.
type cutTarget struct {
	name  string
	size  int  // of the medium
	image bool // the server has an ext4 on the medium, and exports an image there
	file  bool // the client has an ext4 on the disk, and writes a file there
	short outages
	long  outages
}

// outages are times with power; each has some moments at which the power may
// go, and at the last one it does.
type outages struct{ n, cuts int }

var cutTargets = []cutTarget{
	{name: "block device", size: cutSize, short: outages{1, 3}, long: outages{7, 20}},
	{name: "image on ext4", size: 4 * cutSize, image: true, short: outages{1, 2}, long: outages{5, 6}},
	{name: "ext4 on the disk", size: 4 * cutSize, file: true, long: outages{5, 6}},
}

const (
	cutBlock  = 4096
	cutBlocks = 2048
	cutSize   = cutBlock * cutBlocks
	cutWindow = 64 // blocks that are written in one time with power
)

// testPowerCuts takes the power from the server's disk in the middle of writes
// and looks at the disk afterwards: with the tools of a host that starts again,
// and after the last cut of a series with a server that does so and the client
// that has waited. Every write that a flush or FUA has acknowledged must be
// there, and no block may be torn.
func testPowerCuts(t *testing.T, s *stack) {
	for _, target := range cutTargets {
		t.Run(target.name, func(t *testing.T) {
			o := pick(target.short, target.long)
			if o.n == 0 {
				t.Skip("long form")
			}
			r := newCutRig(t, s, target)
			for i := range o.n {
				r.outage(i%(cutBlocks/cutWindow)*cutWindow, o.cuts)
				if t.Failed() {
					t.Fatalf("in outage %d", i+1)
				}
			}
			r.check(r.written(), 0, r.acknowledged(0, cutBlocks))
			t.Logf("%d cuts, the server died in %d: %d writes were acknowledged as durable, %d others were lost",
				r.medium.cuts, o.n, r.durable, r.lost)
			if r.lost == 0 && o.n > 1 {
				t.Error("no cut has taken anything away: they are none")
			}
		})
	}
}

// cutRig is a mapped disk. The server's disk can lose its power.
type cutRig struct {
	cutTarget
	t         *testing.T
	s         *stack
	medium    *medium
	history   *faults.History
	device    string // of the client
	node      string
	serverDir string // where the server's file system is mounted
	clientDir string
	durable   int // writes that were acknowledged as such
	lost      int // writes that were acknowledged, and taken away by a cut
}

func newCutRig(t *testing.T, s *stack, target cutTarget) *cutRig {
	t.Helper()
	r := &cutRig{cutTarget: target, t: t, s: s, serverDir: t.TempDir(), clientDir: t.TempDir(),
		medium: newMedium(t, target.size), history: faults.NewHistory(cutBlocks, cutBlock, rand.Uint64())}
	if r.image {
		r.medium.mkfs("mkfs.ext4", "-q", "-F", "-b", "4096", "-J", "size=4")
	}
	r.medium.powerOn()
	t.Cleanup(func() { takeAway(t, r.serverDir, func() bool { return mounted(r.serverDir) }, "umount", r.serverDir) })
	if r.image {
		mountExt4(t, mediumNode, r.serverDir)
		f, err := os.Create(r.exported())
		must(t, err)
		must(t, f.Truncate(cutSize))
		must(t, f.Sync())
		must(t, f.Close())
	}
	d, node := s.disk(t, r.exported())
	r.device, r.node = d.Name, node
	if r.file {
		run(t, "mkfs.ext4", "-q", "-F", "-J", "size=4", node)
		t.Cleanup(func() { takeAway(t, r.clientDir, func() bool { return mounted(r.clientDir) }, "umount", r.clientDir) })
		mountExt4(t, node, r.clientDir)
		run(t, "dd", "if=/dev/zero", "of="+r.written(), "bs=1M", "count=8", "conv=fsync") // so that to overwrite it is to write with FUA alone
	}
	return r
}

// exported is the export of the server, written the path of the writers, and
// left the place of that on the disk after a cut.
func (r *cutRig) exported() string {
	if r.image {
		return filepath.Join(r.serverDir, "image")
	}
	return mediumNode
}

func (r *cutRig) written() string {
	if r.file {
		return filepath.Join(r.clientDir, "file")
	}
	return r.node
}

func (r *cutRig) left() string {
	switch {
	case r.image:
		return filepath.Join(r.serverDir, "image")
	case r.file:
		return filepath.Join(r.serverDir, "file")
	}
	return r.medium.disk
}

// mountExt4 replays the journal, checks, and mounts.
func mountExt4(t *testing.T, node, dir string) {
	t.Helper()
	_, err := attempt("e2fsck", "-f", "-p", node)
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == 1 { // it has replayed the journal
		err = nil
	}
	must(t, err)
	run(t, "mount", node, dir)
}

// moment is a possible moment of the power cut.
type moment struct {
	mark         string
	acknowledged []faults.Stamp // as durable before it, of the window
}

// outage writes, with moments in it, takes the power away, looks at the disk
// after each, and starts the server again on the disk after the last.
func (r *cutRig) outage(first, moments int) {
	r.t.Helper()
	w := r.write(first)
	var cuts []moment
	for i := range moments {
		w.await(1 + rand.Int64N(40))
		if i == moments-1 {
			w.close()
		}
		acknowledged := r.acknowledged(first, cutWindow)
		cuts = append(cuts, moment{r.medium.cut(), acknowledged})
	}
	must(r.t, r.s.server.Kill())
	w.wait()
	if r.file {
		unmount(r.t, r.clientDir)
	}
	if r.image {
		unmount(r.t, r.serverDir)
	}
	r.medium.powerOff()
	for _, c := range cuts {
		r.medium.revert(c.mark)
		r.checkLeft(first, c)
	}
	r.restart(cuts[moments-1].mark)
	r.check(r.written(), first, cuts[moments-1].acknowledged)
	r.durable += int(w.durable)
	for b, stamp := range w.last {
		if stamp > r.history.Reading(first+b) {
			r.lost++
		}
	}
}

// checkLeft looks at the disk after a cut, as a host that starts again does.
func (r *cutRig) checkLeft(first int, c moment) {
	r.t.Helper()
	if r.image || r.file {
		mountExt4(r.t, r.medium.disk, r.serverDir)
		defer unmount(r.t, r.serverDir)
	}
	r.check(r.left(), first, c.acknowledged)
}

// restart starts the server on the disk after a cut, and waits for the client.
func (r *cutRig) restart(mark string) {
	r.t.Helper()
	r.medium.revert(mark)
	r.medium.powerOn()
	if r.image {
		mountExt4(r.t, mediumNode, r.serverDir)
	}
	must(r.t, r.s.server.Start())
	eventually(r.t, "the device is open", func() bool { d, err := r.s.client.Device(r.device); return err == nil && d.State == "open" })
	if r.file {
		mountExt4(r.t, r.node, r.clientDir)
	}
}

// acknowledged returns the oldest allowed contents of blocks.
func (r *cutRig) acknowledged(first, n int) []faults.Stamp {
	stamps := make([]faults.Stamp, n)
	for b := range stamps {
		stamps[b] = r.history.Reading(first + b)
	}
	return stamps
}

// check reads blocks of path from first on. They must not be older than
// acknowledged.
func (r *cutRig) check(path string, first int, acknowledged []faults.Stamp) {
	r.t.Helper()
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_DIRECT, 0)
	must(r.t, err)
	defer f.Close()
	buf := pages(len(acknowledged))
	defer unix.Munmap(buf)
	_, err = f.ReadAt(buf, int64(first)*cutBlock)
	must(r.t, err)
	for b, since := range acknowledged {
		if err := r.history.Check(first+b, since, buf[b*cutBlock:(b+1)*cutBlock]); err != nil {
			r.t.Errorf("%s: %v", path, err)
		}
	}
}
