package rnbdwire

import (
	"bytes"
	"encoding/hex"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// golden reads testdata/name.hex: a line of origin, then the message.
func golden(t testing.TB, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name+".hex"))
	if err != nil {
		t.Fatal(err)
	}
	_, digits, _ := strings.Cut(string(text), "\n")
	msg, err := hex.DecodeString(strings.Join(strings.Fields(digits), ""))
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return msg
}

// message is one format as the tests see it.
type message struct {
	valid  func(m []byte) bool
	fields func(m []byte) any
	put    func(fields any, m []byte)
}

var formats = map[string]message{
	"SESS_INFO": {
		valid:  func(m []byte) bool { return SessInfo(m).IsValid() },
		fields: func(m []byte) any { return SessInfoFields{SessInfo(m).Version()} },
		put:    func(f any, m []byte) { f.(SessInfoFields).Put(m) },
	},
	"SESS_INFO_RSP": {
		valid:  func(m []byte) bool { return SessInfoRsp(m).IsValid() },
		fields: func(m []byte) any { return SessInfoRspFields{SessInfoRsp(m).Version(), SessInfoRsp(m).Features()} },
		put:    func(f any, m []byte) { f.(SessInfoRspFields).Put(m) },
	},
	"OPEN": {
		// An empty name is read, for the server to refuse, but never written.
		valid:  func(m []byte) bool { return Open(m).IsValid() && Open(m).Name() != "" },
		fields: func(m []byte) any { return OpenFields{Open(m).AccessMode(), Open(m).Name()} },
		put: func(f any, m []byte) {
			if err := f.(OpenFields).Put(m); err != nil {
				panic(err)
			}
		},
	},
	"OPEN_AS": {
		valid: func(m []byte) bool { return OpenAs(m).IsValid() && OpenAs(m).Name() != "" },
		fields: func(m []byte) any {
			return OpenAsFields{OpenFields{OpenAs(m).AccessMode(), OpenAs(m).Name()}, OpenAs(m).IOMode()}
		},
		put: func(f any, m []byte) {
			if err := f.(OpenAsFields).Put(m); err != nil {
				panic(err)
			}
		},
	},
	"OPEN_RSP": {
		valid:  func(m []byte) bool { return OpenRsp(m).IsValid() },
		fields: func(m []byte) any { return OpenRsp(m).Fields() },
		put:    func(f any, m []byte) { f.(OpenRspFields).Put(m) },
	},
	"CLOSE": {
		valid:  func(m []byte) bool { return Close(m).IsValid() },
		fields: func(m []byte) any { return CloseFields{Close(m).DeviceID()} },
		put:    func(f any, m []byte) { f.(CloseFields).Put(m) },
	},
	"EVENT": {
		valid:  func(m []byte) bool { return Event(m).IsValid() },
		fields: func(m []byte) any { return EventFields{Event(m).Seen(), Event(m).Holds()} },
		put:    func(f any, m []byte) { f.(EventFields).Put(m) },
	},
	"EVENT_RSP": {
		valid:  func(m []byte) bool { return EventRsp(m).IsValid() },
		fields: func(m []byte) any { return EventRsp(m).Fields() },
		put:    func(f any, m []byte) { f.(EventRspFields).Put(m) },
	},
	"IO": {
		valid:  func(m []byte) bool { return IO(m).IsValid() },
		fields: func(m []byte) any { return ioFields(m) },
		put:    func(f any, m []byte) { f.(IOFields).Put(m) },
	},
}

func ioFields(m IO) IOFields {
	f := IOFields{m.DeviceID(), m.Sector(), uint32(m.Op()), m.BISize(), m.Prio()}
	if m.Sync() {
		f.RW |= FlagSync
	}
	if m.FUA() {
		f.RW |= FlagFUA
	}
	if m.Preflush() {
		f.RW |= FlagPreflush
	}
	if m.NoUnmap() {
		f.RW |= FlagNoUnmap
	}
	return f
}

