package rnbdwire

import (
	"bytes"
	"slices"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
)

func TestE049_E050_ExtentsMessages(t *testing.T) {
	msg := make([]byte, ExtentsSize)
	f := ExtentsFields{DeviceID: 7, Sector: 8, Sectors: 0x200000}
	f.Put(msg)
	want := []byte{0x09, 0x80, 0, 0, 7, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x20, 0, 0, 0, 0, 0}
	if !bytes.Equal(msg, want) {
		t.Errorf("% x", msg)
	}
	if m := Extents(msg); !m.IsValid() || m.Fields() != f || m[:ExtentsSize-1].IsValid() || Extents(make([]byte, ExtentsSize)).IsValid() {
		t.Errorf("%+v", m.Fields())
	}
	list := []extents.Extent{{Len: 512}, {Len: 1 << 20, Hole: true}}
	rsp := make(ExtentsRsp, ExtentsRspSize)
	PutExtents(rsp, list)
	if !bytes.HasPrefix(rsp, []byte{0x0a, 0x80, 0, 0, 2, 0, 0, 0}) {
		t.Errorf("% x", rsp[:8])
	}
	if got, err := rsp.Extents(1<<20 + 512); err != nil || !slices.Equal(got, list) {
		t.Errorf("%v, error %v", got, err)
	}
	rsp[0] = TypeOpenRsp
	if _, err := rsp.Extents(1 << 30); err == nil {
		t.Error("another message is taken for a list")
	}
}

func FuzzExtents(f *testing.F) {
	msg := make([]byte, ExtentsSize)
	ExtentsFields{DeviceID: 7, Sector: 8, Sectors: 9}.Put(msg)
	f.Add(msg)
	f.Fuzz(func(t *testing.T, msg []byte) {
		m := Extents(msg)
		if !m.IsValid() {
			return
		}
		again := make(Extents, ExtentsSize)
		m.Fields().Put(again)
		if again.Fields() != m.Fields() {
			t.Fatalf("%+v, want %+v", again.Fields(), m.Fields())
		}
	})
}
