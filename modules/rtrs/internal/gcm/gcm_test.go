package gcm

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"testing"
)

// reference is the cipher of the standard library.
func reference(t testing.TB, key []byte) cipher.AEAD {
	t.Helper()
	b, err := aes.NewCipher(key)
	if err != nil {
		t.Fatal(err)
	}
	g, err := cipher.NewGCM(b)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func ours(t testing.TB, key []byte) cipher.AEAD {
	t.Helper()
	g, err := New(key)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func random(rng *rand.ChaCha8, n int) []byte {
	b := make([]byte, n)
	rng.Read(b)
	return b
}

// TestKnownAnswers has test cases 3, 4 and 16 of "The Galois/Counter Mode of
// Operation" by McGrew and Viega, the submission to NIST.
func TestKnownAnswers(t *testing.T) {
	const (
		plain = "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72" +
			"1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b391aafd255"
		nonce      = "cafebabefacedbaddecaf888"
		additional = "feedfacedeadbeeffeedfacedeadbeefabaddad2"
	)
	for _, c := range []struct{ name, key, plain, additional, want string }{
		{"3", "feffe9928665731c6d6a8f9467308308", plain, "",
			"42831ec2217774244b7221b784d0d49ce3aa212f2c02a4e035c17e2329aca12e" +
				"21d514b25466931c7d8f6a5aac84aa051ba30b396a0aac973d58e091473f5985" +
				"4d5c2af327cd64a62cf35abd2ba6fab4"},
		{"4", "feffe9928665731c6d6a8f9467308308", plain[:120], additional,
			"42831ec2217774244b7221b784d0d49ce3aa212f2c02a4e035c17e2329aca12e" +
				"21d514b25466931c7d8f6a5aac84aa051ba30b396a0aac973d58e091" +
				"5bc94fbc3221a5db94fae95ae7121a47"},
		{"16", "feffe9928665731c6d6a8f9467308308feffe9928665731c6d6a8f9467308308", plain[:120], additional,
			"522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa" +
				"8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662" +
				"76fc6ece0f4e1768cddf8853bb2d551b"},
	} {
		bytesOf := func(s string) []byte {
			b, err := hex.DecodeString(s)
			if err != nil {
				t.Fatal(err)
			}
			return b
		}
		got := ours(t, bytesOf(c.key)).Seal(nil, bytesOf(nonce), bytesOf(c.plain), bytesOf(c.additional))
		if hex.EncodeToString(got) != c.want {
			t.Errorf("test case %s: %x, want %s", c.name, got, c.want)
		}
	}
}

// TestSameAsStandardLibrary compares every length up to some strides, and long
// records, for all lengths of keys and several of additional data.
func TestSameAsStandardLibrary(t *testing.T) {
	rng := rand.NewChaCha8([32]byte{1})
	lengths := []int{4096, 4097, 16383, 16384, 16385, 16640, 70001}
	for n := range 1100 {
		lengths = append(lengths, n)
	}
	for _, bits := range []int{128, 192, 256} {
		t.Run(fmt.Sprintf("%d bits", bits), func(t *testing.T) {
			key := random(rng, bits/8)
			g, std := ours(t, key), reference(t, key)
			for i, n := range lengths {
				compare(t, g, std, random(rng, NonceSize), random(rng, n), random(rng, []int{5, 0, 16, 13, 300}[i%5]))
			}
		})
	}
}

// compare seals and opens in place and elsewhere, at any alignment, and breaks
// one bit.
func compare(t *testing.T, g, std cipher.AEAD, nonce, plain, additional []byte) {
	t.Helper()
	n := len(plain)
	want := std.Seal(nil, nonce, plain, additional)
	off := n % 7
	buf := make([]byte, off+n+TagSize+1)
	buf[len(buf)-1] = 0xa5
	if got := g.Seal(buf[off:off], nonce, plain, additional); !bytes.Equal(got, want) {
		t.Fatalf("%d bytes sealed elsewhere differ", n)
	}
	copy(buf[off:], plain)
	if got := g.Seal(buf[off:off], nonce, buf[off:off+n], additional); !bytes.Equal(got, want) || &got[0] != &buf[off] {
		t.Fatalf("%d bytes sealed in place differ", n)
	}
	dst := make([]byte, n+1)
	dst[n] = 0xa5
	if got, err := g.Open(dst[:0:n], nonce, want, additional); err != nil || !bytes.Equal(got, plain) {
		t.Fatalf("%d bytes opened elsewhere: %v", n, err)
	}
	if got, err := g.Open(buf[off:off], nonce, buf[off:off+n+TagSize], additional); err != nil || !bytes.Equal(got, plain) {
		t.Fatalf("%d bytes opened in place: %v", n, err)
	}
	if dst[n] != 0xa5 || buf[len(buf)-1] != 0xa5 {
		t.Fatalf("%d bytes: the byte behind them has changed", n)
	}
	if len(want)%3 == 0 {
		refuse(t, g, nonce, want, additional, dst[:n])
	}
}

// refuse breaks one bit of the message, its tag, its nonce and its additional
// data.
func refuse(t *testing.T, g cipher.AEAD, nonce, sealed, additional, dst []byte) {
	t.Helper()
	for _, part := range [][]byte{sealed[:len(sealed)-TagSize], sealed[len(sealed)-TagSize:], nonce, additional} {
		if len(part) == 0 {
			continue
		}
		at, bit := rand.IntN(len(part)), byte(1)<<rand.IntN(8)
		part[at] ^= bit
		for i := range dst {
			dst[i] = 0xff
		}
		got, err := g.Open(dst[:0], nonce, sealed, additional)
		if err == nil || got != nil {
			t.Fatalf("%d bytes with a wrong bit are opened", len(dst))
		}
		if bytes.ContainsFunc(dst, func(r rune) bool { return r != 0 }) {
			t.Fatalf("%d bytes with a wrong bit: the result is not cleared", len(dst))
		}
		part[at] ^= bit
	}
}

func TestShortMessagesAreRefused(t *testing.T) {
	g := ours(t, make([]byte, 16))
	for n := range TagSize {
		if _, err := g.Open(nil, make([]byte, NonceSize), make([]byte, n), nil); err == nil {
			t.Errorf("%d bytes are opened", n)
		}
	}
}

func TestWrongKeyLength(t *testing.T) {
	if _, err := New(make([]byte, 17)); err == nil {
		t.Error("a key of 17 bytes is accepted")
	}
}

func TestNothingIsAllocatedPerCall(t *testing.T) {
	g := ours(t, make([]byte, 16))
	buf, nonce, additional := make([]byte, 4097+TagSize), make([]byte, NonceSize), make([]byte, 5)
	n := testing.AllocsPerRun(100, func() {
		g.Seal(buf[:0], nonce, buf[:4097], additional)
		if _, err := g.Open(buf[:0], nonce, buf, additional); err != nil {
			t.Fatal(err)
		}
	})
	if n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// FuzzSameAsStandardLibrary compares both ciphers.
func FuzzSameAsStandardLibrary(f *testing.F) {
	f.Add(make([]byte, 16), make([]byte, NonceSize), make([]byte, 200), make([]byte, 5))
	f.Fuzz(func(t *testing.T, key, nonce, plain, additional []byte) {
		if n := len(key); n != 16 && n != 24 && n != 32 || len(nonce) != NonceSize {
			return
		}
		g, std := ours(t, key), reference(t, key)
		want := std.Seal(nil, nonce, plain, additional)
		if got := g.Seal(nil, nonce, plain, additional); !bytes.Equal(got, want) {
			t.Fatalf("sealed %x, want %x", got, want)
		}
		if got, err := g.Open(nil, nonce, want, additional); err != nil || !bytes.Equal(got, plain) {
			t.Fatalf("opened %x, %v", got, err)
		}
	})
}

func BenchmarkRecord(b *testing.B) {
	for _, n := range []int{64, 4097, 16385} {
		for name, g := range map[string]cipher.AEAD{"this": ours(b, make([]byte, 16)), "standard": reference(b, make([]byte, 16))} {
			nonce, additional := make([]byte, NonceSize), make([]byte, 5)
			buf := make([]byte, n+TagSize)
			b.Run(fmt.Sprintf("seal/%d/%s", n, name), func(b *testing.B) {
				b.SetBytes(int64(n))
				for b.Loop() {
					g.Seal(buf[:0], nonce, buf[:n], additional)
				}
			})
			sealed, dst := g.Seal(nil, nonce, buf[:n], additional), make([]byte, n)
			b.Run(fmt.Sprintf("open/%d/%s", n, name), func(b *testing.B) {
				b.SetBytes(int64(n))
				for b.Loop() {
					if _, err := g.Open(dst[:0], nonce, sealed, additional); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