// goldens are the kernel's messages and their meaning.
var goldens = []struct {
	file, format string
	size         int
	fields       any
}{
	{"sess_info", "SESS_INFO", 36, SessInfoFields{2}},
	{"sess_info_rsp", "SESS_INFO_RSP", 36, SessInfoRspFields{2, 0}},
	{"open_ro", "OPEN", 264, OpenFields{0, "dev/loop0"}},
	{"open_rw", "OPEN", 264, OpenFields{1, "dev/loop0"}},
	{"open_migration", "OPEN", 264, OpenFields{2, "/dev/nullb0"}},
	{"open_dotdot", "OPEN", 264, OpenFields{1, "../dev/nullb0"}},
	{"open_rsp_loop", "OPEN_RSP", 56, OpenRspFields{
		DeviceID: 0, Sectors: 131072, MaxHWSectors: 2560, MaxWriteZeroesSects: 8388607, MaxDiscardSectors: 8388607,
		DiscardGranularity: 4096, PhysicalBlockSize: 512, LogicalBlockSize: 512, MaxSegments: 128, CachePolicy: CacheWriteBack}},
	{"open_rsp_null", "OPEN_RSP", 56, OpenRspFields{
		DeviceID: 1, Sectors: 2097152, MaxHWSectors: 255, MaxDiscardSectors: 8388607,
		DiscardGranularity: 512, PhysicalBlockSize: 512, LogicalBlockSize: 512, MaxSegments: 128, CachePolicy: CacheWriteBack | CacheFUA}},
	{"close", "CLOSE", 8, CloseFields{1}},
	{"io_read", "IO", 32, IOFields{0, 0, 0 | FlagSync, 4096, 0x4004}},
	{"io_write", "IO", 32, IOFields{0, 16, 1 | FlagSync, 4096, 0x4004}},
	{"io_flush", "IO", 32, IOFields{0, ^uint64(0), 2 | FlagSync | FlagFUA, 0, 0}},
	{"io_discard", "IO", 32, IOFields{0, 0x800, 3 | FlagSync, 65536, 0x4004}},
	{"io_write_zeroes", "IO", 32, IOFields{0, 0x1000, 5 | FlagSync, 8192, 0x4004}},
	{"io_write_fua", "IO", 32, IOFields{1, 0x48, 1 | FlagSync | FlagFUA, 4096, 0x4004}},
}

func TestR192_UnknownFlags(t *testing.T) {
	for bit := range 32 {
		m := make(IO, IOSize)
		IOFields{RW: 1 << bit}.Put(m)
		if got, want := m.HasUnknownFlags(), bit >= 12; got != want {
			t.Errorf("bit %d is unknown: %t, want %t", bit, got, want)
		}
	}
}

func TestR120_R132_R134_R136_KernelMessages(t *testing.T) {
	for _, g := range goldens {
		t.Run(g.file, func(t *testing.T) {
			msg, format := golden(t, g.file), formats[g.format]
			if len(msg) != g.size {
				t.Errorf("%d bytes, want %d", len(msg), g.size)
			}
			if !format.valid(msg) {
				t.Fatal("not valid")
			}
			if got := format.fields(msg); !reflect.DeepEqual(got, g.fields) {
				t.Errorf("read as %+v\nwant    %+v", got, g.fields)
			}
			again := bytes.Repeat([]byte{0xee}, g.size+8) // rest of an older message
			format.put(g.fields, again)
			if !bytes.Equal(again[:g.size], msg) {
				t.Errorf("written as %x\nwant       %x", again[:g.size], msg)
			}
			if !bytes.Equal(again[g.size:], bytes.Repeat([]byte{0xee}, 8)) {
				t.Error("bytes behind the message were written")
			}
		})
	}
}

func TestR124_BytesWithoutMeaningAreIgnored(t *testing.T) {
	// Ranges of each request that a kernel client leaves uninitialised.
	dirty := map[string][][2]int{
		"SESS_INFO": {{2, 4}, {5, 36}},
		"OPEN":      {{2, 4}, {5, 6}, {6 + len("/dev/nullb0") + 1, 264}},
		"CLOSE":     {{2, 4}},
		"IO":        {{2, 4}, {26, 32}},
	}
	for file, format := range map[string]string{"sess_info": "SESS_INFO", "open_migration": "OPEN", "close": "CLOSE", "io_write": "IO"} {
		t.Run(format, func(t *testing.T) {
			msg := golden(t, file)
			want := formats[format].fields(msg)
			for _, r := range dirty[format] {
				for i := r[0]; i < r[1]; i++ {
					msg[i] = 0xa5
				}
			}
			if got := formats[format].fields(msg); !formats[format].valid(msg) || !reflect.DeepEqual(got, want) {
				t.Errorf("read as %+v, want %+v", got, want)
			}
		})
	}
}

func TestR125_IOWithoutTailHasNoPriority(t *testing.T) {
	full := golden(t, "io_write")
	for n := range len(full) + 1 {
		msg := IO(full[:n:n])
		if got, want := msg.IsValid(), n >= 26; got != want {
			t.Errorf("IO of %d bytes: valid %v, want %v", n, got, want)
		}
		if !msg.IsValid() {
			continue
		}
		want := uint16(0)
		if n == 32 {
			want = 0x4004
		}
		if msg.Prio() != want || msg.Sector() != 16 || msg.BISize() != 4096 {
			t.Errorf("IO of %d bytes: %+v", n, ioFields(msg))
		}
	}
}

