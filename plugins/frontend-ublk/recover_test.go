package main

import (
	"context"
	"errors"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// leftDisk is a device that an earlier process has left in the driver, and the
// next one's spec of it.
func leftDisk(t *testing.T) (*fakeDisk, *frontend, *plugin.DeviceSpec) {
	disk, f, _ := newFakeDisk(t, 0, quiet())
	f.queues = []*queue{{}}
	disk.owner, disk.state = identityToken("id"), stateQuiesced
	return disk, f, &plugin.DeviceSpec{
		Name: "x", Limits: limits(), Slots: 4, SlotSize: 64 << 10, Queues: 1,
		Identity: "id", Location: "/dev/ublkb5", Config: map[string]string{"number": "5"},
	}
}

// Another disk is made only where the driver says that there is none of ours.
// Whatever else keeps it from telling, the disk of before may be mounted, and its
// requests wait for whoever asks again.
func TestRecover_WhatIsGone(t *testing.T) {
	for _, v := range []struct {
		name   string
		change func(*fakeDisk)
		gone   bool
	}{
		{"no such device", func(f *fakeDisk) { f.refuse[cmdGetDevInfo] = unix.ENODEV }, true},
		{"no such device, by an old driver", func(f *fakeDisk) { f.old, f.refuse[cmdGetDevInfo] = true, unix.EINVAL }, true},
		{"somebody else's", func(f *fakeDisk) { f.owner = identityToken("other") }, true},
		{"stopped", func(f *fakeDisk) { f.state = stateDead }, true},
		{"a command that is not understood", func(f *fakeDisk) { f.refuse[cmdGetDevInfo] = unix.EINVAL }, false},
		{"a driver that is late", func(f *fakeDisk) { f.refuse[cmdGetDevInfo] = errLate }, false},
		{"interrupted", func(f *fakeDisk) { f.refuse[cmdGetDevInfo] = unix.EINTR }, false},
		{"no memory", func(f *fakeDisk) { f.refuse[cmdGetDevInfo] = unix.ENOMEM }, false},
		{"no descriptor", func(f *fakeDisk) { f.refuse[cmdGetDevInfo] = unix.EMFILE }, false},
		{"no permission", func(f *fakeDisk) { f.refuse[cmdGetDevInfo] = unix.EPERM }, false},
		{"no access", func(f *fakeDisk) { f.refuse[cmdGetDevInfo] = unix.EACCES }, false},
		{"an I/O error", func(f *fakeDisk) { f.refuse[cmdGetDevInfo] = unix.EIO }, false},
		{"a recovery that does not begin", func(f *fakeDisk) { f.refuse[cmdStartUserRecovery] = errLate }, false},
		{"a server that seems to live", func(f *fakeDisk) { f.refuse[cmdStartUserRecovery] = unix.EBUSY }, false},
	} {
		t.Run(v.name, func(t *testing.T) {
			disk, f, s := leftDisk(t)
			v.change(disk)
			before := disk.state
			f.ctl.encoded = !disk.old
			ctx, cancel := context.WithTimeout(t.Context(), time.Second) // the fake makes no node
			defer cancel()
			_, taken, err := f.makeDevice(ctx, s)
			if err == nil || taken {
				t.Fatalf("taken over without a node: %t, %v", taken, err)
			}
			if made := slices.Contains(disk.sent, cmdAddDev); made != v.gone {
				t.Errorf("another disk is made: %t, want %t (%v)", made, v.gone, err)
			}
			if !v.gone && (errors.Is(err, errGone) || errors.Is(err, errStuck) || disk.state != before) {
				t.Errorf("got %v, the disk is %s", err, stateName(disk.state))
			}
			var errno syscall.Errno
			if cause := disk.refuse[cmdGetDevInfo]; !v.gone && errors.As(cause, &errno) && !errors.Is(err, cause) {
				t.Errorf("got %v without its cause %v", err, cause)
			}
		})
	}
}

// A disk that has to be looked for is found by its mark, and none is made.
func TestRecover_LookedFor(t *testing.T) {
	for owner, there := range map[string]bool{"id": true, "other": false} {
		disk, f, s := leftDisk(t)
		disk.owner = identityToken(owner)
		disk.refuse[cmdStartUserRecovery] = unix.EIO // as far as the fake goes
		f.ctl.devices = func() []uint32 { return []uint32{fakeID} }
		s.Location = plugin.LocationUnknown
		_, _, err := f.makeDevice(t.Context(), s)
		want := blk.ENODEV
		if there {
			want = blk.EIO
		}
		if blk.ToErrno(err) != want || slices.Contains(disk.sent, cmdAddDev) {
			t.Errorf("of %q: got %v, sent %#x", owner, err, disk.sent)
		}
	}
}

// A take-over that fails leaves nothing open that would keep the next try out:
// the driver lets the character device be opened once.
func TestRecover_ClosesWhatItHasOpened(t *testing.T) {
	disk, f, s := leftDisk(t)
	disk.refuse[cmdStartUserRecovery] = unix.EIO
	d := newDevice(f.ctl, s, quiet())
	var err error
	if d.char, err = os.Open(os.DevNull); err != nil {
		t.Fatal(err)
	}
	if err := d.takeOver(t.Context(), s, f.queues); !errors.Is(err, unix.EIO) {
		t.Fatalf("got %v", err)
	}
	if d.char != nil {
		t.Error("the character device is open")
	}
}

// A disk that somebody else has deleted is gone: its node is, and the driver does
// not know it. One that has lost only its node may be in use.
func TestRemoveDevice_WithoutANode(t *testing.T) {
	for _, v := range []struct {
		name   string
		change func(*fakeDisk)
		force  bool
		want   blk.Errno
	}{
		{"the driver does not know it", func(f *fakeDisk) { f.refuse[cmdGetDevInfo] = unix.ENODEV }, false, blk.OK},
		{"the driver has stopped it", func(f *fakeDisk) { f.state = stateDead }, false, blk.OK},
		{"the driver serves it", func(f *fakeDisk) { f.state = stateLive }, false, blk.EBUSY},
		{"the driver serves it, by force", func(f *fakeDisk) { f.state = stateLive }, true, blk.OK},
		{"the driver does not answer", func(f *fakeDisk) { f.refuse[cmdGetDevInfo] = errLate }, false, blk.EBUSY},
	} {
		t.Run(v.name, func(t *testing.T) {
			disk, f, s := leftDisk(t)
			v.change(disk)
			f.ctl.encoded = true
			d := newDevice(f.ctl, s, quiet())
			d.info.id = 5
			f.devices[s.Index] = d
			if err := f.RemoveDevice(t.Context(), s.Index, v.force); err != nil && blk.ToErrno(err) != v.want || (err == nil) != (v.want == blk.OK) {
				t.Errorf("got %v, want %v", err, v.want)
			}
			if f.deviceAt(s.Index) == nil != (v.want == blk.OK) {
				t.Errorf("the device is there: %t", f.deviceAt(s.Index) != nil)
			}
		})
	}
}
