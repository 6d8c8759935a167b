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
		"EVENT":     {EventFields{0x0102}, "0080 0000 00000000 0201000000000000"},
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
