package gcm

import (
	"crypto/cipher"
	"crypto/subtle"
	"encoding/binary"
	"slices"

	"golang.org/x/sys/cpu"
)

// CPUID, leaf 7, register ECX.
const (
	hasVAES       = 1 << 9
	hasVPCLMULQDQ = 1 << 10
)

// wide reports whether the CPU has the instructions of gcm_amd64.s and the
// operating system saves their registers.
var wide = cpu.X86.HasAVX2 && cpu.X86.HasAES && cpu.X86.HasPCLMULQDQ &&
	features()&(hasVAES|hasVPCLMULQDQ) == hasVAES|hasVPCLMULQDQ

type block = [16]byte

// key is laid out for the assembly.
type key struct {
	round   [15]block // round keys
	powers  [8]block  // of H, from H^8 to H, see power
	middles [8]block  // their two halves added, in the lower half
	rounds  int       // 10, 12 or 14
}

// sealBlocks encrypts n bytes from src to dst, beginning with the counter block
// at counter, and adds the result to hash. n is a multiple of stride and not 0.
//
//go:noescape
func sealBlocks(k *key, counter, hash *block, dst, src *byte, n int)

// openBlocks is sealBlocks for decryption: it adds src to hash.
//
//go:noescape
func openBlocks(k *key, counter, hash *block, dst, src *byte, n int)

// stream writes the key stream of eight blocks.
//
//go:noescape
func stream(k *key, counter *block, dst *[stride]byte)

// hashBlocks adds n blocks from p on to hash; n is 1 to 8.
//
//go:noescape
func hashBlocks(k *key, p *byte, hash *block, n int)

// subWord applies the S-box of AES to each byte.
func subWord(w uint32) uint32

// features is register ECX of CPUID, leaf 7.
func features() uint32

// aead implements cipher.AEAD.
type aead struct{ key key }

func newWide(b cipher.Block, k []byte) cipher.AEAD {
	a := &aead{}
	a.key.expand(k)
	a.key.derive(b)
	return a
}

// expand makes the round keys (FIPS 197, section 5.2).
func (k *key) expand(from []byte) {
	n := len(from) / 4
	k.rounds = n + 6
	w := make([]uint32, 4*(k.rounds+1))
	for i := range n {
		w[i] = binary.LittleEndian.Uint32(from[4*i:])
	}
	rcon := uint32(1)
	for i := n; i < len(w); i++ {
		t := w[i-1]
		switch {
		case i%n == 0:
			t = subWord(t)
			t = t>>8 | t<<24 ^ rcon
			if rcon <<= 1; rcon > 0x80 {
				rcon = 0x1b
			}
		case n > 6 && i%n == 4:
			t = subWord(t)
		}
		w[i] = w[i-n] ^ t
	}
	for i, v := range w {
		binary.LittleEndian.PutUint32(k.round[i/4][4*(i%4):], v)
	}
}

// derive makes the powers of the hash key H, which is the encrypted zero block.
func (k *key) derive(b cipher.Block) {
	var zero, h block
	b.Encrypt(h[:], zero[:])
	first := element{binary.BigEndian.Uint64(h[:]), binary.BigEndian.Uint64(h[8:])}
	e := first
	for i := range k.powers {
		b := e.power()
		k.powers[len(k.powers)-1-i] = b
		subtle.XORBytes(k.middles[len(k.powers)-1-i][:8], b[:8], b[8:])
		e = e.times(first)
	}
}

// element is a polynomial over GF(2) modulo g = x^128+x^7+x^2+x+1. The highest
// bit of high is the coefficient of x^0, the lowest one of low that of x^127.
type element struct{ high, low uint64 }

// reduction is x^128 modulo g, as the upper half of an element.
const reduction = 0xe1 << 56

// times returns e*f mod g.
func (e element) times(f element) (p element) {
	high, low := e.high, e.low // of e*x^i
	for i := range 128 {
		word := f.high
		if i >= 64 {
			word = f.low
		}
		mask := -(word >> (63 - i%64) & 1)
		p.high ^= high & mask
		p.low ^= low & mask
		carry := -(low & 1)
		low = low>>1 | high<<63
		high = high>>1 ^ reduction&carry
	}
	return p
}

// power returns e/x mod g as the assembly wants it. There the product of two
// blocks of 128 bits has 255, and the coefficient of x^0 in bit 254; read as if
// it were in bit 255, the product is x times as large.
func (e element) power() (b block) {
	carry := -(e.high >> 63) // the coefficient of x^0: 1/x = x^127+x^6+x+1
	high := (e.high<<1 | e.low>>63) ^ 0xc2<<56&carry
	low := e.low<<1 ^ 1&carry
	binary.LittleEndian.PutUint64(b[:], low)
	binary.LittleEndian.PutUint64(b[8:], high)
	return b
}

func (a *aead) NonceSize() int { return NonceSize }
func (a *aead) Overhead() int  { return TagSize }

// DATA PATH: Seal and Open.

// Seal implements cipher.AEAD.
func (a *aead) Seal(dst, nonce, plaintext, additional []byte) []byte {
	if uint64(len(plaintext)) > maxLen {
		panic("gcm: message too long")
	}
	all, out := grow(dst, len(plaintext)+TagSize)
	var m message
	a.begin(&m, nonce, additional)
	n := len(plaintext)
	whole := n &^ (stride - 1)
	a.sealStrides(&m, out[:whole], plaintext[:whole], 0)
	copy(out[whole:], plaintext[whole:])
	a.sealEnd(&m, out[whole:n], whole, len(additional))
	return all
}

