package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
)

// metaData is the data of LIST_META_CONTEXT and SET_META_CONTEXT.
func metaData(export string, queries ...string) []byte {
	b := cat(uint32(len(export)), export, uint32(len(queries)))
	for _, q := range queries {
		b = cat(b, uint32(len(q)), q)
	}
	return b
}

// inForce is a negotiation that ends with GO of "a".
func inForce(options ...any) []byte {
	return cat(uint32(3), option(8, nil), cat(options...), option(7, goData("a")))
}

func TestMetaContexts(t *testing.T) {
	const alloc = "base:allocation"
	listed := optReply(9, 4, uint32(0), alloc)
	set := cat(optReply(10, 4, uint32(1), alloc), optReply(10, 1))
	many := strings.Split(strings.Repeat("x:y ", 5000), " ")
	for _, v := range []struct {
		name    string
		options []byte
		replies []byte
		inForce bool // of "a", which GO opens
	}{
		{"nothing is selected", nil, nil, false},
		{"list without queries", option(9, metaData("a")), cat(listed, optReply(9, 1)), false},
		{"list of the namespace", option(9, metaData("a", "base:")), cat(listed, optReply(9, 1)), false},
		{"list of the context", option(9, metaData("a", alloc)), cat(listed, optReply(9, 1)), false},
		{"list with several queries", option(9, metaData("a", "x:", alloc, "base:", alloc)), cat(listed, optReply(9, 1)), false},
		{"list of unknown ones", option(9, metaData("a", "qemu:", "base", "base:allocation2", "base:alloc", "")), optReply(9, 1), false},
		{"set", option(10, metaData("a", alloc)), set, true},
		{"set among unknown ones", option(10, metaData("a", "qemu:dirty-bitmap:b", alloc, "x:y")), set, true},
		{"set twice in one option", option(10, metaData("a", alloc, alloc)), set, true},
		{"set without queries", option(10, metaData("a")), optReply(10, 1), false},
		{"set has no wildcard", option(10, metaData("a", "base:")), optReply(10, 1), false},
		{"set of unknown ones", option(10, metaData("a", "qemu:allocation-depth", "", "base:")), optReply(10, 1), false},
		{"set with many queries", option(10, metaData("a", append(many, alloc)...)), set, true},
		{"list selects nothing, and takes nothing away", cat(option(10, metaData("a", alloc)), option(9, metaData("b", "x:"))), cat(set, optReply(9, 1)), true},
		{"set of another export", option(10, metaData("b", alloc)), set, false},
		{"set of another export, then of this one", cat(option(10, metaData("b", alloc)), option(10, metaData("a", alloc))), cat(set, set), true},
		{"set of this export, then of another one", cat(option(10, metaData("a", alloc)), option(10, metaData("b", alloc))), cat(set, set), false},
		{"a later set replaces it", cat(option(10, metaData("a", alloc)), option(10, metaData("a"))), cat(set, optReply(10, 1)), false},
		{"a later set that is malformed replaces it", cat(option(10, metaData("a", alloc)), option(10, nil)), cat(set, optReply(10, bad)), false},
		{"a later set of an unknown export replaces it", cat(option(10, metaData("a", alloc)), option(10, metaData("zz", alloc))), cat(set, optReply(10, absent, `no export "zz"`)), false},
		{"a later set that is too long replaces it", cat(option(10, metaData("a", alloc)), option(10, metaData("a", strings.Repeat("q", 4097)))), cat(set, optReply(10, tooBig)), false},
		{"structured replies are asked for again", cat(option(10, metaData("a", alloc)), option(8, nil)), cat(set, optReply(8, 1)), true},
		{"list of an unknown export", option(9, metaData("zz")), optReply(9, absent, `no export "zz"`), false},
		{"an empty name with two exports", option(10, metaData("", alloc)), optReply(10, absent, `no export ""`), false},
		{"a long query", option(10, metaData("a", strings.Repeat("q", 4096), alloc)), set, true},
		{"a query that is too long", option(10, metaData("a", strings.Repeat("q", 4097), alloc)), optReply(10, tooBig), false},
		{"a name that is too long", option(9, metaData(strings.Repeat("n", 4097))), optReply(9, tooBig), false},
		{"no data", option(9, nil), optReply(9, bad), false},
		{"half of a length", option(10, []byte{0, 0, 0}), optReply(10, bad), false},
		{"a name longer than the option", option(10, cat(uint32(2), "a")), optReply(10, bad), false},
		{"a name length that wraps", option(10, cat(uint32(1<<32-1), "a", uint32(0))), optReply(10, bad), false},
		{"no number of queries", option(9, cat(uint32(1), "a")), optReply(9, bad), false},
		{"half a number of queries", option(9, cat(uint32(1), "a", uint16(0))), optReply(9, bad), false},
		{"fewer queries than it says", option(10, cat(uint32(1), "a", uint32(2), uint32(len(alloc)), alloc)), optReply(10, bad), false},
		{"as many queries as can be said", option(10, cat(uint32(1), "a", uint32(1<<32-1), uint32(len(alloc)), alloc)), optReply(10, bad), false},
		{"a query without a length", option(10, cat(uint32(1), "a", uint32(1), uint16(0))), optReply(10, bad), false},
		{"a query longer than the option", option(10, cat(uint32(1), "a", uint32(1), uint32(len(alloc)+1), alloc)), optReply(10, bad), false},
		{"a query length that wraps", option(10, cat(uint32(1), "a", uint32(1), uint32(1<<32-1), alloc)), optReply(10, bad), false},
		{"bytes behind the queries", option(10, cat(metaData("a", alloc), "x")), optReply(10, bad), false},
	} {
		t.Run(v.name, func(t *testing.T) {
			f := twoExports(t)
			s := &script{in: bytes.NewReader(inForce(v.options))}
			n, err := runHandshake(s, f, nil)
			if got, want := s.out.Bytes(), cat(greeting, optReply(8, 1), v.replies, exportInfoA(7)); !bytes.Equal(got, want) {
				t.Errorf("server says\n% x, want\n% x", got, want)
			}
			checkOutcome(t, f, n, err, "a", "")
			if n.allocation != v.inForce {
				t.Errorf("in force: %t", n.allocation)
			}
		})
	}
}

