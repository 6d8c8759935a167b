package shm

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"unsafe"
)

var namedRow = regexp.MustCompile("(?m)^\\| \\d+ \\| \\d+ \\| `")

// The page about the layout agrees with the compiler.
func TestABI_PageIsTrue(t *testing.T) {
	page, err := os.ReadFile("../../../docs/extend/abi/ring-v1.md")
	if err != nil {
		t.Skipf("the page is not beside this module: %v", err) // module downloaded on its own
	}
	var (
		h header
		e SQE
		c CQE
		w words
	)
	sq, cq := unsafe.Offsetof(h.sq), unsafe.Offsetof(h.cq)
	fields := []struct {
		name         string
		offset, size uintptr
	}{
		{"Magic", unsafe.Offsetof(h.Magic), unsafe.Sizeof(h.Magic)},
		{"Version", unsafe.Offsetof(h.Version), unsafe.Sizeof(h.Version)},
		{"Features", unsafe.Offsetof(h.Features), unsafe.Sizeof(h.Features)},
		{"Entries", unsafe.Offsetof(h.Entries), unsafe.Sizeof(h.Entries)},
		{"SQESize", unsafe.Offsetof(h.SQESize), unsafe.Sizeof(h.SQESize)},
		{"CQESize", unsafe.Offsetof(h.CQESize), unsafe.Sizeof(h.CQESize)},
		{"SQOff", unsafe.Offsetof(h.SQOff), unsafe.Sizeof(h.SQOff)},
		{"CQOff", unsafe.Offsetof(h.CQOff), unsafe.Sizeof(h.CQOff)},
		{"sq.Tail", sq + unsafe.Offsetof(w.Tail), unsafe.Sizeof(w.Tail)},
		{"sq.Head", sq + unsafe.Offsetof(w.Head), unsafe.Sizeof(w.Head)},
		{"sq.Wake", sq + unsafe.Offsetof(w.Wake), unsafe.Sizeof(w.Wake)},
		{"cq.Tail", cq + unsafe.Offsetof(w.Tail), unsafe.Sizeof(w.Tail)},
		{"cq.Head", cq + unsafe.Offsetof(w.Head), unsafe.Sizeof(w.Head)},
		{"cq.Wake", cq + unsafe.Offsetof(w.Wake), unsafe.Sizeof(w.Wake)},
		{"Tag", unsafe.Offsetof(e.Tag), unsafe.Sizeof(e.Tag)},
		{"Offset", unsafe.Offsetof(e.Offset), unsafe.Sizeof(e.Offset)},
		{"ArenaOff", unsafe.Offsetof(e.ArenaOff), unsafe.Sizeof(e.ArenaOff)},
		{"Device", unsafe.Offsetof(e.Device), unsafe.Sizeof(e.Device)},
		{"Arena", unsafe.Offsetof(e.Arena), unsafe.Sizeof(e.Arena)},
		{"Len", unsafe.Offsetof(e.Len), unsafe.Sizeof(e.Len)},
		{"Op", unsafe.Offsetof(e.Op), unsafe.Sizeof(e.Op)},
		{"Flags", unsafe.Offsetof(e.Flags), unsafe.Sizeof(e.Flags)},
		{"Prio", unsafe.Offsetof(e.Prio), unsafe.Sizeof(e.Prio)},
		{"Errno", unsafe.Offsetof(c.Errno), unsafe.Sizeof(c.Errno)},
	}
	for _, f := range fields {
		if row := fmt.Sprintf("\n| %d | %d | `%s` |", f.offset, f.size, f.name); !strings.Contains(string(page), row) {
			t.Errorf("the page has no row %q", row)
		}
	}
	if got, want := len(namedRow.FindAll(page, -1)), len(fields)+1; got != want { // Tag is in both entries
		t.Errorf("the page has %d named fields, the code %d", got, want)
	}
	for what, ok := range map[string]bool{
		fmt.Sprintf("%#x", uint64(ringMagic)):        true,
		fmt.Sprintf("`Version` | %d |", ringVersion): true,
		fmt.Sprintf("`SQESize` | %d |", sqeSize):     true,
		fmt.Sprintf("`CQESize` | %d |", cqeSize):     true,
		fmt.Sprintf("`SQOff` | %d |", headerSize):    true,
		fmt.Sprintf("1 to %d |", MaxEntries):         true,
	} {
		if strings.Contains(string(page), what) != ok {
			t.Errorf("the page contains %q: %v, want %v", what, !ok, ok)
		}
	}
	if unsafe.Offsetof(c.Tag) != 0 || ringSize(8) != headerSize+8*64+8*16 {
		t.Error("completions are laid out otherwise")
	}
}
