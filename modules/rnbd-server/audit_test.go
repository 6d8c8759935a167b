package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/audit"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/curb"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// auditRecords are the records in a file.
func auditRecords(t *testing.T, file string) (out []audit.Record) {
	t.Helper()
	text, err := os.ReadFile(file)
	must(t, err)
	for line := range strings.Lines(string(text)) {
		var r audit.Record
		must(t, json.Unmarshal([]byte(line), &r))
		out = append(out, r)
	}
	return out
}

// TestAudit_RefusalsAreBounded: a stranger whose handshakes fail leaves a few lines
// and a number, and crowds out no line of another client. What peers have chosen is
// escaped and cut.
func TestAudit_RefusalsAreBounded(t *testing.T) {
	file := filepath.Join(t.TempDir(), "audit.json")
	log, err := audit.Open(file, "server", slog.New(slog.DiscardHandler))
	must(t, err)
	r := newRig(t, newMemory(), func(c *Config) { c.Audit = log })
	stranger, other := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	server := netip.MustParseAddrPort("10.0.0.1:1234")
	h := (*handler)(r.server)
	for i := range 10000 {
		h.Refused(rtrs.Refusal{Client: netip.AddrPortFrom(stranger, uint16(i+1)), Server: server, Fabric: "iwarp", Handshake: true, Claimed: "dns:x",
			Err: errors.New("a\x1b[2J\n\u0085" + strings.Repeat("b", 10000))})
	}
	h.Refused(rtrs.Refusal{Client: netip.AddrPortFrom(other, 1), Server: server, Fabric: "iwarp", Session: "s", Err: errors.New("no proof")})
	r.server.strangers.Flush()
	must(t, log.Close())

	records := auditRecords(t, file)
	if len(records) != curb.PerAddr+2 {
		t.Fatalf("%d lines", len(records))
	}
	for i, rec := range records[:curb.PerAddr] {
		if want := fmt.Sprintf("192.0.2.1:%d", i+1); rec.Event != "handshake" || rec.Client != want || rec.Server != "10.0.0.1:1234" || rec.Fabric != "iwarp" ||
			rec.Claimed != "dns:x" || rec.Identity != "" || rec.Missing != 0 || len(rec.Result) > 300 || !strings.HasPrefix(rec.Result, "a?[2J??bbb") {
			t.Errorf("line %d: %+v", i, rec)
		}
	}
	if rec := records[curb.PerAddr]; rec.Event != "proof" || rec.Client != "192.0.2.2:1" || rec.Session != "s" || rec.Result != "no proof" {
		t.Errorf("another client: %+v", rec)
	}
	if rec := records[curb.PerAddr+1]; rec.LeftOut != 10000-curb.PerAddr || rec.Client != "192.0.2.1" || rec.Event != "handshake" || rec.Claimed != "" {
		t.Errorf("the rest: %+v", rec)
	}
}
