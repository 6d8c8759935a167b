package top

import (
	"fmt"
	"strings"
	"time"
	"unicode"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/fit"
)

// none stands for a value that is not known.
const none = "-"

// clean returns s without control characters: names come from other hosts, and a
// terminal would obey them.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 0xfe00 && r <= 0xfe0f: // would change the width of the one before
			return -1
		case r == '\n' || r == '\t':
			return ' '
		case !unicode.IsPrint(r):
			return '?'
		}
		return r
	}, s)
}

// size is the number of columns of a terminal that s takes.
func size(s string) int { return fit.Width(s) }

// cut shortens s at its end to limit columns; below 0: not at all.
func cut(s string, limit int) string {
	if limit < 0 {
		return s
	}
	return fit.End(s, limit)
}

// pad fills s up to n columns.
func pad(s string, n int, right bool) string {
	fill := strings.Repeat(" ", max(0, n-size(s)))
	if right {
		return fill + s
	}
	return s + fill
}

// scaled writes v with three digits and a unit of base; five columns at most.
func scaled(v, base float64, units string) string {
	unit := -1
	for v >= min(base, 999.5) && unit < len(units)-1 {
		v /= base
		unit++
	}
	switch {
	case unit < 0:
		return fmt.Sprintf("%.0f", v)
	case v < 9.995:
		return fmt.Sprintf("%.2f%c", v, units[unit])
	case v < 99.95:
		return fmt.Sprintf("%.1f%c", v, units[unit])
	}
	return fmt.Sprintf("%.0f%c", v, units[unit])
}

func number(v float64) string { return scaled(v, 1000, "kMGTPE") }
func bytes(v float64) string  { return scaled(v, 1024, "KMGTPE") }

func (r rate) number() string {
	if !r.known {
		return none
	}
	return number(r.value)
}

func (r rate) bytes() string {
	if !r.known {
		return none
	}
	return bytes(r.value)
}

// duration writes d with two or three digits; five columns at most.
func duration(d time.Duration) string {
	if d > 9999*time.Second { // the last bucket of a histogram has no end
		return ">137s"
	}
	units := []string{"ns", "us", "ms", "s"}
	v, unit := float64(d), 0
	for v >= 999.5 && unit < len(units)-1 {
		v /= 1000
		unit++
	}
	if v < 9.95 && unit > 0 {
		return fmt.Sprintf("%.1f%s", v, units[unit])
	}
	return fmt.Sprintf("%.0f%s", v, units[unit])
}
