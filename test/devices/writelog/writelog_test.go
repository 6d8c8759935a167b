package writelog

import (
	"bytes"
	"encoding/binary"
	"strings"
	"testing"
)

const sector = 512

// logOf lays a log out as the kernel does.
func logOf(entries ...any) []byte {
	var b bytes.Buffer
	sectors := func(parts ...any) {
		from := b.Len()
		for _, p := range parts {
			binary.Write(&b, binary.LittleEndian, p)
		}
		b.Write(make([]byte, from+sector-b.Len()))
	}
	n := uint64(0)
	for _, e := range entries {
		if _, ok := e.(entry); ok {
			n++
		}
	}
	sectors(super{magic, version, n, sector})
	for i := 0; i < len(entries); i++ {
		switch e := entries[i].(type) {
		case entry:
			if e.TextLen > 0 {
				i++
				sectors(e, []byte(entries[i].(string)))
			} else {
				sectors(e)
			}
		case byte: // a sector of data
			b.Write(bytes.Repeat([]byte{e}, sector))
		}
	}
	return b.Bytes()
}

func write(at, sectors uint64) entry { return entry{Sector: at, Sectors: sectors} }
func mark(text string) []any {
	return []any{entry{Flags: flagMark, TextLen: uint64(len(text))}, text}
}

func TestReplay(t *testing.T) {
	entries := []any{write(0, 1), byte(1), write(2, 2), byte(2), byte(3), entry{Flags: 1}}
	entries = append(entries, mark("first")...)
	entries = append(entries, write(0, 1), byte(4), entry{Sector: 2, Sectors: 2, Flags: flagDiscard}, write(3, 1), byte(5))
	entries = append(entries, mark("second")...)
	log := logOf(entries...)
	for _, c := range []struct {
		name   string
		mark   string
		disk   string // the first byte of each sector
		writes int
		words  string
	}{
		{"what is before the mark, in order", "first", "\x01\x00\x02\x03", 2, ""},
		{"a later write is the one that counts, a discard takes nothing", "second", "\x04\x00\x02\x05", 4, ""},
		{"a mark that is not there", "third", "\x04\x00\x02\x05", 4, `no mark "third"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			disk := make([]byte, 4*sector)
			writes, err := Replay(bytes.NewReader(log), c.mark, disk)
			if c.words == "" && err != nil || c.words != "" && (err == nil || !strings.Contains(err.Error(), c.words)) {
				t.Errorf("error %v, want %q", err, c.words)
			}
			if writes != c.writes {
				t.Errorf("%d writes, want %d", writes, c.writes)
			}
			for i := range 4 {
				if got := disk[i*sector : (i+1)*sector]; !bytes.Equal(got, bytes.Repeat([]byte{c.disk[i]}, sector)) {
					t.Errorf("sector %d begins with %d, want %d", i, got[0], c.disk[i])
				}
			}
		})
	}
}

func TestBadLogs(t *testing.T) {
	for _, c := range []struct {
		name  string
		log   []byte
		words string
	}{
		{"no log", make([]byte, 4*sector), "no log of writes"},
		{"nothing", nil, "EOF"},
		{"a write beyond the disk", logOf(write(4, 1), byte(1)), "the disk has 4"},
		{"a write that is too long", logOf(write(0, 1<<60)), "the disk has 4"},
		{"data that is cut off", logOf(write(0, 2), byte(1)), "data of entry 0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if _, err := Replay(bytes.NewReader(c.log), "x", make([]byte, 4*sector)); err == nil || !strings.Contains(err.Error(), c.words) {
				t.Errorf("error %v, want %q in it", err, c.words)
			}
		})
	}
}
