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
	direction
	updateAfter uint64
}

// NewSealer returns the sealer of a direction.
func NewSealer(k Keys) (*Sealer, error) {
	s := &Sealer{updateAfter: updateAfter}
	return s, s.init(k)
}

// Seal makes a record of the n bytes at b[HeaderLen:], at most MaxContent, in
// place. b must have room for n+Overhead bytes. Seal returns that length.
func (s *Sealer) Seal(b []byte, typ byte, n int) int {
	end := HeaderLen + n
	b[end] = typ
	b[0] = ApplicationData
	binary.BigEndian.PutUint16(b[1:], legacyVersion)
	binary.BigEndian.PutUint16(b[3:], uint16(n+1+tagLen))
	s.aead.Seal(b[HeaderLen:HeaderLen], s.number(), b[HeaderLen:end+1], b[:HeaderLen])
	s.seq++
	return n + Overhead
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
	direction
	control
}

// NewOpener returns the opener of a direction. Only a client accepts session
// tickets.
func NewOpener(k Keys, client bool) (*Opener, error) {
	o := &Opener{control: control{client: client}}
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

// Open opens rec, one whole record, and returns its type and content. The
// content overwrites rec if dst is nil. Else it is written to dst, with up to
// len(rec)-HeaderLen-tagLen bytes in all: the type and the padding follow the
// content. dst must have room for them and must not overlap rec. If the record
// is not authentic, all these bytes are 0. The error is an *Error.
func (o *Opener) Open(dst, rec []byte) (typ byte, content []byte, err error) {
	if dst == nil {
		dst = rec[HeaderLen:]
	}
	inner, err := o.aead.Open(dst[:0], o.number(), rec[HeaderLen:], rec[:HeaderLen])
	if err != nil {
		return 0, nil, errBadRecord
	}
	o.seq++
	n := len(inner)
	for n > 0 && inner[n-1] == 0 {
		n--
	}
	if n == 0 {
		return 0, nil, errNoType
	}
	if n-1 > MaxContent {
		return 0, nil, errOverflow
	}
	if typ = inner[n-1]; typ == ApplicationData {
		if err := o.progress(n - 1); err != nil {
			return 0, nil, err
		}
	}
	return typ, inner[:n-1], nil
}

var (
	errPlainRecord = &Error{Code: UnexpectedMessage, cause: errors.New("a record without protection")}
	errOverflow    = &Error{Code: RecordOverflow, cause: errors.New("a record is longer than TLS allows")}
	errBadRecord   = &Error{Code: BadRecordMAC, cause: errors.New("a record is not authentic")}
	errNoType      = &Error{Code: UnexpectedMessage, cause: errors.New("a record has no type")}
)
