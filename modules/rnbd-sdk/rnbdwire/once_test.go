package rnbdwire

import (
	"bytes"
	"encoding/hex"
	"strings"
	"testing"
)

func hexBytes(t *testing.T, text string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(text, " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// The bytes of numbered and repeated requests; they are the contract.
func TestE025_E026_E028_NumberedAndRepeatedRequests(t *testing.T) {
	io := IOFields{DeviceID: 5, Sector: 0x10, RW: 1 | FlagFUA, BISize: 4096, Prio: 0x4004}
	const plain = "0000 05000000 1000000000000000 01020000 00100000 0440"
	once, again := make(IOOnce, IOOnceSize), make(IOAgain, IOAgainSize)
	io.Put(once)
	PutIOOnce(once, 0x0102)
	io.Put(again)
	PutIOAgain(again, 0x0102, AgainFields{Mark{0xa, 0xb}, true})
	if want := hexBytes(t, "0580 "+plain+"000000000000 0201000000000000"); !bytes.Equal(once, want) {
		t.Errorf("IO_ONCE is\n%x, want\n%x", once, want)
	}
	if want := hexBytes(t, "0680 "+plain+"010000000000 0201000000000000 0a00000000000000 0b00000000000000"); !bytes.Equal(again, want) {
		t.Errorf("IO_AGAIN is\n%x, want\n%x", again, want)
	}
	if !once.IsValid() || once[:IOOnceSize-1].IsValid() || !again.IsValid() || again[:IOAgainSize-1].IsValid() {
		t.Error("validity is not a matter of type and length")
	}
	if ioFields(once.IO()) != io || ioFields(again.IO()) != io || once.Number() != 0x0102 || again.Number() != 0x0102 {
		t.Error("what was written is not read")
	}
	if f := again.Fields(); f != (AgainFields{Mark{0xa, 0xb}, true}) {
		t.Errorf("read as %+v", f)
	}
	if IO(once).IsValid() || IO(again).IsValid() {
		t.Error("an older server would take them for an IO")
	}
}

func TestE027_WriterMessages(t *testing.T) {
	msg, rsp := make(Writer, WriterSize), make(WriterRsp, WriterRspSize)
	WriterFields{3, 0x0102}.Put(msg)
	f := WriterRspFields{true, Mark{0xa, 0xb}}
	f.Put(rsp)
	if want := hexBytes(t, "0380 0000 03000000 0201000000000000"); !bytes.Equal(msg, want) {
		t.Errorf("WRITER is %x, want %x", msg, want)
	}
	if want := hexBytes(t, "0480 0000 01000000 0a00000000000000 0b00000000000000"); !bytes.Equal(rsp, want) {
		t.Errorf("WRITER_RSP is %x, want %x", rsp, want)
	}
	if !msg.IsValid() || msg[:WriterSize-1].IsValid() || !rsp.IsValid() || rsp[:WriterRspSize-1].IsValid() {
		t.Error("validity is not a matter of type and length")
	}
	if msg.DeviceID() != 3 || msg.Writer() != 0x0102 || rsp.Fields() != f {
		t.Error("what was written is not read")
	}
}

// A repetition is read as it was written, whatever else the message holds.
func FuzzIOAgain(f *testing.F) {
	msg := make([]byte, IOAgainSize)
	IOFields{DeviceID: 1, RW: 1, BISize: 512}.Put(msg)
	PutIOAgain(msg, 7, AgainFields{Mark{1, 2}, true})
	f.Add(msg)
	f.Fuzz(func(t *testing.T, msg []byte) {
		m := IOAgain(msg)
		if !m.IsValid() {
			return
		}
		again := make(IOAgain, IOAgainSize)
		ioFields(m.IO()).Put(again)
		PutIOAgain(again, m.Number(), m.Fields())
		if !again.IsValid() || again.Number() != m.Number() || again.Fields() != m.Fields() || ioFields(again.IO()) != ioFields(m.IO()) {
			t.Errorf("%x becomes %x", msg, again)
		}
	})
}
