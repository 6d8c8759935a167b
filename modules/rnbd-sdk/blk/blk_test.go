package blk

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"syscall"
	"testing"
	"testing/quick"
)

// disk is a device of 1 MiB with blocks of 4 KiB that can do everything.
func disk(change func(*Limits)) *Limits {
	l := &Limits{
		Size: 1 << 20, LogicalBlockSize: 4096, MaxIOSize: 128 << 10,
		MaxDiscard: 1 << 20, MaxWriteZeroes: 1 << 20, SecureErase: true,
	}
	if change != nil {
		change(l)
	}
	return l
}

func TestCheck(t *testing.T) {
	tests := []struct {
		name   string
		limits *Limits
		op     Op
		off, n uint64
		want   Errno
	}{
		{"a read of one block", disk(nil), Read, 4096, 4096, OK},
		{"the last block", disk(nil), Write, 1<<20 - 4096, 4096, OK},
		{"the largest transfer", disk(nil), Write, 0, 128 << 10, OK},
		{"more than the largest transfer", disk(nil), Read, 0, 132 << 10, EINVAL},
		{"no largest transfer", disk(func(l *Limits) { l.MaxIOSize = 0 }), Read, 0, 1 << 20, OK},
		{"over the end", disk(nil), Read, 1<<20 - 4096, 8192, EIO},
		{"behind the end", disk(nil), Write, 1 << 20, 4096, EIO},
		{"far behind the end", disk(nil), Write, 1 << 63, 4096, EIO},
		{"a range that wraps", disk(nil), Discard, math.MaxUint64 - 4095, 8192, EIO},
		{"larger than the device", disk(func(l *Limits) { l.Size = 4096 }), Read, 0, 8192, EIO},
		{"an empty device", disk(func(l *Limits) { l.Size = 0 }), Read, 0, 4096, EIO},
		{"half a block", disk(nil), Read, 0, 512, EINVAL},
		{"between blocks", disk(nil), Write, 512, 4096, EINVAL},
		{"small blocks", disk(func(l *Limits) { l.LogicalBlockSize = 512 }), Write, 512, 512, OK},
		{"nothing", disk(nil), Read, 0, 0, EINVAL},
		{"a flush has no range", disk(nil), Flush, 1, math.MaxUint64, OK},
		{"a flush of a read-only device", disk(func(l *Limits) { l.ReadOnly = true }), Flush, 0, 0, OK},
		{"a read of a read-only device", disk(func(l *Limits) { l.ReadOnly = true }), Read, 0, 4096, OK},
		{"a write to a read-only device", disk(func(l *Limits) { l.ReadOnly = true }), Write, 0, 4096, EROFS},
		{"a discard on a read-only device", disk(func(l *Limits) { l.ReadOnly = true }), Discard, 0, 4096, EROFS},
		{"a large discard", disk(nil), Discard, 0, 1 << 20, OK},
		{"discard without support", disk(func(l *Limits) { l.MaxDiscard = 0 }), Discard, 0, 4096, EOPNOTSUPP},
		{"large write zeroes", disk(nil), WriteZeroes, 0, 1 << 20, OK},
		{"write zeroes without support", disk(func(l *Limits) { l.MaxWriteZeroes = 0 }), WriteZeroes, 0, 4096, EOPNOTSUPP},
		{"secure erase", disk(nil), SecureErase, 0, 4096, OK},
		{"secure erase without support", disk(func(l *Limits) { l.SecureErase = false }), SecureErase, 0, 4096, EOPNOTSUPP},
		{"an unknown operation", disk(nil), opCount, 0, 4096, EOPNOTSUPP},
		{"the last operation number", disk(nil), 255, 0, 4096, EOPNOTSUPP},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := tt.limits.Check(tt.op, tt.off, tt.n); got != tt.want {
				t.Errorf("Check(%v, %d, %d) = %v, want %v", tt.op, tt.off, tt.n, got, tt.want)
			}
		})
	}
}

