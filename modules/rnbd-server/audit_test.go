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
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/audit"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ratelimit"
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
	log, err := audit.Open(file, "server", audit.Continue, slog.New(slog.DiscardHandler))
	must(t, err)
	r := newRig(t, newMemory(), func(c *Config) { c.Audit = log })
	stranger, other := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	server := netip.MustParseAddrPort("10.0.0.1:1234")
	h := (*rtrsHandler)(r.server)
	for i := range 10000 {
		h.Refused(rtrs.Refusal{Client: netip.AddrPortFrom(stranger, uint16(i+1)), Server: server, Fabric: "iwarp", Handshake: true, Claimed: "dns:x",
			Err: errors.New("a\x1b[2J\n\u0085" + strings.Repeat("b", 10000))})
	}
	h.Refused(rtrs.Refusal{Client: netip.AddrPortFrom(other, 1), Server: server, Fabric: "iwarp", Session: "s", Err: errors.New("no proof")})
	must(t, log.Close())

	records := auditRecords(t, file)
	if len(records) != ratelimit.Refusals.Burst+2 {
		t.Fatalf("%d lines", len(records))
	}
	for i, rec := range records[:ratelimit.Refusals.Burst] {
		if want := fmt.Sprintf("192.0.2.1:%d", i+1); rec.Event != "handshake" || rec.Client != want || rec.Server != "10.0.0.1:1234" || rec.Fabric != "iwarp" ||
			rec.Claimed != "dns:x" || rec.Identity != "" || rec.Missing != 0 || len(rec.Result) > 300 || !strings.HasPrefix(rec.Result, `a\x1b[2J\x0a\xc2\x85bbb`) {
			t.Errorf("line %d: %+v", i, rec)
		}
	}
	if rec := records[ratelimit.Refusals.Burst]; rec.Event != "proof" || rec.Client != "192.0.2.2:1" || rec.Session != "s" || rec.Result != "no proof" {
		t.Errorf("another client: %+v", rec)
	}
	if rec := records[ratelimit.Refusals.Burst+1]; rec.LeftOut != uint64(10000-ratelimit.Refusals.Burst) || rec.Client != "192.0.2.1" || rec.Event != "handshake" || rec.Claimed != "" {
		t.Errorf("the rest: %+v", rec)
	}
}

// TestAudit_OpensOfASessionAreBounded: a client with a session that is refused again and
// again leaves a few lines and a number, and its device that does open has a line.
func TestAudit_OpensOfASessionAreBounded(t *testing.T) {
	file := filepath.Join(t.TempDir(), "audit.json")
	log, err := audit.Open(file, "server", audit.Continue, slog.New(slog.DiscardHandler))
	must(t, err)
	mem := newMemory()
	mem.add("vol", 1<<20)
	r := newRig(t, mem, func(c *Config) { c.Audit = log })
	s := r.connect("s1")
	const many = 300
	for range many {
		if _, err := s.open("none", blk.ReadOnly); err == nil {
			t.Fatal("a device is there")
		}
	}
	_, err = s.open("vol", blk.ReadOnly)
	must(t, err)
	must(t, log.Close())
	refused, opened, leftOut := 0, 0, uint64(0)
	for _, rec := range auditRecords(t, file) {
		switch {
		case rec.LeftOut > 0:
			leftOut += rec.LeftOut
		case rec.Event == audit.EventOpen && rec.Result == audit.OK:
			opened++
		case rec.Event == audit.EventOpen:
			refused++
		}
	}
	if refused != ratelimit.Refusals.Burst || opened != 1 || leftOut != uint64(many-ratelimit.Refusals.Burst) {
		t.Errorf("%d refused, %d opened, %d left out", refused, opened, leftOut)
	}
}

// TestAudit_AFullDiskRefuses: with that policy a server whose records are lost opens no
// device, until a record is written again.
func TestAudit_AFullDiskRefuses(t *testing.T) {
	log, err := audit.Open(filepath.Join(t.TempDir(), "audit.json"), "server", audit.Refuse, slog.New(slog.DiscardHandler))
	must(t, err)
	mem := newMemory()
	mem.add("vol", 1<<20)
	r := newRig(t, mem, func(c *Config) { c.Audit = log })
	s := r.connect("s1")
	must(t, log.Close()) // each record after that is lost
	log.Add(audit.Record{})
	if _, err := s.open("vol", blk.ReadOnly); !errors.Is(err, syscall.EAGAIN) {
		t.Errorf("opened without a record: %v", err)
	}
}
