package rnbdwire

import (
	"bytes"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Messages about the reason of a refused OPEN: docs/extend/protocol/rnbd.md, "Reasons".

// Codes of ReasonFields. Codes of later versions are to be taken for ReasonOther.
const (
	ReasonOther   = 0 // see the text
	ReasonWriter  = 1 // another client has the device open for writing
	ReasonRules   = 2 // the access rules of the server
	ReasonHost    = 3 // the server's host refuses it to the server
	ReasonTimeout = 4 // the device did not open in time
)

// AskReason asks for the reason of the last refused OPEN of a name.
type AskReason []byte

// IsValid reports whether Name may be used: the name must end.
func (m AskReason) IsValid() bool {
	return len(m) >= AskReasonSize && TypeOf(m) == TypeAskReason && bytes.IndexByte(m[8:8+NameSize], 0) >= 0
}

// Name is the name of the OPEN.
func (m AskReason) Name() string {
	name := m[8 : 8+NameSize]
	return string(name[:bytes.IndexByte(name, 0)])
}

// PutAskReason writes an AskReason into m, which has room for AskReasonSize bytes. name
// is one that an Open may have.
func PutAskReason(m []byte, name string) {
	m = putHeader(m, TypeAskReason, AskReasonSize)
	copy(m[8:8+NameSize-1], name)
}

// Reason answers an AskReason.
type Reason []byte

// ReasonFields are the contents of a Reason.
type ReasonFields struct {
	Code uint16 // ReasonOther, ...
	Text string // one line of UTF-8, at most MaxReasonText bytes
}

// IsValid reports whether Fields may be used.
func (m Reason) IsValid() bool {
	return len(m) >= ReasonSize && TypeOf(m) == TypeReason && le.Uint16(m[6:]) <= MaxReasonText
}

// Fields reads the message. The text is made fit for a terminal, whatever the server
// sent.
func (m Reason) Fields() ReasonFields {
	return ReasonFields{Code: le.Uint16(m[4:]), Text: reasonText(string(m[8 : 8+le.Uint16(m[6:])]))}
}

// Put writes the message into m, which has room for ReasonSize bytes. A text that is too
// long, or not fit for a terminal, is changed.
func (f ReasonFields) Put(m []byte) {
	m = putHeader(m, TypeReason, ReasonSize)
	text := reasonText(f.Text)
	le.PutUint16(m[4:], f.Code)
	le.PutUint16(m[6:], uint16(len(text)))
	copy(m[8:], text)
}

// reasonText returns s as one line of at most MaxReasonText bytes of UTF-8, without
// control characters.
func reasonText(s string) string {
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) || r == utf8.RuneError {
			return '?'
		}
		return r
	}, s)
	if len(s) <= MaxReasonText {
		return s
	}
	s = s[:MaxReasonText]
	for !utf8.ValidString(s) {
		s = s[:len(s)-1]
	}
	return s
}
