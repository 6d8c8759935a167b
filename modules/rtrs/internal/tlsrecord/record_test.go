package tlsrecord

import (
	"bytes"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"strings"
	"testing"
)

func unhex(s string) []byte {
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		panic(err)
	}
	return b
}

// The simple handshake of RFC 8448, section 3.
var (
	clientSecret = unhex("9e40646ce79a7f9dc05af8889bce6552875afa0b06df0087f792ebb7c17504a5")
	serverSecret = unhex("a11af9f05531f856ad47116b45a950328204b4f44bfb6b3a4b4f1f3fcb631643")
	clientData   = unhex("1703030043 a23f7054b62c94d0affafe8228ba55cbefacea42f914aa66bcab3f2b9819a8a5b46b395bd54a9a20441e2b62974e1f5a6292a2977014bd1e3deae63aeebb21694915e4")
	serverData   = unhex("1703030043 2e937e11ef4ac740e538ad36005fc4a46932fc3225d05f82aa1b36e30efaf97d90e6dffc602dcb501a59a8fcc49c4bf2e5f0a21c0047c2abf332540dd032e167c2955d")
	clientClose  = unhex("1703030013 c9872760655666b74d7ff1153efd6db6d0b0e3")
)

func fifty() []byte {
	b := make([]byte, 50)
	for i := range b {
		b[i] = byte(i)
	}
	return b
}

