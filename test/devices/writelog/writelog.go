// Package writelog reads the log of the device-mapper target log-writes: the
// contents of a disk with a volatile cache after a loss of power.
//
// The target logs a write when nothing can take it away any more: when a flush
// that began after the write had ended has ended itself, or, with FUA, when it
// has ended. So the log up to any entry, applied to the contents of the disk
// before, is the worst result of a loss of power then. Marks, put into the log
// by hand, name such places:
//
//	dmsetup create cut --table "0 65536 log-writes /dev/ram2 /dev/ram3"
//	dmsetup message cut 0 mark here
//
// The format is described in Linux, Documentation/admin-guide/device-mapper/log-writes.rst.
package writelog

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
)

const (
	magic   = 0x6a736677736872
	version = 1

	flagDiscard = 1 << 2
	flagMark    = 1 << 3
)

// super begins the log.
type super struct {
	Magic, Version, Entries uint64
	SectorSize              uint32
}

// entry has a sector of the log of its own, with the text of a mark behind it.
// The data of a write follows in the next ones.
type entry struct {
	Sector, Sectors, Flags, TextLen uint64
}

var entrySize = int64(binary.Size(entry{}))

// Replay applies the log to disk, up to the mark, and returns how many writes
// that were.
func Replay(log io.ReaderAt, mark string, disk []byte) (writes int, err error) {
	var s super
	if err := readAt(log, 0, &s); err != nil {
		return 0, fmt.Errorf("log: %w", err)
	}
	if s.Magic != magic || s.Version != version || s.SectorSize < uint32(entrySize) {
		return 0, fmt.Errorf("this is no log of writes: magic %#x, version %d, sectors of %d bytes", s.Magic, s.Version, s.SectorSize)
	}
	sector := int64(s.SectorSize)
	at := sector
	for i := range s.Entries {
		var e entry
		if err := readAt(log, at, &e); err != nil {
			return writes, fmt.Errorf("log, entry %d: %w", i, err)
		}
		if e.Flags&flagMark != 0 {
			text := make([]byte, min(e.TextLen, uint64(sector-entrySize)))
			if _, err := log.ReadAt(text, at+entrySize); err != nil {
				return writes, fmt.Errorf("log, entry %d: %w", i, err)
			}
			if string(bytes.TrimRight(text, "\x00")) == mark {
				return writes, nil
			}
		}
		at += sector
		if e.Flags&flagDiscard != 0 || e.Sectors == 0 { // discarded data may be there as well
			continue
		}
		if all := uint64(len(disk)) / uint64(sector); e.Sectors > all || e.Sector > all-e.Sectors {
			return writes, fmt.Errorf("log, entry %d: a write of %d sectors at %d, the disk has %d", i, e.Sectors, e.Sector, all)
		}
		from, size := int64(e.Sector)*sector, int64(e.Sectors)*sector
		if _, err := log.ReadAt(disk[from:from+size], at); err != nil {
			return writes, fmt.Errorf("log, data of entry %d: %w", i, err)
		}
		at += size
		writes++
	}
	return writes, fmt.Errorf("the log has no mark %q among %d entries", mark, s.Entries)
}

// readAt reads a structure, little-endian.
func readAt(r io.ReaderAt, at int64, v any) error {
	buf := make([]byte, binary.Size(v))
	if _, err := r.ReadAt(buf, at); err != nil {
		return err
	}
	_, err := binary.Decode(buf, binary.LittleEndian, v)
	return err
}
