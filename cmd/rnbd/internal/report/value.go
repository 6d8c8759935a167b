package report

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

type (
	// Bytes is an amount of data.
	Bytes uint64
	// Sectors is an amount of data in sectors of 512 bytes.
	Sectors uint64
	// Count is a number of things that can be summed up.
	Count uint64
	// Limit is a size in bytes that is no amount, so that sums make no sense.
	Limit uint64
)

const sectorSize = 512

// Units are the letters of binary units, each 1024 times the one before.
const Units = "BKMGTPE"

// ParseUnit reads a unit's letter.
func ParseUnit(s string) (unit byte, ok bool) {
	u := strings.ToUpper(s)
	if len(u) != 1 || !strings.Contains(Units, u) {
		return 0, false
	}
	return u[0], true
}

// ParseSize reads a number of bytes: "10737418240", "10G", or "10" with the
// unit given apart.
func ParseSize(s string, unit byte) (uint64, error) {
	digits := s
	if n := len(s); n > 0 && (s[n-1] < '0' || s[n-1] > '9') {
		u, ok := ParseUnit(s[n-1:])
		if !ok || unit != 0 {
			return 0, fmt.Errorf("%q: write a number and one of the units B, K, M, G, T, P, E", s)
		}
		digits, unit = s[:n-1], u
	}
	n, err := strconv.ParseUint(digits, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%q: write a number and one of the units B, K, M, G, T, P, E", s)
	}
	shift := 10 * max(0, strings.IndexByte(Units, unit))
	if n<<shift>>shift != n {
		return 0, fmt.Errorf("%q: it is larger than any device", s)
	}
	return n << shift, nil
}

// scaled is n bytes in unit, with up to three decimals.
func scaled(n uint64, unit byte) string {
	i := strings.IndexByte(Units, unit)
	if i <= 0 {
		return strconv.FormatUint(n, 10)
	}
	s := strconv.FormatFloat(float64(n)/float64(uint64(1)<<(10*i)), 'f', 3, 64)
	return strings.TrimSuffix(strings.TrimRight(s, "0"), ".")
}

// Human is n bytes with the unit that suits it.
func Human(n uint64) string {
	f, u := float64(n), 0
	for f >= 1024 && u < len(Units)-1 {
		f /= 1024
		u++
	}
	return strings.TrimSuffix(fmt.Sprintf("%.1f", f), ".0") + Units[u:u+1]
}

// text is a cell for people.
func text(v any, unit byte) string {
	switch v := v.(type) {
	case nil:
		return "-"
	case Sectors:
		return text(Bytes(v*sectorSize), unit)
	case Limit:
		return text(Bytes(v), unit)
	case Bytes:
		if unit == 0 {
			return Human(uint64(v))
		}
		return scaled(uint64(v), unit) + string(unit)
	case []string:
		return text(strings.Join(v, " "), unit)
	case string:
		if v == "" {
			return "-"
		}
		return printable(v)
	case bool:
		if v {
			return "yes"
		}
		return "no"
	}
	return fmt.Sprint(v)
}

// printable keeps a peer's names from moving the cursor.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if strconv.IsPrint(r) {
			return r
		}
		return '?'
	}, strings.ToValidUTF8(s, "?"))
}

// plain is a cell for programs: a number stands without a unit. quoted: it is
// text, no number, boolean or nothing.
func plain(v any, unit byte) (s string, quoted bool) {
	switch v := v.(type) {
	case nil:
		return "", false
	case Bytes:
		return scaled(uint64(v), unit), false
	case Limit:
		return scaled(uint64(v), unit), false
	case Sectors:
		if unit == 0 {
			return strconv.FormatUint(uint64(v), 10), false
		}
		return scaled(uint64(v)*sectorSize, unit), false
	case time.Duration:
		return strconv.FormatInt(v.Nanoseconds(), 10), false
	case string:
		return strings.ToValidUTF8(v, "\uFFFD"), true
	}
	return fmt.Sprint(v), false
}

// number reports whether v is aligned to the right.
func number(v any) bool {
	switch v.(type) {
	case Bytes, Sectors, Count, Limit, uint64, int64, float64, time.Duration:
		return true
	}
	return false
}