func sealer(t testing.TB, k Keys) *Sealer {
	t.Helper()
	s, err := NewSealer(k)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func opener(t testing.TB, k Keys, client bool) *Opener {
	t.Helper()
	o, err := NewOpener(k, client)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func record(s *Sealer, typ byte, content []byte) []byte {
	b := make([]byte, len(content)+Overhead)
	copy(b[HeaderLen:], content)
	return b[:s.Seal(b, typ, len(content))]
}

func TestRFC8448(t *testing.T) {
	for _, c := range []struct {
		keys Keys
		data []byte
	}{
		{Keys{tls.TLS_AES_128_GCM_SHA256, clientSecret, 0}, clientData},
		{Keys{tls.TLS_AES_128_GCM_SHA256, serverSecret, 1}, serverData}, // a session ticket was before
	} {
		if got := record(sealer(t, c.keys), ApplicationData, fifty()); !bytes.Equal(got, c.data) {
			t.Errorf("sealed %x, want %x", got, c.data)
		}
		o := opener(t, c.keys, true)
		typ, content, err := o.Open(bytes.Clone(c.data))
		if typ != ApplicationData || !bytes.Equal(content, fifty()) || err != nil {
			t.Errorf("opened type %d, %x, %v", typ, content, err)
		}
	}
	s := sealer(t, Keys{tls.TLS_AES_128_GCM_SHA256, clientSecret, 1})
	b := make([]byte, AlertLen)
	if s.SealAlert(b, CloseNotify); !bytes.Equal(b, clientClose) {
		t.Errorf("close_notify %x, want %x", b, clientClose)
	}
}

var suites = []uint16{tls.TLS_AES_128_GCM_SHA256, tls.TLS_AES_256_GCM_SHA384, tls.TLS_CHACHA20_POLY1305_SHA256}

func keysOf(suite uint16) Keys {
	n := 32
	if suite == tls.TLS_AES_256_GCM_SHA384 {
		n = 48
	}
	return Keys{Suite: suite, Secret: bytes.Repeat([]byte{7}, n)}
}

func TestEverySuiteAndSize(t *testing.T) {
	for _, suite := range suites {
		s, o := sealer(t, keysOf(suite)), opener(t, keysOf(suite), false)
		s.updateAfter = 5
		updates := 0
		for _, n := range []int{0, 1, 15, 16, 17, 4096, MaxContent - 1, MaxContent, 3, 2, 1} {
			if s.Worn() {
				updates++
				b := make([]byte, UpdateLen)
				if err := s.SealUpdate(b); err != nil {
					t.Fatal(err)
				}
				typ, content, err := o.Open(b)
				if err != nil {
					t.Fatal(err)
				}
				if event, err := o.Control(typ, content); event != Nothing || err != nil {
					t.Fatal(event, err)
				}
			}
			want := bytes.Repeat([]byte{byte(n), 3}, n)[:n]
			rec := record(s, ApplicationData, want)
			if size, err := o.Next(rec); size != len(rec) || Content(size) != n || err != nil {
				t.Fatalf("Next: %d, %v", size, err)
			}
			for cut := range min(len(rec), 10) {
				if size, err := o.Next(rec[:cut]); size != 0 || err != nil {
					t.Fatalf("Next of %d bytes: %d, %v", cut, size, err)
				}
			}
			typ, content, err := o.Open(rec)
			if typ != ApplicationData || err != nil || !bytes.Equal(content, want) {
				t.Errorf("suite %#x, %d bytes: type %d, %v", suite, n, typ, err)
			}
		}
		if updates != 2 { // of 11 records
			t.Errorf("suite %#x: %d keys were worn, want 2", suite, updates)
		}
	}
}

// TestPartsOfRecords seals content in two parts, for records with and without padding.
func TestPartsOfRecords(t *testing.T) {
	for _, suite := range suites {
		s, o := sealer(t, keysOf(suite)), opener(t, keysOf(suite), true)
		s2 := sealer(t, keysOf(suite))
		for _, n := range []int{1, 2, 130, 700, 1500} {
			for _, zeros := range []int{0, 1, 200} {
				for _, typ := range []byte{ApplicationData, Handshake} {
					for cut := 0; cut <= n+zeros; cut += 1 + n/30 {
						want := bytes.Repeat([]byte{byte(cut), 3, 0}, n)[:n]
						content := append(append(bytes.Clone(want), typ), make([]byte, zeros)...)
						last := len(content) - 1 // the type of a record without padding
						rec, parts := record(s, content[last], content[:last]), make([]byte, len(content)-1+Overhead)
						s2.Begin(parts, content[last], last)
						s2.Add(content[:min(cut, last)])
						s2.Add(content[min(cut, last):last])
						if s2.End() != len(rec) || !bytes.Equal(parts, rec) {
							t.Fatalf("suite %#x, %d bytes: parts make another record", suite, last)
						}
						if got, content, err := o.Open(rec); err != nil || got != typ || !bytes.Equal(content, want) {
							t.Fatalf("suite %#x, type %d, %d bytes: type %d, %v", suite, typ, len(want), got, err)
						}
					}
				}
			}
		}
	}
}

func TestRecordsMustHaveTheirContent(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	s := sealer(t, keysOf(suites[0]))
	s.Begin(make([]byte, 100), ApplicationData, 50)
	s.Add(make([]byte, 49))
	s.End()
}

func TestKeyUpdatesOfThePeer(t *testing.T) {
	s, o := sealer(t, keysOf(suites[0])), opener(t, keysOf(suites[0]), false)
	for i := range 20 {
		want := Event(Nothing)
		request := byte(i % 2)
		if request == 1 {
			want = UpdateRequested
		}
		update := []byte{typeKeyUpdate, 0, 0, 1, request}
		for at := 0; at < len(update); at += 2 { // in three records
			typ, content, err := o.Open(record(s, Handshake, update[at:min(at+2, len(update))]))
			if err != nil {
				t.Fatal(err)
			}
			event, err := o.Control(typ, content)
			if err != nil || event != Nothing && at+2 < len(update) {
				t.Fatal(event, err)
			}
			if at+2 >= len(update) && event != want {
				t.Fatalf("event %d, want %d", event, want)
			}
		}
		if err := s.Update(); err != nil {
			t.Fatal(err)
		}
		if _, content, err := o.Open(record(s, ApplicationData, []byte("data"))); string(content) != "data" || err != nil {
			t.Fatalf("update %d: %q, %v", i, content, err)
		}
	}
}

func TestRecordsThatEndTheConnection(t *testing.T) {
	ticket := func(n int) []byte { return []byte{typeNewSessionTicket, byte(n >> 16), byte(n >> 8), byte(n)} }
	for name, c := range map[string]struct {
		typ    byte
		bytes  []byte
		client bool
		code   AlertCode
	}{
		"change of cipher":          {20, []byte{1}, true, UnexpectedMessage},
		"unknown type":              {99, []byte{1}, true, UnexpectedMessage},
		"empty handshake":           {Handshake, nil, true, UnexpectedMessage},
		"short alert":               {Alert, []byte{1}, true, DecodeError},
		"long alert":                {Alert, []byte{1, 0, 1}, true, DecodeError},
		"ticket to a server":        {Handshake, ticket(0), false, UnexpectedMessage},
		"ticket that is too long":   {Handshake, ticket(1 << 20), true, UnexpectedMessage},
		"client hello":              {Handshake, []byte{1, 0, 0, 0}, false, UnexpectedMessage},
		"update of two bytes":       {Handshake, []byte{typeKeyUpdate, 0, 0, 2, 0, 0}, true, UnexpectedMessage},
		"update with bad request":   {Handshake, []byte{typeKeyUpdate, 0, 0, 1, 2}, true, DecodeError},
		"something behind a update": {Handshake, []byte{typeKeyUpdate, 0, 0, 1, 0, 4}, true, UnexpectedMessage},
	} {
		s, o := sealer(t, keysOf(suites[0])), opener(t, keysOf(suites[0]), c.client)
		typ, content, err := o.Open(record(s, c.typ, c.bytes))
		if err == nil {
			_, err = o.Control(typ, content)
		}
		var e *Error
		if !errors.As(err, &e) || e.Code != c.code || e.Received {
			t.Errorf("%s: %v, want alert %d", name, err, c.code)
		}
	}
}

func TestAlertsOfThePeer(t *testing.T) {
	o := opener(t, keysOf(suites[0]), true)
	if event, err := o.Control(Alert, []byte{levelWarning, byte(CloseNotify)}); event != Closed || err != nil {
		t.Error(event, err)
	}
	_, err := o.Control(Alert, []byte{levelFatal, 42})
	var e *Error
	if !errors.As(err, &e) || e.Code != 42 || !e.Received {
		t.Error(err)
	}
}

func TestTicketsAreSkipped(t *testing.T) {
	s, o := sealer(t, keysOf(suites[0])), opener(t, keysOf(suites[0]), true)
	stream := append([]byte{typeNewSessionTicket, 0, 1, 0}, make([]byte, 256)...)
	stream = append(stream, stream...)
	for len(stream) > 0 {
		n := min(len(stream), 37)
		typ, content, err := o.Open(record(s, Handshake, stream[:n]))
		if err != nil {
			t.Fatal(err)
		}
		if event, err := o.Control(typ, content); event != Nothing || err != nil {
			t.Fatal(event, err)
		}
		stream = stream[n:]
	}
	if _, content, err := o.Open(record(s, ApplicationData, []byte("x"))); string(content) != "x" || err != nil {
		t.Error(content, err)
	}
	// Data must not come inside a message.
	typ, content, _ := o.Open(record(s, Handshake, []byte{typeNewSessionTicket, 0}))
	if _, err := o.Control(typ, content); err != nil {
		t.Fatal(err)
	}
	if _, _, err := o.Open(record(s, ApplicationData, []byte("x"))); err == nil {
		t.Error("data inside a message were taken")
	}
}

func TestRecordsWithoutDataAreBounded(t *testing.T) {
	s, o := sealer(t, keysOf(suites[0])), opener(t, keysOf(suites[0]), true)
	n := 0
	for ; n < 1000; n++ {
		if _, _, err := o.Open(record(s, ApplicationData, nil)); err != nil {
			break
		}
	}
	if n != maxIdleRecords {
		t.Errorf("%d empty records were taken", n)
	}
}

func TestRecordsThatAreNotAuthentic(t *testing.T) {
	good := record(sealer(t, keysOf(suites[0])), ApplicationData, fifty())
	for i := range good {
		bad := bytes.Clone(good)
		bad[i] ^= 1
		o := opener(t, keysOf(suites[0]), true)
		size, err := o.Next(bad)
		if err == nil && size > 0 {
			var content []byte
			if _, content, err = o.Open(bad[:size]); content != nil {
				t.Errorf("byte %d changed: there is content", i)
			}
		} else if err == nil {
			continue // longer than the input
		}
		if err == nil {
			t.Errorf("byte %d changed: no error", i)
		}
	}
	o := opener(t, keysOf(suites[0]), true)
	if _, _, err := o.Open(bytes.Clone(good)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := o.Open(bytes.Clone(good)); err == nil {
		t.Error("a record was taken twice")
	}
}

func TestLengthLimits(t *testing.T) {
	o := opener(t, keysOf(suites[0]), true)
	for n, code := range map[int]AlertCode{0: BadRecordMAC, tagLen: BadRecordMAC, MaxContent + 257: RecordOverflow, 65535: RecordOverflow} {
		var e *Error
		if _, err := o.Next([]byte{ApplicationData, 3, 3, byte(n >> 8), byte(n)}); !errors.As(err, &e) || e.Code != code {
			t.Errorf("length %d: %v, want alert %d", n, err, code)
		}
	}
	var e *Error
	if _, err := o.Next([]byte{Handshake, 3, 3, 0, 30}); !errors.As(err, &e) || e.Code != UnexpectedMessage {
		t.Error(err)
	}
	// 2^14 bytes with padding are taken, 2^14+1 are not, and neither are zeros alone.
	for n, want := range map[int]bool{MaxContent: true, MaxContent + 1: false} {
		s, o := sealer(t, keysOf(suites[0])), opener(t, keysOf(suites[0]), true)
		if _, _, err := o.Open(padded(s, n, 100)); (err == nil) != want {
			t.Errorf("%d bytes with padding: %v", n, err)
		}
	}
	s, o2 := sealer(t, keysOf(suites[0])), opener(t, keysOf(suites[0]), true)
	zeros := make([]byte, 50+Overhead)
	if _, _, err := o2.Open(zeros[:s.Seal(zeros, 0, 50)]); !errors.As(err, &e) || e.Code != UnexpectedMessage {
		t.Error(err)
	}
}

// padded returns a record of n bytes of data and zeros behind the type.
func padded(s *Sealer, n, zeros int) []byte {
	b := make([]byte, n+1+zeros+Overhead)
	b[HeaderLen+n] = ApplicationData
	return b[:s.Seal(b, 0, n+zeros)]
}

func TestSealAndOpenAllocateNothing(t *testing.T) {
	for _, suite := range suites {
		s, o := sealer(t, keysOf(suite)), opener(t, keysOf(suite), true)
		b, place := make([]byte, 4096+Overhead), make([]byte, 8192)
		if n := testing.AllocsPerRun(100, func() {
			s.Seal(b, ApplicationData, 4096)
			o.Open(b)
			s.Begin(b, ApplicationData, 4096)
			s.Add(place[:1000])
			s.Add(place[1000:4096])
			s.End()
			o.Open(b)
			s.Seal(b, ApplicationData, 4096)
			o.Open(b)
		}); n != 0 {
			t.Errorf("suite %#x: %v allocations", suite, n)
		}
	}
}

func TestUnknownSuite(t *testing.T) {
	if _, err := NewSealer(Keys{Suite: 0x1304, Secret: clientSecret}); err == nil {
		t.Error("no error")
	}
}

// FuzzStream opens the records of a peer that holds the keys. For any input,
// the content is within its bounds, and no record is taken after an error.
func FuzzStream(f *testing.F) {
	f.Add([]byte{Handshake, 5, typeKeyUpdate, 0, 0, 1, 1, ApplicationData, 2, 1, 2})
	f.Add([]byte{Alert, 2, 1, 0, Handshake, 6, typeNewSessionTicket, 0, 0, 2, 1, 1})
	f.Add([]byte{0, 3, 0, 0, 0})
	f.Fuzz(func(t *testing.T, script []byte) {
		s, o := sealer(t, keysOf(suites[0])), opener(t, keysOf(suites[0]), len(script)%2 == 0)
		for len(script) >= 2 {
			typ, n := script[0], min(int(script[1]), len(script)-2)
			content := script[2 : 2+n]
			script = script[2+n:]
			rec := record(s, typ, content)
			size, err := o.Next(rec)
			if size != len(rec) || err != nil {
				t.Fatalf("Next: %d, %v", size, err)
			}
			got, plain, err := o.Open(rec)
			if err != nil {
				return
			}
			if len(plain) > n || typ != 0 && (got != typ || !bytes.Equal(plain, content)) {
				t.Fatalf("type %d of %d bytes became type %d of %d", typ, n, got, len(plain))
			}
			if got == ApplicationData {
				continue
			}
			before := o.secret
			event, err := o.Control(got, plain)
			if err != nil {
				return
			}
			if event == UpdateRequested && bytes.Equal(before, o.secret) {
				t.Fatal("the key is the old one")
			}
			if !bytes.Equal(before, o.secret) {
				if err := s.Update(); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}

// FuzzHeader: a record is as long as its header says, or is refused.
func FuzzHeader(f *testing.F) {
	f.Add([]byte{ApplicationData, 3, 3, 0, 17, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		o := opener(t, keysOf(suites[0]), true)
		size, err := o.Next(b)
		if size > len(b) || size > MaxRecord || size > 0 && size < Overhead || size > 0 && err != nil {
			t.Fatalf("size %d of %d, %v", size, len(b), err)
		}
		if size == 0 {
			return
		}
		if _, _, err := o.Open(bytes.Clone(b[:size])); err == nil {
			t.Fatal("forged")
		}
	})
}

func BenchmarkSealAndOpen(b *testing.B) {
	for _, suite := range suites {
		b.Run(tls.CipherSuiteName(suite), func(b *testing.B) {
			s, o := sealer(b, keysOf(suite)), opener(b, keysOf(suite), true)
			buf := make([]byte, MaxRecord)
			b.SetBytes(MaxContent)
			for b.Loop() {
				n := s.Seal(buf, ApplicationData, MaxContent)
				o.Open(buf[:n])
			}
		})
	}
}
