package rnbdwire

import (
	"bytes"
	"encoding/hex"
	"reflect"
	"strings"
	"testing"
)

// The bytes of the extension's messages; they are the contract.
func TestE002_E003_E015_ExtensionMessages(t *testing.T) {
	for name, x := range map[string]struct {
		fields any
		bytes  string
	}{
		"OPEN_AS": {OpenAsFields{OpenFields{1, "vol"}, "fileio"}, "0280 0000 01 00 766f6c" + strings.Repeat("00", NameSize-3+3) +
			"66696c65696f" + strings.Repeat("00", IOModeSize-6)},
		"EVENT":     {EventFields{Seen: 0x0102, Holds: true}, "0080 0000 01000000 0201000000000000"},
		"EVENT_RSP": {EventRspFields{DeviceID: 5, Number: 3, Sectors: 0x20000, Kind: EventResize}, "0180 0000 05000000 0300000000000000 0000020000000000 0100 000000000000"},
	} {
		want, err := hex.DecodeString(strings.ReplaceAll(x.bytes, " ", ""))
		if err != nil {
			t.Fatal(err)
		}
		f := formats[name]
		got := make([]byte, len(want))
		f.put(x.fields, got)
		if !bytes.Equal(got, want) {
			t.Errorf("%s: %+v is written as\n%x, want\n%x", name, x.fields, got, want)
		}
		if !f.valid(want) || !reflect.DeepEqual(f.fields(want), x.fields) {
			t.Errorf("%s: valid %t, read as %+v", name, f.valid(want), f.fields(want))
		}
		if f.valid(want[:len(want)-1]) {
			t.Errorf("%s: a message without its last byte is valid", name)
		}
	}
}

// A kernel's client looks at nothing behind the cache policy.
func TestE018_IdentityInTheReservedBytesOfOpenRsp(t *testing.T) {
	plain, told := make(OpenRsp, OpenRspSize), make(OpenRsp, OpenRspSize)
	f := OpenRspFields{DeviceID: 1, Sectors: 2, LogicalBlockSize: 512, CachePolicy: 3}
	f.Put(plain)
	f.Volume, f.Properties = 0x0102030405060708, 0x090a
	f.Put(told)
	if !bytes.Equal(told[:46], plain[:46]) {
		t.Errorf("bytes that a kernel reads differ:\n%x\n%x", told[:46], plain[:46])
	}
	if want := []byte{8, 7, 6, 5, 4, 3, 2, 1, 10, 9}; !bytes.Equal(told[46:], want) {
		t.Errorf("bytes 46 to 55 are %x, want %x", told[46:], want)
	}
	if told.Fields() != f {
		t.Errorf("read as %+v, want %+v", told.Fields(), f)
	}
	if kernel := OpenRsp(golden(t, "open_rsp_loop")).Fields(); kernel.Volume != 0 || kernel.Properties != 0 {
		t.Errorf("a kernel's answer has volume %#x, properties %#x", kernel.Volume, kernel.Properties)
	}
}

func TestE015_NamesThatDoNotFitAreNotWritten(t *testing.T) {
	for _, f := range []OpenAsFields{
		{OpenFields{1, "vol"}, strings.Repeat("x", IOModeSize)},
		{OpenFields{1, "vol"}, "file\x00io"},
		{OpenFields{1, ""}, "fileio"},
	} {
		if err := f.Put(make([]byte, OpenAsSize)); err == nil {
			t.Errorf("%+v was written", f)
		}
	}
}
