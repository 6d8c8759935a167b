package main

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// fakeDisk is the driver's control device with one disk.
type fakeDisk struct {
	t        *testing.T
	features uint64
	state    uint16
	size     uint64 // bytes
	refuse   map[uint32]error
	sent     []uint32
	added    uint64 // features that the device was made with
	owner    uint64 // the private word of the device
	old      bool   // a driver before the encoding of commands
}

const fakeID = 5

func (f *fakeDisk) do(cmd uint32, r ctrlRequest) error {
	if r.id != fakeID {
		f.t.Errorf("command %#x is for device %d", cmd, r.id)
	}
	f.sent = append(f.sent, cmd)
	if err := f.refuse[cmd]; err != nil {
		return err
	}
	switch cmd {
	case cmdGetDevInfo:
		(&devInfo{id: fakeID, flags: featUserRecovery, private: f.owner}).encodeInto(r.buf)
		native.PutUint16(r.buf[4:], f.state)
	case cmdGetParams:
		(&ublkParams{sectors: f.size / blk.SectorSize}).encodeInto(r.buf)
	case cmdUpdateSize:
		if f.state != stateLive {
			f.t.Error("the size of a disk that is not there is set: that crashes kernels")
		}
		f.size = r.data * blk.SectorSize
	case cmdAddDev:
		var info devInfo
		info.decodeFrom(r.buf)
		f.added = info.flags
	case cmdStopDev:
		f.state = stateDead
	case cmdSetParams, cmdDelDev:
	default:
		f.t.Errorf("command %#x", cmd)
	}
	return nil
}

const diskSize = 1 << 30

// newFakeDisk is a disk of 1 GiB that a front end serves as device 3.
func newFakeDisk(t *testing.T, features uint64, log *slog.Logger) (*fakeDisk, *frontend, *ublkDevice) {
	disk := &fakeDisk{t: t, features: features, state: stateLive, size: diskSize, refuse: map[uint32]error{}}
	f := newFrontend(quiet)
	f.ctl.do, f.ctl.features, f.ctl.encoded = disk.do, features, true
	l := limits()
	l.LogicalBlockSize = 4096
	d := newDevice(f.ctl, &plugin.DeviceSpec{Index: 3, Name: "x", Limits: l, Arena: make([]byte, 4096)}, log)
	d.info.id = fakeID
	f.devices[3] = d
	return disk, f, d
}

func sized(n uint64) blk.Limits {
	l := limits()
	l.Size = n
	return l
}

func TestResize(t *testing.T) {
	for _, v := range []struct {
		name     string
		features uint64
		state    uint16
		refuse   map[uint32]error
		size     uint64
		want     blk.Errno
		after    uint64
		words    string
	}{
		{"larger", featUpdateSize, stateLive, nil, 2 << 30, blk.OK, 2 << 30, ""},
		{"smaller", featUpdateSize, stateLive, nil, 4096, blk.OK, 4096, ""},
		{"the size that it has, whatever the driver can", 0, stateLive, nil, diskSize, blk.OK, diskSize, ""},
		{"a driver that cannot", 0, stateLive, nil, 2 << 30, blk.EOPNOTSUPP, diskSize, "unmap and map it"},
		{"part of a block", featUpdateSize, stateLive, nil, diskSize + 512, blk.EINVAL, diskSize, "no multiple"},
		{"nothing", featUpdateSize, stateLive, nil, 0, blk.EINVAL, diskSize, "no size"},
		{"a disk that somebody has stopped", featUpdateSize, stateDead, nil, 2 << 30, blk.ENODEV, diskSize, "dead"},
		{"a device that somebody has deleted", featUpdateSize, stateLive, map[uint32]error{cmdGetDevInfo: unix.ENODEV}, 2 << 30, blk.ENODEV, diskSize, "resize /dev/ublkb5"},
		{"a driver that refuses", featUpdateSize, stateLive, map[uint32]error{cmdUpdateSize: unix.EOPNOTSUPP}, 2 << 30, blk.EOPNOTSUPP, diskSize, "refuses"},
	} {
		t.Run(v.name, func(t *testing.T) {
			disk, f, _ := newFakeDisk(t, v.features, quiet())
			disk.state, disk.refuse = v.state, v.refuse
			err := f.ResizeDevice(t.Context(), 3, sized(v.size))
			if (err == nil) != (v.want == blk.OK) || err != nil && (blk.ToErrno(err) != v.want || !strings.Contains(err.Error(), v.words)) {
				t.Errorf("got %v, want %v and %q", err, v.want, v.words)
			}
			if disk.size != v.after {
				t.Errorf("the disk has %d bytes, want %d", disk.size, v.after)
			}
		})
	}
	_, f, _ := newFakeDisk(t, featUpdateSize, quiet())
	if err := f.ResizeDevice(t.Context(), 4, sized(4096)); blk.ToErrno(err) != blk.ENODEV {
		t.Errorf("of a device that is not there: %v", err)
	}
}

