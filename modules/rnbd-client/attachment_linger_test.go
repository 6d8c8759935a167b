package client

import (
	"fmt"
	"os"
	"slices"
	"testing"
)

const removedByForce = "remove forced true"

// isGone reports whether the front end has let go of the device at the index.
func (c *Client) isGone(t *testing.T, d *Device) bool {
	t.Helper()
	proc, err := c.frontends[0].process()
	return err == nil && !c.keepsIndex(d.index) && !knows(t.Context(), proc, d)
}

// unmapByForce does it within the time that a stalled machine may take.
func (c *Client) unmapByForce(t *testing.T, d *Device) {
	t.Helper()
	if err := soon(t, "the unmap", async(func() error { return c.Unmap(t.Context(), d.name, true) })); err != nil {
		t.Errorf("unmap: %v", err)
	}
}

// awaitDeath waits until the front end has noticed the end of its process.
func (f *frontend) awaitDeath(t *testing.T) {
	t.Helper()
	eventually(t, "the end is noticed", func() bool { _, err := f.process(); return err != nil })
}

// A disk that is unmapped while its front end is dead is taken away by the next
// process: the kernel has it, and its users wait.
func TestUnmap_ForcedWhileTheFrontEndIsDead(t *testing.T) {
	var gate startGate
	s := newTarget(t, 1<<20)
	c := s.newClient(withTestFront(t), gate.use)
	dir, other := newFrontDir(t), newFrontDir(t)
	d, err := s.mapIn(c, "vol", dir)
	must(t, err)
	_, err = s.mapIn(c, "other", other)
	must(t, err)
	gate.shut()
	c.killFront(t)
	c.frontends[0].awaitDeath(t)
	c.unmapByForce(t, d)
	if len(c.Devices()) != 1 || slices.Contains(dir.told(), removedByForce) {
		t.Errorf("%d devices; the front end was told %q", len(c.Devices()), dir.told())
	}
	if !c.keepsIndex(d.index) {
		t.Error("the index of the disk that is left is free")
	}
	gate.release()
	eventually(t, "the disk is taken away", func() bool { return c.isGone(t, d) })
	if told := dir.told(); told[len(told)-1] != removedByForce {
		t.Errorf("the front end was told %q", told)
	}
	if again, err := s.mapIn(c, "vol", newFrontDir(t)); err != nil || again.index != d.index {
		t.Errorf("the next map: %v", err)
	}
	eventually(t, "the other device is back", func() bool { return other.adds() == 2 })
}

// One that comes back soon takes it away before the unmap ends, or after it.
func TestUnmap_ForcedWhileTheFrontEndRestarts(t *testing.T) {
	_, c, d, dir := mapShown(t)
	c.killFront(t)
	c.unmapByForce(t, d)
	eventually(t, "the disk is taken away", func() bool { return c.isGone(t, d) })
	if told := dir.told(); told[len(told)-1] != removedByForce {
		t.Errorf("the front end was told %q", told)
	}
}

// A disk that is unmapped while a new process is being shown it does not stay there,
// and its memory is the process's until then.
func TestUnmap_WhileANewProcessIsShownTheDisk(t *testing.T) {
	_, c, d, dir := mapShown(t)
	must(t, dir.set("hold", ""))
	c.killFront(t)
	eventually(t, "the new process gets the disk", func() bool { return dir.adds() == 2 })
	c.unmapByForce(t, d)
	if !c.retires(d.index) {
		t.Error("the memory is given back, and a process is being shown it")
	}
	must(t, os.Remove(dir.file("hold")))
	eventually(t, "the disk is taken away", func() bool { return c.isGone(t, d) })
	eventually(t, "the memory is given back", func() bool { return !c.retires(d.index) })
}

// A process that is killed because it does not let go leaves the disk to the next.
func TestUnmap_ForcedAndTheFrontEndDies(t *testing.T) {
	_, c, d, dir := mapShown(t)
	must(t, dir.set("hold-remove", ""))
	c.unmapByForce(t, d)
	if !c.keepsIndex(d.index) {
		t.Error("the index is free, and the front end has the disk")
	}
	c.killFront(t)
	must(t, os.Remove(dir.file("hold-remove")))
	eventually(t, "the disk is taken away", func() bool { return c.isGone(t, d) })
	if told := dir.told(); dir.adds() != 2 || told[len(told)-1] != removedByForce {
		t.Errorf("the front end was told %q", told)
	}
}

// A client that closes while a process of its front end is starting leaves no disk.
func TestClose_WhileAFrontEndRestarts(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.clientToClose(withTestFront(t))
	dirs := []frontDir{newFrontDir(t), newFrontDir(t)}
	for i, dir := range dirs {
		_, err := s.mapIn(c, fmt.Sprint("vol", i), dir)
		must(t, err)
		must(t, dir.set("hold", ""))
	}
	c.killFront(t)
	eventually(t, "the new process gets the disks", func() bool { return dirs[0].adds()+dirs[1].adds() == 4 })
	closed := async(func() error { return c.Close(t.Context()) })
	eventually(t, "the disks are unmapped", func() bool { return len(c.Devices()) == 0 })
	for _, dir := range dirs {
		must(t, os.Remove(dir.file("hold")))
	}
	if err := soon(t, "the close", closed); err != nil {
		t.Errorf("close: %v", err)
	}
	for _, dir := range dirs {
		if told := dir.told(); told[len(told)-1] != removedByForce {
			t.Errorf("the front end was told %q", told)
		}
	}
	for i := range dirs {
		if c.keepsIndex(uint32(i)) {
			t.Errorf("device %d lingers", i)
		}
		eventually(t, "the memory is given back", func() bool { return !c.retires(uint32(i)) })
	}
}

// Nor does a front end that has no process keep it.
func TestClose_WhileADiskLingers(t *testing.T) {
	var gate startGate
	s := newTarget(t, 1<<20)
	c := s.clientToClose(withTestFront(t), gate.use)
	d, err := s.mapIn(c, "vol", newFrontDir(t))
	must(t, err)
	gate.shut()
	c.killFront(t)
	c.frontends[0].awaitDeath(t)
	c.unmapByForce(t, d)
	if err := soon(t, "the close", async(func() error { return c.Close(t.Context()) })); err != nil {
		t.Errorf("close: %v", err)
	}
	if c.keepsIndex(d.index) {
		t.Error("a front end that has ended is waited for")
	}
}
