package volume

import (
	"encoding/json"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Meta is what is known of a volume beside its data and its size.
type Meta struct {
	// Owner is the identity that created the volume; empty: an administrator of the
	// host, or the file was put into the folder by hand.
	Owner   string    `json:"owner,omitempty"`
	Created time.Time `json:"created,omitzero"`
	// Source is what the volume or snapshot was copied from, Copied how.
	Source string `json:"source,omitempty"`
	Copied string `json:"copied,omitempty"` // Reflink or SparseCopy
	// Snapshot reports that no client may write to it.
	Snapshot bool `json:"snapshot,omitempty"`
	// Private reports that only the identities in Grants may open the volume. Otherwise
	// the rules of access decide.
	Private bool `json:"private,omitempty"`
	// Grants are the access modes ("ro", "rw" or "migration") by identity.
	Grants map[string]string `json:"grants,omitempty"`
}

// maxMeta bounds the attribute in bytes. Ext4 has a block for all attributes of a
// file.
const maxMeta = 3 << 10

func (m *Meta) encode() ([]byte, error) {
	text, err := json.Marshal(m)
	if err == nil && len(text) > maxMeta {
		err = fmt.Errorf("it is published to %d identities, and the file system keeps no more about a file: %w", len(m.Grants), syscall.E2BIG)
	}
	return text, err
}

// ReadMeta returns the Meta of the file behind an open descriptor, which may be an
// O_PATH one. A file without the attribute has an empty Meta. ReadMeta blocks for
// ever on a network file system that does not answer.
func ReadMeta(f *os.File) (Meta, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return Meta{}, err
	}
	var buf [maxMeta]byte
	var n int
	var attrErr error
	if err := raw.Control(func(fd uintptr) {
		n, attrErr = unix.Getxattr(fmt.Sprintf("/proc/self/fd/%d", fd), attribute, buf[:])
	}); err != nil {
		return Meta{}, err
	}
	text, err := attributeOf(buf[:max(n, 0)], attrErr)
	if err != nil {
		return Meta{}, fmt.Errorf("attribute %s: %w", attribute, err)
	}
	return decodeMeta(text)
}

func decodeMeta(text []byte) (m Meta, err error) {
	if len(text) == 0 {
		return m, nil
	}
	if err := json.Unmarshal(text, &m); err != nil {
		return m, fmt.Errorf("attribute %s: %v: %w", attribute, err, syscall.EBADMSG)
	}
	return m, nil
}