// Open implements cipher.AEAD.
func (a *aead) Open(dst, nonce, ciphertext, additional []byte) ([]byte, error) {
	n := len(ciphertext) - TagSize
	if n < 0 || uint64(n) > maxLen {
		return nil, errOpen
	}
	all, out := grow(dst, n)
	var m message
	a.begin(&m, nonce, additional)
	whole := n &^ (stride - 1)
	a.openStrides(&m, out[:whole], ciphertext[:whole], 0)
	copy(out[whole:], ciphertext[whole:n])
	if !a.openEnd(&m, out[whole:], ciphertext[n:], whole, len(additional)) {
		clear(out)
		return nil, errOpen
	}
	return all, nil
}

// openSplit implements strider.
func (a *aead) openSplit(dst, nonce, ciphertext, additional []byte) ([]byte, error) {
	n := len(ciphertext) - TagSize
	if uint64(n) > maxLen {
		return nil, errOpen
	}
	var m message
	a.begin(&m, nonce, additional)
	direct, whole := len(dst)&^(stride-1), n&^(stride-1)
	a.openStrides(&m, dst[:direct], ciphertext[:direct], 0)
	a.openStrides(&m, ciphertext[direct:whole], ciphertext[direct:whole], direct)
	if !a.openEnd(&m, ciphertext[whole:n], ciphertext[n:], whole, len(additional)) {
		clear(dst)
		clear(ciphertext[direct:n])
		return nil, errOpen
	}
	copy(dst[direct:], ciphertext[direct:])
	return ciphertext[len(dst):n], nil
}

// again implements strider.
func (a *aead) again(nonce, ciphertext []byte) {
	var m message
	a.begin(&m, nonce, nil)
	a.openStrides(&m, ciphertext, ciphertext, 0)
}

// message is the state of a message under way.
type message struct {
	counter, hash block
	stream        [stride]byte
}

// count sets the counter of blocks. 1 is that of the tag.
func (m *message) count(n uint32) { binary.BigEndian.PutUint32(m.counter[NonceSize:], n) }

// countAt sets the counter for the block at offset at of the message.
func (m *message) countAt(at int) { m.count(uint32(at/len(block{}) + 2)) }

// begin implements strider.
func (a *aead) begin(m *message, nonce, additional []byte) {
	if len(nonce) != NonceSize {
		panic("gcm: wrong length of a nonce")
	}
	copy(m.counter[:], nonce)
	m.hash = block{}
	a.add(&m.hash, additional)
}

// sealStrides implements strider.
func (a *aead) sealStrides(m *message, dst, src []byte, at int) {
	if len(src) > 0 {
		m.countAt(at)
		sealBlocks(&a.key, &m.counter, &m.hash, &dst[0], &src[0], len(src))
	}
}

// openStrides is sealStrides for decryption.
func (a *aead) openStrides(m *message, dst, src []byte, at int) {
	if len(src) > 0 {
		m.countAt(at)
		openBlocks(&a.key, &m.counter, &m.hash, &dst[0], &src[0], len(src))
	}
}

// sealEnd implements strider.
func (a *aead) sealEnd(m *message, text []byte, at, additional int) {
	n := len(text)
	whole := n &^ (stride - 1)
	a.sealStrides(m, text[:whole], text[:whole], at)
	a.crypt(m, text[whole:], at+whole)
	a.add(&m.hash, text[whole:])
	tag := a.finish(m, additional, at+n)
	copy(text[n:n+TagSize], tag[:])
}

// openEnd opens the last len(text) bytes of a message in place, less than a
// stride, and reports whether the message is authentic.
func (a *aead) openEnd(m *message, text, want []byte, at, additional int) bool {
	a.add(&m.hash, text)
	a.crypt(m, text, at)
	tag := a.finish(m, additional, at+len(text))
	return subtle.ConstantTimeCompare(tag[:], want) == 1
}

// crypt adds the key stream to less than a stride of bytes, which begin at offset
// at of the message.
func (a *aead) crypt(m *message, b []byte, at int) {
	if len(b) == 0 {
		return
	}
	m.countAt(at)
	stream(&a.key, &m.counter, &m.stream)
	subtle.XORBytes(b, b, m.stream[:])
}

// add adds b to hash, with zeros up to the end of a block.
func (a *aead) add(hash *block, b []byte) {
	for len(b) >= len(hash) {
		n := min(len(b)/len(hash), len(a.key.powers))
		hashBlocks(&a.key, &b[0], hash, n)
		b = b[n*len(hash):]
	}
	if len(b) > 0 {
		var last block
		copy(last[:], b)
		hashBlocks(&a.key, &last[0], hash, 1)
	}
}

// finish returns the tag.
func (a *aead) finish(m *message, additional, n int) (tag block) {
	binary.BigEndian.PutUint64(tag[:], uint64(additional)*8)
	binary.BigEndian.PutUint64(tag[8:], uint64(n)*8)
	hashBlocks(&a.key, &tag[0], &m.hash, 1)
	m.count(1)
	stream(&a.key, &m.counter, &m.stream)
	subtle.XORBytes(tag[:], m.hash[:], m.stream[:])
	return tag
}

// grow returns dst with n bytes more, and these.
func grow(dst []byte, n int) (all, tail []byte) {
	all = slices.Grow(dst, n)[:len(dst)+n]
	return all, all[len(dst):]
}