func TestMessagesThatAreNone(t *testing.T) {
	smallest := map[string]int{"SESS_INFO": 36, "SESS_INFO_RSP": 36, "OPEN": 264, "OPEN_RSP": 56, "CLOSE": 8, "IO": 26}
	for _, g := range goldens {
		format, msg := formats[g.format], golden(t, g.file)
		for n := range len(msg) {
			if want := n >= smallest[g.format]; format.valid(msg[:n:n]) != want {
				t.Errorf("%s of %d bytes: valid %v", g.file, n, !want)
			}
		}
		if g.format == "OPEN_RSP" {
			continue // its type is not looked at
		}
		for _, typ := range []byte{0, 1, 2, 3, 4, 5, 6, 255} {
			other := bytes.Clone(msg)
			other[0] = typ
			if want := typ == msg[0]; format.valid(other) != want {
				t.Errorf("%s with type %d: valid %v", g.file, typ, !want)
			}
		}
	}
}

func TestTypeOf(t *testing.T) {
	for _, tt := range []struct {
		name string
		msg  []byte
		want uint16
	}{
		{"an I/O", []byte{4, 0, 0, 0}, TypeIO},
		{"padding does not count", []byte{5, 0, 0xff, 0xff}, TypeClose},
		{"both bytes count", []byte{4, 1, 0, 0}, 0x104},
		{"three bytes are no message", []byte{0, 0, 0}, typeNone},
		{"nothing is no message", nil, typeNone},
	} {
		if got := TypeOf(tt.msg); got != tt.want {
			t.Errorf("%s: %#x, want %#x", tt.name, got, tt.want)
		}
	}
}

func TestOpenNames(t *testing.T) {
	tests := []struct {
		name, device string
		ok           bool
	}{
		{"one byte", "a", true},
		{"the longest", strings.Repeat("x", 254), true},
		{"one byte too long", strings.Repeat("x", 255), false},
		{"none", "", false},
		{"with NUL", "a\x00b", false},
		{"dots are the server's matter", "../a..b", true},
		{"bytes that are no text", "\xff\xfe/\n", true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			msg := make(Open, OpenSize)
			err := OpenFields{AccessMode: 1, Name: tt.device}.Put(msg)
			if (err == nil) != tt.ok {
				t.Fatalf("Put: %v", err)
			}
			if tt.ok && (!msg.IsValid() || msg.Name() != tt.device) {
				t.Errorf("name %q became %q", tt.device, msg.Name())
			}
		})
	}
	t.Run("an empty name is read", func(t *testing.T) {
		msg := Open(golden(t, "open_rw"))
		clear(msg[6:])
		if !msg.IsValid() || msg.Name() != "" {
			t.Errorf("valid %v", msg.IsValid())
		}
	})
	t.Run("a name without end is not valid", func(t *testing.T) {
		msg := Open(golden(t, "open_rw"))
		copy(msg[6:], strings.Repeat("x", 258)) // the bytes behind the field do not help
		if msg.IsValid() {
			t.Error("valid")
		}
	})
}

func TestExtension(t *testing.T) {
	announce := func(change func(m []byte)) []byte {
		m := make([]byte, SessInfoRspSize)
		SessInfoRspFields{Version: 2, Features: 0x8001}.Put(m)
		change(m)
		return m
	}
	tests := []struct {
		name string
		msg  []byte
		want uint16
	}{
		{"a kernel announces nothing", golden(t, "sess_info_rsp"), 0},
		{"features come back", announce(func([]byte) {}), 0x8001},
		{"a later version keeps the place", announce(func(m []byte) { m[9] = 7; m[12] = 0xff }), 0x8001},
		{"version 0 is none", announce(func(m []byte) { m[9] = 0 }), 0},
		{"another magic is none", announce(func(m []byte) { m[5]++ }), 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := SessInfoRsp(tt.msg).Features(); got != tt.want {
				t.Errorf("features %#x, want %#x", got, tt.want)
			}
			if SessInfoRsp(tt.msg).Version() != 2 {
				t.Errorf("version %d", SessInfoRsp(tt.msg).Version())
			}
		})
	}
	t.Run("the bytes on the wire", func(t *testing.T) {
		want := append([]byte{1, 0, 0, 0, 2, 'R', 'N', 'B', 'X', 1, 0x01, 0x80}, make([]byte, 24)...)
		if got := announce(func([]byte) {}); !bytes.Equal(got, want) {
			t.Errorf("%x, want %x", got, want)
		}
	})
}

func TestIODoesNotAllocate(t *testing.T) {
	msg := make(IO, IOSize)
	got := testing.AllocsPerRun(100, func() {
		IOFields{1, 2, 3, 4, 5}.Put(msg)
		if !msg.IsValid() || ioFields(msg).Sector != 2 {
			t.Fatal("lost")
		}
	})
	if got != 0 {
		t.Errorf("%v allocations", got)
	}
}
