package rnbdwire

import (
	"bytes"
	"reflect"
	"testing"
)

// fuzz checks of a decoder: a valid message has fields that are written as a
// valid message with the same fields, and that message is the input in all
// bytes but those that blank sets to zero.
func fuzz(f *testing.F, name string, size int, blank func(m []byte)) {
	for _, g := range goldens {
		f.Add(golden(f, g.file))
	}
	format := formats[name]
	f.Fuzz(func(t *testing.T, msg []byte) {
		before := bytes.Clone(msg)
		if !format.valid(msg) {
			return
		}
		fields := format.fields(msg)
		if !bytes.Equal(msg, before) {
			t.Fatal("reading changed the message")
		}
		again := make([]byte, size)
		format.put(fields, again)
		if !format.valid(again) || !reflect.DeepEqual(format.fields(again), fields) {
			t.Errorf("%+v becomes %+v", fields, format.fields(again))
		}
		want := make([]byte, size)
		copy(want, msg)
		if name == "IO" && len(msg) < IOSize {
			clear(want[24:]) // no priority
		}
		blank(want)
		if !bytes.Equal(again, want) {
			t.Errorf("%x\nis rebuilt as %x\nwant          %x", msg, again, want)
		}
	})
}

func FuzzSessInfo(f *testing.F) {
	fuzz(f, "SESS_INFO", SessInfoSize, func(m []byte) { clear(m[2:4]); clear(m[5:]) })
}

func FuzzSessInfoRsp(f *testing.F) {
	msg := make([]byte, SessInfoRspSize)
	SessInfoRspFields{Version: 2, Features: 3}.Put(msg)
	f.Add(msg)
	fuzz(f, "SESS_INFO_RSP", SessInfoRspSize, func(m []byte) {
		clear(m[2:4])
		clear(m[12:])
		if SessInfoRsp(m).Features() == 0 {
			clear(m[5:])
		} else {
			m[9] = extVersion
		}
	})
}

func FuzzOpen(f *testing.F) {
	fuzz(f, "OPEN", OpenSize, func(m []byte) {
		clear(m[2:4])
		m[5] = 0
		clear(m[6+len(Open(m).Name()):])
	})
}

func FuzzOpenRsp(f *testing.F) {
	msg := make([]byte, OpenRspSize)
	OpenRspFields{DeviceID: 1, Sectors: 8, Volume: 1<<63 | 1, Properties: 0x8001}.Put(msg)
	f.Add(msg)
	fuzz(f, "OPEN_RSP", OpenRspSize, func(m []byte) {
		m[0], m[1], m[2], m[3] = TypeOpenRsp, 0, 0, 0
		m[44] = min(m[44], 1)
	})
}

func FuzzClose(f *testing.F) {
	fuzz(f, "CLOSE", CloseSize, func(m []byte) { clear(m[2:4]) })
}

func FuzzOpenAs(f *testing.F) {
	msg := make([]byte, OpenAsSize)
	if err := (OpenAsFields{OpenFields{1, "vol"}, "fileio"}).Put(msg); err != nil {
		f.Fatal(err)
	}
	f.Add(msg)
	fuzz(f, "OPEN_AS", OpenAsSize, func(m []byte) {
		clear(m[2:4])
		m[5] = 0
		clear(m[6+len(OpenAs(m).Name()) : OpenSize])
		clear(m[OpenSize+len(OpenAs(m).IOMode()):])
	})
}

func FuzzEvent(f *testing.F) {
	msg := make([]byte, EventSize)
	EventFields{Seen: 7}.Put(msg)
	f.Add(msg)
	EventFields{Seen: 8, Holds: true}.Put(msg)
	f.Add(msg)
	fuzz(f, "EVENT", EventSize, func(m []byte) { clear(m[2:4]); m[4] &= eventHolds; clear(m[5:8]) })
}

func FuzzEventRsp(f *testing.F) {
	msg := make([]byte, EventRspSize)
	EventRspFields{DeviceID: 3, Number: 7, Sectors: 1 << 30, Kind: EventResize}.Put(msg)
	f.Add(msg)
	fuzz(f, "EVENT_RSP", EventRspSize, func(m []byte) { clear(m[2:4]); clear(m[26:]) })
}

func FuzzIO(f *testing.F) {
	fuzz(f, "IO", IOSize, func(m []byte) {
		clear(m[2:4])
		m[17] &= (FlagSync | FlagFUA | FlagPreflush | FlagNoUnmap) >> 8 // of rw, the operation and the flags
		clear(m[18:20])
		clear(m[26:])
	})
}
