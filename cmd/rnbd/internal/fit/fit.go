// Package fit makes texts fit the columns of a terminal. Names lose their middle, since
// begin and end tell them apart, and different names stay different; lists lose whole
// items.
package fit

import (
	"fmt"
	"strings"
	"unicode"

	"golang.org/x/text/width"
)

const ellipsis = "…"

// cells returns the number of columns of a terminal that r takes.
func cells(r rune) int {
	if r < 0x300 {
		return 1
	}
	if unicode.In(r, unicode.Mn, unicode.Me) {
		return 0
	}
	if k := width.LookupRune(r).Kind(); k == width.EastAsianWide || k == width.EastAsianFullwidth {
		return 2
	}
	return 1
}

// Width returns the number of columns of a terminal that s takes.
func Width(s string) (n int) {
	for _, r := range s {
		n += cells(r)
	}
	return n
}

// End returns s, or as much of its begin as fits n columns with an ellipsis.
func End(s string, n int) string {
	if Width(s) <= n {
		return s
	}
	if n <= 0 {
		return ""
	}
	return head(s, n-1) + ellipsis
}

// Middle returns s, or begin and end of s with an ellipsis between them, in n columns.
func Middle(s string, n int) string {
	if Width(s) <= n {
		return s
	}
	if n <= 0 {
		return ""
	}
	begin := head(s, n/2)
	return begin + ellipsis + tail(s, n-1-Width(begin))
}

// head returns the longest begin of s that fits n columns.
func head(s string, n int) string {
	used := 0
	for i, r := range s {
		if used += cells(r); used > n {
			return s[:i]
		}
	}
	return s
}

// tail returns the longest end of s that fits n columns and begins with a letter, not
// with a mark that combines with the letter before.
func tail(s string, n int) string {
	runes := []rune(s)
	begin := len(runes)
	for i, used := len(runes)-1, 0; i >= 0; i-- {
		if used += cells(runes[i]); used > n {
			break
		}
		if cells(runes[i]) > 0 {
			begin = i
		}
	}
	return string(runes[begin:])
}

// Names returns each name in at most n columns. Different names have different short
// forms: those that would be equal end in a number.
func Names(all []string, n int) []string {
	short, owner := map[string]string{}, map[string]string{}
	out := make([]string, len(all))
	for i, name := range all {
		form, known := short[name]
		for k := 1; !known; k++ {
			form = Middle(name, n)
			if k > 1 {
				suffix := fmt.Sprintf("~%d", k)
				form = Middle(name, n-Width(suffix)) + suffix
			}
			_, taken := owner[form]
			known = !taken || n < Width(form)
		}
		short[name], owner[form] = form, name
		out[i] = End(form, n)
	}
	return out
}

// Distinct returns the smallest width from least to most in which Middle tells all names
// apart; most, if there is none.
func Distinct(all []string, least, most int) int {
	longest := 0
	for _, name := range all {
		longest = max(longest, Width(name))
	}
	for n := least; n < min(longest, most); n++ {
		if distinct(all, n) {
			return n
		}
	}
	return min(max(least, longest), max(least, most))
}

func distinct(all []string, n int) bool {
	owner := map[string]string{}
	for _, name := range all {
		form := Middle(name, n)
		if of, taken := owner[form]; taken && of != name {
			return false
		}
		owner[form] = name
	}
	return true
}

// Join joins the parts that fit n columns, in their order, with gap between them; n below
// 0: all. The first part is cut if it does not fit.
func Join(parts []string, gap string, n int) string {
	if n < 0 {
		return strings.Join(parts, gap)
	}
	line := ""
	for i, p := range parts {
		switch {
		case i == 0:
			line = End(p, n)
		case Width(line)+Width(gap)+Width(p) <= n:
			line += gap + p
		}
	}
	return line
}

// Verdict returns the line that says how many things need attention and which, in n
// columns, those that do not fit as a number; n below 0: all of them. Without things it
// returns an empty text.
func Verdict(things []string, n int) string {
	count := len(things)
	if count == 0 {
		return ""
	}
	line := "1 thing needs attention"
	if count > 1 {
		line = fmt.Sprintf("%d things need attention", count)
	}
	for shown := count; shown > 0; shown-- {
		whole := line + ": " + strings.Join(things[:shown], ", ")
		if shown < count {
			whole += fmt.Sprintf(" and %d more", count-shown)
		}
		if n < 0 || Width(whole) <= n {
			return whole
		}
	}
	if n >= 0 && Width(line) > n {
		return End(line, n)
	}
	return line
}

// Wrap breaks s into lines of at most n columns, at blanks where there are some; n below 2:
// one line.
func Wrap(s string, n int) (lines []string) {
	for s = strings.TrimSpace(s); n > 1 && Width(s) > n; {
		line := head(s, n)
		if i := strings.LastIndexByte(line, ' '); i > 0 && s[len(line)] != ' ' {
			line = line[:i]
		}
		lines = append(lines, strings.TrimRight(line, " "))
		s = strings.TrimLeft(s[len(line):], " ")
	}
	if s != "" {
		lines = append(lines, s)
	}
	return lines
}
