package rnbdwire

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestE061_ReasonTextsAreOneLineOfBoundedLength(t *testing.T) {
	for in, want := range map[string]string{
		"":                             "",
		"another client has it":        "another client has it",
		"a\nb\x1b[31m\x00":             "a?b?[31m?",
		"\xff\xfe":                     "??",
		strings.Repeat("x", 600):       strings.Repeat("x", MaxReasonText),
		strings.Repeat("x", 503) + "é": strings.Repeat("x", 503),
		"caf\u00e9 \u202e":             "café ?",
	} {
		m := make(Reason, ReasonSize)
		ReasonFields{Code: ReasonRules, Text: in}.Put(m)
		if f := m.Fields(); !m.IsValid() || f.Text != want || f.Code != ReasonRules {
			t.Errorf("%q arrives as %+v", in, f)
		}
	}
}

// A server that sends anything cannot reach the user's terminal with it.
func FuzzReason(f *testing.F) {
	m := make(Reason, ReasonSize)
	ReasonFields{Code: 1, Text: "text"}.Put(m)
	f.Add([]byte(m))
	f.Fuzz(func(t *testing.T, b []byte) {
		if m := Reason(b); m.IsValid() {
			if s := m.Fields().Text; !utf8.ValidString(s) || strings.ContainsAny(s, "\n\r\x1b\x00") || len(s) > MaxReasonText {
				t.Errorf("%q", s)
			}
		}
		if m := AskReason(b); m.IsValid() {
			again := make(AskReason, AskReasonSize)
			PutAskReason(again, m.Name())
			if again.Name() != m.Name() {
				t.Errorf("%q became %q", m.Name(), again.Name())
			}
		}
	})
}
