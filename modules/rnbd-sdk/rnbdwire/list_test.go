package rnbdwire

import (
	"encoding/hex"
	"reflect"
	"strings"
	"testing"
)

var listed = []ListEntry{
	{Sectors: 2048, Name: "a.img"},
	{Sectors: 1 << 40, Readers: 3, Writers: 1, Block: true, Name: strings.Repeat("n", 254), User: strings.Repeat("u", 255)},
}

func TestE032_E033_ListMessages(t *testing.T) {
	msg := make([]byte, ListSize)
	if err := (ListFields{After: "vol"}).Put(msg); err != nil {
		t.Fatal(err)
	}
	if got, want := hex.EncodeToString(msg), "0780000000000000"+"766f6c"+strings.Repeat("00", NameSize-3+1); got != want {
		t.Errorf("LIST is written as\n%s, want\n%s", got, want)
	}
	if m := List(msg); !m.IsValid() || m.After() != "vol" || List(msg[:ListSize-1]).IsValid() {
		t.Errorf("valid %t, read as %q", m.IsValid(), m.After())
	}
	for i := range msg[8:] {
		msg[8+i] = 'x'
	}
	if List(msg).IsValid() {
		t.Error("a name without its NUL is valid")
	}
	for _, after := range []string{"a\x00b", strings.Repeat("x", NameSize)} {
		if (ListFields{After: after}).Put(make([]byte, ListSize)) == nil {
			t.Errorf("%q was written", after)
		}
	}

	mem := make(ListRsp, ListRspMin)
	page := NewListPage(mem)
	if !page.Add(ListEntry{Sectors: 0x20000, Readers: 2, Writers: 1, Block: true, Name: "vol", User: "web"}) {
		t.Fatal("no room for a name")
	}
	page.Finish(ListMore)
	want := "08800000" + "01000000" + "01000000" + "16000000" + "0000020000000000" + "0200" + "0100" + "01" + "03" + "03" + "00" + "766f6c" + "776562"
	if got := hex.EncodeToString(mem[:len(want)/2]); got != want {
		t.Errorf("LIST_RSP is written as\n%s, want\n%s", got, want)
	}
}

func TestE033_PagesHoldWhatFits(t *testing.T) {
	mem := make(ListRsp, ListRspMin)
	page := NewListPage(mem)
	n := 0
	for page.Add(listed[n%2]) {
		n++
	}
	page.Finish(ListMore | ListCut)
	got, err := mem.Entries()
	if err != nil || len(got) != n || n < 8 || mem.Flags() != ListMore|ListCut {
		t.Fatalf("%d names of %d, flags %d, %v", len(got), n, mem.Flags(), err)
	}
	for i, e := range got {
		if !reflect.DeepEqual(e, listed[i%2]) {
			t.Errorf("name %d is %+v", i, e)
		}
	}
	for _, e := range []ListEntry{{}, {Name: strings.Repeat("n", NameSize)}} {
		if NewListPage(make([]byte, ListRspMin)).Add(e) {
			t.Errorf("%+v was written", e)
		}
	}
}

func FuzzList(f *testing.F) {
	msg := make([]byte, ListSize)
	if err := (ListFields{After: "vol"}).Put(msg); err != nil {
		f.Fatal(err)
	}
	f.Add(msg)
	f.Fuzz(func(t *testing.T, msg []byte) {
		m := List(msg)
		if !m.IsValid() {
			return
		}
		again := make(List, ListSize)
		if err := (ListFields{After: m.After()}).Put(again); err != nil || again.After() != m.After() {
			t.Errorf("%q becomes %q: %v", m.After(), again.After(), err)
		}
	})
}

// What a page says is written again as a page that says the same.
func FuzzListRsp(f *testing.F) {
	mem := make(ListRsp, ListRspMin)
	page := NewListPage(mem)
	for _, e := range listed {
		page.Add(e)
	}
	page.Finish(ListMore)
	f.Add([]byte(mem))
	f.Add([]byte(mem[:40]))
	f.Fuzz(func(t *testing.T, msg []byte) {
		if len(msg) > ListRspMax {
			return
		}
		entries, err := ListRsp(msg).Entries()
		if err != nil {
			return
		}
		again := make(ListRsp, max(len(msg), ListRspMin))
		page := NewListPage(again)
		for _, e := range entries {
			if !page.Add(e) {
				t.Fatalf("no room for %+v", e)
			}
		}
		page.Finish(ListRsp(msg).Flags())
		got, err := again.Entries()
		if err != nil || len(got) != len(entries) || len(got) > 0 && !reflect.DeepEqual(got, entries) {
			t.Errorf("%+v becomes %+v: %v", entries, got, err)
		}
	})
}
