package gcm

import "crypto/cipher"

// DATA PATH: messages whose text is not in one piece.
//
// Ciphers of this package take long parts from their place and put long results
// to theirs. For other ciphers the text is copied before or after.

// directMin is the length in bytes from which a part is sealed from its place.
// Shorter ones are copied: a call for each would take longer.
const directMin = 4 * stride

// strider is a cipher that takes messages stride by stride.
type strider interface {
	begin(m *message, nonce, additional []byte)
	// sealStrides seals len(src) bytes that begin at offset at of the message. Both
	// are multiples of stride. dst and src overlap exactly or not at all.
	sealStrides(m *message, dst, src []byte, at int)
	// sealEnd seals the last len(text) bytes of a message in place and writes its
	// tag behind them.
	sealEnd(m *message, text []byte, at, additional int)
	openSplit(dst, nonce, ciphertext, additional []byte) ([]byte, error)
	// again decrypts whole strides from the front of a message in place.
	again(nonce, ciphertext []byte)
}

// Sealing seals one message at a time, whose text comes in parts. Begin starts a
// message, Add appends to its text, End completes it. The zero value is ready.
type Sealing struct {
	aead       cipher.AEAD
	wide       strider // aead, if it is one
	nonce      [NonceSize]byte
	additional []byte
	dst        []byte
	n          int // bytes of text
	sealed     int // bytes that are sealed, a multiple of stride
	m          message
}

// Begin starts a message that is written to dst. a has nonces of NonceSize and
// tags of TagSize bytes. additional must not change before End.
func (s *Sealing) Begin(a cipher.AEAD, dst, nonce, additional []byte) {
	if uint64(len(dst)) > maxLen {
		panic("gcm: message too long")
	}
	s.aead = a
	s.wide, _ = a.(strider)
	s.dst, s.additional, s.n, s.sealed = dst, additional, 0, 0
	copy(s.nonce[:], nonce)
	if s.wide != nil {
		s.wide.begin(&s.m, s.nonce[:], additional)
	}
}

// Add appends part to the text. dst must have room for all parts and a tag, and
// part must not overlap it. part may change after the call.
func (s *Sealing) Add(part []byte) {
	if len(part) > s.Room() {
		panic("gcm: no room for a part")
	}
	if s.wide != nil && len(part) >= directMin {
		part = part[s.direct(part):]
	}
	s.n += copy(s.dst[s.n:], part)
}

// Room returns the number of bytes that dst has room for.
func (s *Sealing) Room() int { return len(s.dst) - TagSize - s.n }

// direct seals part from its place but for an end of less than a stride, and
// returns the number of bytes sealed. The stride begun before is filled first.
func (s *Sealing) direct(part []byte) int {
	fill := -s.n & (stride - 1)
	s.n += copy(s.dst[s.n:], part[:fill])
	s.inPlace()
	whole := (len(part) - fill) &^ (stride - 1)
	s.wide.sealStrides(&s.m, s.dst[s.n:s.n+whole], part[fill:fill+whole], s.n)
	s.n += whole
	s.sealed = s.n
	return fill + whole
}

// inPlace seals the whole strides that were copied to dst.
func (s *Sealing) inPlace() {
	if b := s.dst[s.sealed : s.n&^(stride-1)]; len(b) > 0 {
		s.wide.sealStrides(&s.m, b, b, s.sealed)
		s.sealed += len(b)
	}
}

// End completes the message and returns its length with the tag.
func (s *Sealing) End() int {
	if s.wide == nil {
		s.aead.Seal(s.dst[:0], s.nonce[:], s.dst[:s.n], s.additional)
		return s.n + TagSize
	}
	s.inPlace()
	s.wide.sealEnd(&s.m, s.dst[s.sealed:s.n:s.n+TagSize], s.sealed, len(s.additional))
	return s.n + TagSize
}

// OpenSplit opens ciphertext like a.Open. The first len(dst) bytes of the text
// are written to dst, which must not overlap ciphertext nor be longer than the
// text. The others are returned; they overwrite a part of ciphertext. If the
// message is not authentic, all that was written is 0.
func OpenSplit(a cipher.AEAD, dst, nonce, ciphertext, additional []byte) (rest []byte, err error) {
	if len(ciphertext)-TagSize < len(dst) {
		return nil, errOpen
	}
	if s, ok := a.(strider); ok {
		return s.openSplit(dst, nonce, ciphertext, additional)
	}
	text, err := a.Open(ciphertext[:0], nonce, ciphertext, additional)
	if err != nil {
		clear(dst)
		return nil, err
	}
	return text[copy(dst, text):], nil
}

// Whole makes the text of a message that OpenSplit has opened whole: its first n
// bytes, which went to dst, overwrite their ciphertext. They are not read from
// dst, where others may have changed them.
func Whole(a cipher.AEAD, nonce, ciphertext []byte, n int) {
	if s, ok := a.(strider); ok {
		s.again(nonce, ciphertext[:n&^(stride-1)])
	}
}
