package tlsauth

import (
	"bytes"
	"log/slog"
	"os"
	"testing"
)

// Handover has the files as they were when all could be used.
func TestHandover(t *testing.T) {
	a := newAuthority(t, "ca")
	f := a.issue("front", nil)
	read := func(name string) []byte { return must(os.ReadFile(name)) }
	auth := must(NewHandover(Config{Files: f, Logger: slog.New(slog.DiscardHandler)}))
	same := func(h Handover) bool {
		return bytes.Equal(h.Cert, read(f.Cert)) && bytes.Equal(h.Key, read(f.Key)) && bytes.Equal(h.CA, read(f.CA))
	}
	first := auth.Handover()
	if !same(first) {
		t.Error("the contents differ")
	}
	a.issue("front", nil) // the same names
	second := auth.Handover()
	if !same(second) || bytes.Equal(first.Key, second.Key) {
		t.Error("new files are not seen")
	}
	if err := os.WriteFile(f.Key, []byte("garbage"), 0o600); err != nil {
		t.Fatal(err)
	}
	if h := auth.Handover(); !bytes.Equal(h.Key, second.Key) || !bytes.Equal(h.Cert, second.Cert) {
		t.Error("a broken file is handed over")
	}
	other := a.issue("other", nil)
	bare := must(NewHandover(Config{Files: Files{Cert: other.Cert, Key: other.Key}, Logger: slog.New(slog.DiscardHandler)}))
	if h := bare.Handover(); h.CA != nil || h.Cert == nil {
		t.Errorf("without a CA: %d bytes of one", len(h.CA))
	}
}
