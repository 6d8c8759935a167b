package rtrswire

import (
	"bytes"
	"strings"
	"testing"
)

func TestReasons(t *testing.T) {
	long := strings.Repeat("x", 300)
	for _, c := range []struct{ text, inRefusal, inMessage string }{
		{"", "", ""}, {"64 of 64 sessions", "64 of 64 sessions", "64 of 64 sessions"},
		{"a\x1b[31m\n\xffb", "a?[31m??b", "a?[31m??b"}, {long, long[:MaxRefusalText], long[:MaxReasonText]},
	} {
		m := make(ConnRsp, ConnRspLen)
		m.Put(&ConnRspFields{Errno: -12, Features: FeatureReason})
		m.PutReason(ReasonLimit, c.text)
		if code, text := m.Reason(); code != ReasonLimit || text != c.inRefusal || m.Errno() != -12 || m.Check() != nil {
			t.Errorf("refusal for %q: code %d, %q", c.text, code, text)
		}
		r := AppendReason(nil, 104, ReasonName, c.text)
		if !r.Valid() || r.Errno() != 104 || r.Code() != ReasonName || r.Text() != c.inMessage {
			t.Errorf("message for %q: % x", c.text, []byte(r))
		}
	}
	kernel := make(ConnRsp, ConnRspLen)
	kernel.Put(&ConnRspFields{Errno: -12})
	kernel[refusalCode], kernel[refusalText] = 3, 'x'
	if code, text := kernel.Reason(); code != ReasonOther || text != "" {
		t.Errorf("a refusal without the announcement has the reason %d %q", code, text)
	}
	if got, want := AppendReason(nil, 13, ReasonAddress, "no"), []byte{0x85, 0, 1, 0, 13, 0, 2, 0, 'n', 'o'}; !bytes.Equal(got, want) {
		t.Errorf("% x, want % x", []byte(got), want)
	}
}

// FuzzReason has a server send any bytes as a reason: what is taken is short and printable.
func FuzzReason(f *testing.F) {
	f.Add([]byte(AppendReason(nil, 13, ReasonAddress, "no")))
	refusal := make(ConnRsp, ConnRspLen)
	refusal.Put(&ConnRspFields{Errno: -12, Features: FeatureReason})
	refusal.PutReason(ReasonLimit, "64 of 64 sessions")
	f.Add([]byte(refusal))
	f.Fuzz(func(t *testing.T, b []byte) {
		var texts []string
		if m := ReasonMsg(b); m.Valid() {
			texts = append(texts, m.Text())
			if again := AppendReason(nil, m.Errno(), m.Code(), m.Text()); again.Text() != m.Text() || again.Code() != m.Code() {
				t.Errorf("% x became % x", b, []byte(again))
			}
		}
		if m := ConnRsp(b); m.Check() == nil {
			_, text := m.Reason()
			texts = append(texts, text)
		}
		for _, text := range texts {
			if len(text) > MaxReasonText || strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r > '~' }) {
				t.Errorf("text %q", text)
			}
		}
	})
}
