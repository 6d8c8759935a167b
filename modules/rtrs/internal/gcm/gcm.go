package gcm

import (
	"crypto/aes"
	"crypto/cipher"
	"errors"
	"fmt"
)

const (
	// NonceSize is the length of a nonce in bytes.
	NonceSize = 12
	// TagSize is the length of a tag in bytes.
	TagSize = 16
)

// maxLen is the most bytes in a call of Seal: the counter of blocks has 32 bits,
// two of its values are not for blocks of data.
const maxLen = (1<<32 - 2) * aes.BlockSize

// stride is the number of bytes that the assembly handles at once: eight blocks.
const stride = 8 * aes.BlockSize

var errOpen = errors.New("message is not authentic")

// New returns AES-GCM for a key of 16, 24 or 32 bytes. As with crypto/cipher,
// dst and the message must overlap exactly or not at all, and Open clears what it
// has written if the message is not authentic.
func New(key []byte) (cipher.AEAD, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, fmt.Errorf("AES: %w", err)
	}
	if wide {
		return newWide(block, key), nil
	}
	return cipher.NewGCM(block)
}
