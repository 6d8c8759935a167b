package gcm

import (
	"bytes"
	"crypto/cipher"
	"fmt"
	"math/rand/v2"
	"testing"
)

// ciphers returns ours and, for the copies that others need, the one of the
// standard library.
func ciphers(t testing.TB, key []byte) map[string]cipher.AEAD {
	return map[string]cipher.AEAD{"this": ours(t, key), "standard": reference(t, key)}
}

// sealParts seals plain cut at the offsets of cuts.
func sealParts(s *Sealing, a cipher.AEAD, dst, nonce, plain, additional []byte, cuts ...int) []byte {
	s.Begin(a, dst, nonce, additional)
	from := 0
	for _, to := range append(cuts, len(plain)) {
		s.Add(plain[from:to])
		from = to
	}
	return dst[:s.End()]
}

// TestParts seals and opens texts of every length up to some strides at once and
// cut in two at every place, and compares with crypto/cipher.
func TestParts(t *testing.T) {
	rng := rand.NewChaCha8([32]byte{2})
	key, nonce := random(rng, 32), random(rng, NonceSize)
	std := reference(t, key)
	for name, a := range ciphers(t, key) {
		t.Run(name, func(t *testing.T) {
			var s Sealing
			buf, place := make([]byte, 1024), make([]byte, 1024)
			for n := range directMin + 2*stride + 20 {
				plain, additional := random(rng, n), random(rng, n%40)
				want := std.Seal(nil, nonce, plain, additional)
				dst := buf[n%7:][:n+TagSize+n%2] // the room need not be exact
				for cut := range n + 1 {
					if n > 3*stride && cut%5 > 0 && -cut&(stride-1) > 2 && (n-cut)&(stride-1) > 2 {
						continue // inside a stride one place is like another
					}
					if got := sealParts(&s, a, dst, nonce, plain, additional, cut); !bytes.Equal(got, want) {
						t.Fatalf("%d bytes cut at %d: sealed %x, want %x", n, cut, got, want)
					}
					openParts(t, a, place[cut%5:][:cut], dst[:len(want)], nonce, plain, additional)
				}
			}
		})
	}
}

// openParts opens sealed to dst and in place.
func openParts(t *testing.T, a cipher.AEAD, dst, sealed, nonce, plain, additional []byte) {
	t.Helper()
	behind := dst[:len(dst)+1]
	behind[len(dst)] = 0xa5
	rest, err := OpenSplit(a, dst, nonce, sealed, additional)
	if err != nil || !bytes.Equal(dst, plain[:len(dst)]) || !bytes.Equal(rest, plain[len(dst):]) {
		t.Fatalf("%d bytes, %d to their place: opened %x and %x, %v", len(plain), len(dst), dst, rest, err)
	}
	if behind[len(dst)] != 0xa5 {
		t.Fatalf("%d bytes, %d to their place: the byte behind them has changed", len(plain), len(dst))
	}
	clear(dst)
	if Whole(a, nonce, sealed, len(dst)); !bytes.Equal(sealed[:len(plain)], plain) {
		t.Fatalf("%d bytes, %d to their place: made whole %x", len(plain), len(dst), sealed)
	}
}

// TestManyParts cuts records anywhere.
func TestManyParts(t *testing.T) {
	rng := rand.NewChaCha8([32]byte{3})
	r := rand.New(rng)
	key, nonce := random(rng, 16), random(rng, NonceSize)
	std := reference(t, key)
	for name, a := range ciphers(t, key) {
		var s Sealing
		buf := make([]byte, 20000)
		for i := range 500 {
			plain, additional := random(rng, r.IntN(17000)), random(rng, 5)
			var cuts []int
			for at := 0; ; {
				if at += []int{r.IntN(4), r.IntN(200), r.IntN(9000), directMin + i%3 - 1}[r.IntN(4)]; at > len(plain) {
					break
				}
				cuts = append(cuts, at)
			}
			got := sealParts(&s, a, buf, nonce, plain, additional, cuts...)
			if want := std.Seal(nil, nonce, plain, additional); !bytes.Equal(got, want) {
				t.Fatalf("%s: %d bytes cut at %v differ", name, len(plain), cuts)
			}
		}
	}
}