// A request that the driver has refused once is made again.
func TestResize_AgainAfterARefusal(t *testing.T) {
	disk, f, _ := newFakeDisk(t, featUpdateSize, quiet())
	disk.refuse[cmdUpdateSize] = unix.EINTR
	if f.ResizeDevice(t.Context(), 3, sized(2<<30)) == nil {
		t.Fatal("the refusal is not told")
	}
	delete(disk.refuse, cmdUpdateSize)
	if err := f.ResizeDevice(t.Context(), 3, sized(2<<30)); err != nil || disk.size != 2<<30 {
		t.Errorf("%d bytes, %v", disk.size, err)
	}
}

// A disk that is being removed may be gone already: its size is left alone.
func TestResize_NotAfterTheStop(t *testing.T) {
	disk, f, _ := newFakeDisk(t, featUpdateSize, quiet())
	disk.refuse[cmdStopDev] = errLate // it may still happen
	if f.RemoveDevice(t.Context(), 3, true) == nil {
		t.Fatal("a stop that does not end succeeds")
	}
	disk.sent = nil
	if err := f.ResizeDevice(t.Context(), 3, sized(2<<30)); blk.ToErrno(err) != blk.ENODEV || len(disk.sent) != 0 {
		t.Errorf("%v, commands %#x", err, disk.sent)
	}
}

// A disk that is taken over gets the size that the server has now, if its
// driver can change it.
func TestAdopt(t *testing.T) {
	for _, v := range []struct {
		name     string
		features uint64
		refuse   map[uint32]error
		server   uint64
		after    uint64
		words    string // of the log
	}{
		{"same size", featUpdateSize, nil, diskSize, diskSize, ""},
		{"grown meanwhile", featUpdateSize, nil, 2 << 30, 2 << 30, "disk resized"},
		{"grown, and the driver cannot", 0, nil, 2 << 30, diskSize, "keeps its size"},
		{"grown, and the driver does not tell the old size", featUpdateSize, map[uint32]error{cmdGetParams: unix.EIO}, 2 << 30, 2 << 30, "does not tell"},
	} {
		t.Run(v.name, func(t *testing.T) {
			var log bytes.Buffer
			disk, f, d := newFakeDisk(t, v.features, slog.New(slog.NewTextHandler(&log, nil)))
			disk.refuse = v.refuse
			d.adoptSize(v.server)
			if disk.size != v.after {
				t.Errorf("the disk has %d bytes, want %d", disk.size, v.after)
			}
			if v.words == "" && log.Len() > 0 || !strings.Contains(log.String(), v.words) {
				t.Errorf("logged %q, want %q", log.String(), v.words)
			}
			if v.features == 0 { // it is told again with every resize, not taken for done
				if err := f.ResizeDevice(t.Context(), 3, sized(v.server)); blk.ToErrno(err) != blk.EOPNOTSUPP {
					t.Errorf("a resize to what the server has: %v", err)
				}
			}
		})
	}
}

// A device is made with the feature where the driver has it.
func TestCreate_AsksForResizing(t *testing.T) {
	for _, offered := range []uint64{0, featUpdateSize, featUpdateSize | 1<<40} {
		disk, _, d := newFakeDisk(t, offered, quiet())
		ctx, cancel := context.WithTimeout(t.Context(), time.Second) // the fake makes no node
		err := d.createDevice(ctx, &plugin.DeviceSpec{Name: "x", Limits: limits(), Slots: 4, SlotSize: 64 << 10, Config: map[string]string{"number": "5"}}, []*queue{nil})
		cancel()
		if err == nil || !strings.Contains(err.Error(), "node does not appear") {
			t.Fatalf("without a node: %v", err)
		}
		if got, want := disk.added&^(featUserRecovery|featUserRecoveryReissue|featIoctlEncode), offered&featUpdateSize; got != want {
			t.Errorf("of %#x the device is made with %#x", offered, got)
		}
	}
}
