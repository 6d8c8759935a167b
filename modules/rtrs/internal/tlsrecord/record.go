package tlsrecord

import (
	"encoding/binary"
	"errors"
)

// DATA PATH. Records:
//
//	header(5) | content | type(1) | zeros | tag(16)
//
// The header is type 23, version 0x0303 and the length of the rest, big endian.

// Content types.
const (
	Alert           = 21
	Handshake       = 22
	ApplicationData = 23
)

const (
	// HeaderLen is the length of a record's header in bytes.
	HeaderLen = 5
	// MaxContent is the most bytes of content in a record.
	MaxContent = 1 << 14
	// Overhead is the length of a record without padding and content, in bytes.
	Overhead = HeaderLen + 1 + tagLen
	// MaxRecord is the length of the longest record of a peer in bytes: content,
	// type, padding and tag may have 256 bytes more than MaxContent.
	MaxRecord = HeaderLen + MaxContent + 256

	legacyVersion = 0x0303
)

// updateAfter is the number of records after which a sender must use a new key.
// RFC 8446, section 5.5, allows 2^24.5 full records with AES-GCM.
const updateAfter = 1 << 24

// Sealer protects the records of one direction.
type Sealer struct {
	recordState
	updateAfter uint64

	record []byte // that Begin has started
	filled int    // bytes of record before the end of the content
	typ    byte   // type of the content
}

// NewSealer returns the sealer of a direction.
func NewSealer(k Keys) (*Sealer, error) {
	s := &Sealer{updateAfter: updateAfter}
	return s, s.init(k)
}

// Begin starts a record of n bytes of content in b, at most MaxContent. b must have
// room for n+Overhead bytes. Add adds the content, End completes the record.
func (s *Sealer) Begin(b []byte, typ byte, n int) {
	s.record, s.filled, s.typ = b[:n+Overhead], HeaderLen, typ
}

// Add appends part to the content. It must not overlap the record.
func (s *Sealer) Add(part []byte) {
	if len(part) > s.contentRoom() {
		panic("tlsrecord: no room for a part")
	}
	s.filled += copy(s.record[s.filled:], part)
}

// contentRoom returns the number of bytes of content that are missing.
func (s *Sealer) contentRoom() int { return len(s.record) - Overhead + HeaderLen - s.filled }

// End returns the length of the record. All of its content must be there.
func (s *Sealer) End() int {
	if s.contentRoom() != 0 {
		panic("tlsrecord: content is missing")
	}
	return s.Seal(s.record, s.typ, s.filled-HeaderLen)
}

// Seal makes a record of the n bytes at b[HeaderLen:], at most MaxContent, in
// place. b must have room for n+Overhead bytes. Seal returns that length.
func (s *Sealer) Seal(b []byte, typ byte, n int) int {
	end := HeaderLen + n
	b[end] = typ
	putHeader(b, n)
	s.aead.Seal(b[HeaderLen:HeaderLen], s.nextNonce(), b[HeaderLen:end+1], b[:HeaderLen])
	s.seq++
	return n + Overhead
}

// putHeader writes the header of a record of n bytes of content.
func putHeader(b []byte, n int) {
	b[0] = ApplicationData
	binary.BigEndian.PutUint16(b[1:], legacyVersion)
	binary.BigEndian.PutUint16(b[3:], uint16(n+1+tagLen))
}

// Worn reports whether the key has protected as many records as it may. A
// KeyUpdate must be the next record.
func (s *Sealer) Worn() bool { return s.seq >= s.updateAfter }

// UpdateLen is the length of a record with a KeyUpdate in bytes.
const UpdateLen = keyUpdateLen + Overhead

// SealUpdate writes a KeyUpdate that asks for none in return to b, and
// changes the key. b must have room for UpdateLen bytes.
func (s *Sealer) SealUpdate(b []byte) error {
	copy(b[HeaderLen:], []byte{typeKeyUpdate, 0, 0, 1, 0})
	s.Seal(b, Handshake, keyUpdateLen)
	return s.Update()
}

// AlertLen is the length of a record with an alert in bytes.
const AlertLen = 2 + Overhead

// SealAlert writes an alert to b. b must have room for AlertLen bytes.
func (s *Sealer) SealAlert(b []byte, a AlertCode) {
	level := byte(levelFatal)
	if a == CloseNotify {
		level = levelWarning
	}
	b[HeaderLen], b[HeaderLen+1] = level, byte(a)
	s.Seal(b, Alert, 2)
}

// Opener opens the records of one direction.
type Opener struct {
	recordState
	controlReader
}

// NewOpener returns the opener of a direction. Only a client accepts session
// tickets.
func NewOpener(k Keys, client bool) (*Opener, error) {
	o := &Opener{controlReader: controlReader{client: client}}
	return o, o.init(k)
}

// Next returns the length of the record at the front of b, 0 if b does not have
// all of it. The error is an *Error.
func (o *Opener) Next(b []byte) (int, error) {
	if len(b) < HeaderLen {
		return 0, nil
	}
	n := int(binary.BigEndian.Uint16(b[3:]))
	switch {
	case b[0] != ApplicationData:
		return 0, errPlainRecord
	case n > MaxRecord-HeaderLen:
		return 0, errOverflow
	case n < 1+tagLen:
		return 0, errBadRecord
	case len(b) < HeaderLen+n:
		return 0, nil
	}
	return HeaderLen + n, nil
}

// Content returns the most bytes of content that the record of size bytes has.
func Content(size int) int { return size - Overhead }

// Open opens rec, one whole record, and returns its type and content. The content
// overwrites rec. The error is an *Error.
func (o *Opener) Open(rec []byte) (typ byte, content []byte, err error) {
	text, err := o.aead.Open(rec[HeaderLen:HeaderLen], o.nextNonce(), rec[HeaderLen:], rec[:HeaderLen])
	if err != nil {
		return 0, nil, errBadRecord
	}
	o.seq++
	n := contentLen(text) // content and type
	switch {
	case n == 0:
		return 0, nil, errNoType
	case n-1 > MaxContent:
		return 0, nil, errOverflow
	}
	if typ = text[n-1]; typ == ApplicationData {
		err = o.countRecord(n - 1)
	}
	return typ, text[:n-1], err
}

// contentLen returns the length of b without the zeros at its end.
func contentLen(b []byte) int {
	n := len(b)
	for n > 0 && b[n-1] == 0 {
		n--
	}
	return n
}

var (
	errPlainRecord = &Error{Code: UnexpectedMessage, cause: errors.New("a record without protection")}
	errOverflow    = &Error{Code: RecordOverflow, cause: errors.New("a record is longer than TLS allows")}
	errBadRecord   = &Error{Code: BadRecordMAC, cause: errors.New("a record is not authentic")}
	errNoType      = &Error{Code: UnexpectedMessage, cause: errors.New("a record has no type")}
)