// A range that passes Check lies on the device.
func TestCheck_PassedRangesAreInside(t *testing.T) {
	l := disk(nil)
	inside := func(op uint8, off, n uint64, near bool) bool {
		if near { // half of the tries come close to the device
			off, n = off%(2<<20)&^4095, n%(2<<20)&^4095
		}
		if o := Op(op % 8); o == Flush || l.Check(o, off, n) != OK {
			return true
		}
		return n > 0 && off < l.Size && n <= l.Size-off && off%4096 == 0 && n%4096 == 0
	}
	if err := quick.Check(inside, &quick.Config{MaxCount: 20000}); err != nil {
		t.Error(err)
	}
}

func TestOps(t *testing.T) {
	tests := []struct {
		op                       Op
		name                     string
		valid, hasData, modifies bool
	}{
		{0, "read", true, true, false},
		{1, "write", true, true, true},
		{2, "flush", true, false, false},
		{3, "discard", true, false, true},
		{4, "secure-erase", true, false, true},
		{5, "write-zeroes", true, false, true},
		{6, "invalid", false, false, false},
		{255, "invalid", false, false, false},
	}
	for _, tt := range tests {
		if got := tt.op.String(); got != tt.name {
			t.Errorf("operation %d is called %q, want %q", uint8(tt.op), got, tt.name)
		}
		if tt.op.Valid() != tt.valid || tt.op.HasData() != tt.hasData || tt.op.Modifies() != tt.modifies {
			t.Errorf("%s: valid %v, data %v, modifies %v", tt.name, tt.op.Valid(), tt.op.HasData(), tt.op.Modifies())
		}
	}
}

func TestAccessModes(t *testing.T) {
	for mode, name := range map[AccessMode]string{0: "ro", 1: "rw", 2: "migration"} {
		if mode.String() != name {
			t.Errorf("mode %d is called %q, want %q", uint8(mode), mode, name)
		}
		if got, ok := ParseAccessMode(name); !ok || got != mode {
			t.Errorf("ParseAccessMode(%q) = %d, %v", name, uint8(got), ok)
		}
	}
	for _, name := range []string{"", "RW", "invalid", "rw "} {
		if got, ok := ParseAccessMode(name); ok {
			t.Errorf("ParseAccessMode(%q) = %d", name, uint8(got))
		}
	}
	if got := AccessMode(3).String(); got != "invalid" {
		t.Errorf("mode 3 is called %q", got)
	}
}

func TestToErrno(t *testing.T) {
	_, notThere := os.Open("/nonexistent")
	tests := []struct {
		name string
		err  error
		want Errno
	}{
		{"no error", nil, OK},
		{"an errno of this package", EBUSY, EBUSY},
		{"an errno of the system", syscall.ENOSPC, ENOSPC},
		{"a wrapped one", fmt.Errorf("open: %w", syscall.EPERM), EPERM},
		{"one wrapped twice", fmt.Errorf("a: %w", fmt.Errorf("b: %w", ENXIO)), ENXIO},
		{"one of a file operation", notThere, ENOENT},
		{"one behind another error", fmt.Errorf("%w: %w", fs.ErrInvalid, syscall.EROFS), EROFS},
		{"one of several", errors.Join(errors.New("first"), EINVAL), EINVAL},
		{"an error without errno", errors.New("lost"), EIO},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := ToErrno(tt.err); got != tt.want {
				t.Errorf("ToErrno(%v) = %d, want %d", tt.err, got, tt.want)
			}
		})
	}
}

func TestErrno(t *testing.T) {
	if OK.Err() != nil {
		t.Error("success is an error")
	}
	if err := ENOTCONN.Err(); !errors.Is(err, syscall.ENOTCONN) || ToErrno(err) != ENOTCONN {
		t.Errorf("ENOTCONN.Err() = %v", err)
	}
	if got, want := EIO.Error(), syscall.EIO.Error(); got != want {
		t.Errorf("EIO is %q, want %q", got, want)
	}
}

// The RNBD wire has nine bits for an errno.
func TestErrnosFitTheWire(t *testing.T) {
	for _, e := range []Errno{EPERM, ENOENT, EIO, ENXIO, EAGAIN, ENOMEM, EACCES, ENOTBLK, EBUSY, EEXIST, ENODEV, EINVAL,
		ENOSPC, EROFS, EOPNOTSUPP, ENOTCONN, ETIMEDOUT, ECANCELED, EMSGSIZE, ECONNABORTED, ECONNRESET} {
		if e >= 1<<9 {
			t.Errorf("errno %d has more than nine bits", e)
		}
	}
}
