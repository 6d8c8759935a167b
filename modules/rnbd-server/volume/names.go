package volume

import (
	"fmt"
	"strings"
	"syscall"
)

// MaxName is the largest length of the name of a volume, a snapshot or a pool, in
// bytes. "VOLUME@SNAPSHOT" is the name of a file, which has 255.
const MaxName = 127

// CheckName returns EINVAL unless s can be the name of a volume, a snapshot or a
// pool: 1 to MaxName letters, digits and "._:+-", the first one a letter or a
// digit, and no "..".
func CheckName(s string) error {
	switch {
	case s == "":
		return fmt.Errorf("a name is empty: %w", syscall.EINVAL)
	case len(s) > MaxName:
		return fmt.Errorf("name %.20q...: it has %d bytes, and %d are allowed: %w", s, len(s), MaxName, syscall.EINVAL)
	case !isAlphanumeric(rune(s[0])), strings.ContainsFunc(s, isNoNameRune), strings.Contains(s, ".."):
		return fmt.Errorf(`name %q: write letters, digits and "._:+-", a letter or digit first, without "..": %w`, s, syscall.EINVAL)
	}
	return nil
}

func isAlphanumeric(r rune) bool {
	return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
}

func isNoNameRune(r rune) bool { return !isAlphanumeric(r) && !strings.ContainsRune("._:+-", r) }

// Name names a volume or, with a Snapshot, one of its snapshots.
type Name struct {
	Volume   string
	Snapshot string // empty: the volume itself
}

// ParseName parses VOLUME or VOLUME@SNAPSHOT. The error is EINVAL.
func ParseName(s string) (Name, error) {
	volume, snapshot, isSnapshot := strings.Cut(s, "@")
	n := Name{volume, snapshot}
	if isSnapshot && snapshot == "" {
		return n, fmt.Errorf("name %q: the name of a snapshot is missing after the @: %w", s, syscall.EINVAL)
	}
	return n, n.check()
}

// String returns VOLUME or VOLUME@SNAPSHOT, which is also the name of the file.
func (n Name) String() string {
	if n.Snapshot == "" {
		return n.Volume
	}
	return n.Volume + "@" + n.Snapshot
}

func (n Name) check() error {
	if err := CheckName(n.Volume); err != nil {
		return err
	}
	if n.Snapshot == "" {
		return nil
	}
	return CheckName(n.Snapshot)
}