// TestSplitMessagesThatAreNotAuthentic breaks a bit anywhere: nothing of the text
// remains.
func TestSplitMessagesThatAreNotAuthentic(t *testing.T) {
	rng := rand.NewChaCha8([32]byte{4})
	key, nonce, additional := random(rng, 16), random(rng, NonceSize), random(rng, 5)
	for name, a := range ciphers(t, key) {
		for _, n := range []int{0, 1, 127, 128, 300, 1000} {
			sealed := a.Seal(nil, nonce, random(rng, n), additional)
			for _, k := range []int{0, n / 3, n / 2, n} {
				for i := range sealed {
					bad, dst := bytes.Clone(sealed), bytes.Repeat([]byte{0xff}, k)
					bad[i] ^= 1 << (i % 8)
					if rest, err := OpenSplit(a, dst, nonce, bad, additional); err == nil || rest != nil {
						t.Fatalf("%s: %d bytes with a wrong byte %d are opened", name, n, i)
					}
					if !bytes.Equal(dst, make([]byte, k)) {
						t.Fatalf("%s: %d bytes with a wrong byte %d: something is at their place", name, n, i)
					}
				}
			}
			if _, err := OpenSplit(a, make([]byte, n+1), nonce, sealed, additional); err == nil {
				t.Errorf("%s: %d bytes are opened to a place of one more", name, n)
			}
		}
	}
}

func TestPartsThatHaveNoRoom(t *testing.T) {
	for name, a := range ciphers(t, make([]byte, 16)) {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			var s Sealing
			s.Begin(a, make([]byte, 1000+TagSize), make([]byte, NonceSize), nil)
			s.Add(make([]byte, 400))
			s.Add(make([]byte, 601))
		}()
	}
}

func TestNothingIsAllocatedForParts(t *testing.T) {
	for name, a := range ciphers(t, make([]byte, 16)) {
		s, head, text := &Sealing{}, make([]byte, 20), make([]byte, 5000)
		buf, dst, nonce, additional := make([]byte, 6000), make([]byte, 4000), make([]byte, NonceSize), make([]byte, 5)
		n := testing.AllocsPerRun(100, func() {
			sealed := sealParts2(s, a, buf, nonce, additional, head, text)
			if _, err := OpenSplit(a, dst, nonce, sealed, additional); err != nil {
				t.Fatal(err)
			}
		})
		if n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

// sealParts2 seals two parts, without a list of them.
func sealParts2(s *Sealing, a cipher.AEAD, dst, nonce, additional, head, text []byte) []byte {
	s.Begin(a, dst, nonce, additional)
	s.Add(head)
	s.Add(text)
	return dst[:s.End()]
}

// FuzzParts compares with crypto/cipher. Each byte of cuts is the length of a
// part, in steps of 5 bytes.
func FuzzParts(f *testing.F) {
	f.Add(make([]byte, 16), make([]byte, NonceSize), make([]byte, 2000), make([]byte, 5), []byte{4, 200, 0, 1}, 700)
	f.Fuzz(func(t *testing.T, key, nonce, plain, additional, cuts []byte, k int) {
		if n := len(key); n != 16 && n != 24 && n != 32 || len(nonce) != NonceSize {
			return
		}
		want := reference(t, key).Seal(nil, nonce, plain, additional)
		for name, a := range ciphers(t, key) {
			var s Sealing
			dst := make([]byte, len(want))
			s.Begin(a, dst, nonce, additional)
			rest := plain
			for _, c := range cuts {
				part := rest[:min(5*int(c), len(rest))]
				s.Add(part)
				rest = rest[len(part):]
			}
			s.Add(rest)
			if n := s.End(); n != len(want) || !bytes.Equal(dst, want) {
				t.Fatalf("%s: sealed %x, want %x", name, dst[:n], want)
			}
			place := make([]byte, min(max(k, 0), len(plain)))
			if got, err := OpenSplit(a, place, nonce, dst, additional); err != nil || !bytes.Equal(append(place, got...), plain) {
				t.Fatalf("%s: opened %x and %x, %v", name, place, got, err)
			}
		}
	})
}

// BenchmarkParts seals a header and payload that is not in the cache: from its
// place, and copied before.
func BenchmarkParts(b *testing.B) {
	const size, many = 16368, 2048
	head, all := make([]byte, 16), make([]byte, size*many)
	nonce, additional, dst := make([]byte, NonceSize), make([]byte, 5), make([]byte, size+16+TagSize)
	a := ours(b, make([]byte, 16))
	for _, direct := range []bool{true, false} {
		b.Run(fmt.Sprintf("direct %v", direct), func(b *testing.B) {
			var s Sealing
			b.SetBytes(size)
			for i := 0; b.Loop(); i++ {
				text := all[i%many*size:][:size]
				if direct {
					sealParts2(&s, a, dst, nonce, additional, head, text)
				} else {
					n := copy(dst, head)
					n += copy(dst[n:], text)
					a.Seal(dst[:0], nonce, dst[:n], additional)
				}
			}
		})
	}
}