func TestMetaContexts_WithoutStructuredReplies(t *testing.T) {
	for _, opt := range []uint32{9, 10} {
		in := cat(uint32(3), option(opt, metaData("a", nbdwire.AllocationContext)), option(8, nil), option(7, goData("a")))
		s := &script{in: bytes.NewReader(in)}
		n, err := runHandshake(s, twoExports(t), nil)
		if want := cat(greeting, optReply(opt, bad), optReply(8, 1), exportInfoA(7)); !bytes.Equal(s.out.Bytes(), want) {
			t.Errorf("option %d: server says\n% x, want\n% x", opt, s.out.Bytes(), want)
		}
		if err != nil || n.allocation {
			t.Errorf("option %d: %+v, error %v", opt, n, err)
		}
	}
}

// EXPORT_NAME starts the transmission as GO does, and the empty name is that of the
// only export.
func TestMetaContexts_OfTheExportThatIsOpened(t *testing.T) {
	for _, v := range []struct {
		name   string
		set    string
		opens  []byte
		wanted bool
	}{
		{"EXPORT_NAME", "a", option(1, []byte("a")), true},
		{"EXPORT_NAME of another one", "a", option(1, []byte("b")), false},
		{"GO of another one", "a", option(7, goData("b")), false},
		{"GO of another one that fails first", "a", cat(option(7, goData("zz")), option(7, goData("a"))), true},
		{"INFO of another one between", "a", cat(option(6, goData("b")), option(7, goData("a"))), true},
	} {
		in := cat(uint32(3), option(8, nil), option(10, metaData(v.set, nbdwire.AllocationContext)), v.opens)
		n, err := runHandshake(&script{in: bytes.NewReader(in)}, twoExports(t), nil)
		if err != nil || n.allocation != v.wanted {
			t.Errorf("%s: in force %t, error %v", v.name, n.allocation, err)
		}
	}
	f := twoExports(t)
	if err := f.RemoveDevice(t.Context(), 1, false); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"", "a"} {
		n, err := runHandshake(&script{in: bytes.NewReader(inForce(option(10, metaData("", nbdwire.AllocationContext)), option(6, goData(name))))}, f, nil)
		if err != nil || !n.allocation {
			t.Errorf("empty name: %+v, error %v", n, err)
		}
	}
}

// A slot has to have room for a list of extents.
func TestMetaContexts_SmallSlots(t *testing.T) {
	f := newFrontend(quiet)
	must(t, "add device", f.AddDevice(t.Context(), spec{
		Name: "a", Limits: testLimits(1 << 20), Arena: make([]byte, 4096), SlotSize: 2048, Slots: 2,
	}))
	in := inForce(option(9, metaData("a")), option(10, metaData("a", nbdwire.AllocationContext)))
	s := &script{in: bytes.NewReader(in)}
	n, err := runHandshake(s, f, nil)
	if want := cat(greeting, optReply(8, 1), optReply(9, 1), optReply(10, 1)); !bytes.HasPrefix(s.out.Bytes(), want) {
		t.Errorf("server says\n% x, want\n% x", s.out.Bytes(), want)
	}
	if err != nil || n.allocation {
		t.Errorf("%+v, error %v", n, err)
	}
}

// A device that was removed, and added again under its name, is another one.
func TestMetaContexts_OfARemovedDevice(t *testing.T) {
	f := twoExports(t)
	old, err := f.findExport("a")
	must(t, "find", err)
	must(t, "remove", f.RemoveDevice(t.Context(), 0, false))
	must(t, "add again", f.AddDevice(t.Context(), spec{Name: "a", Limits: *old.limits.Load(), Arena: old.arena, SlotSize: old.slotSize, Slots: 1}))
	c := &replaced{catalogue: f, first: old}
	n, err := runHandshake(&script{in: bytes.NewReader(inForce(option(10, metaData("a", nbdwire.AllocationContext))))}, c, nil)
	if err != nil || n.allocation {
		t.Errorf("%+v, error %v", n, err)
	}
}

// replaced finds an export that is not there any more when one is opened.
type replaced struct {
	catalogue
	first *export
}

func (r *replaced) findExport(string) (*export, error) { return r.first, nil }
