package server

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/audit"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/journal"
	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/tlsauth"
)

// judged is a rig whose clients prove their identities by shared keys.
type judged struct {
	*rig
	keys    *tlsauth.Auth
	file    string
	lines   map[string]string // by identity
	journal *journal.Journal
	audit   *audit.Log
	records string // file
}

func newJudged(t *testing.T, identities ...string) *judged {
	t.Helper()
	mem := newMemory()
	mem.add("d", 1<<20)
	return newJudgedWith(t, mem, func(*Config) {}, identities...)
}

// newJudgedWith is newJudged with a plugin of the test's, and a change of the
// configuration.
func newJudgedWith(t *testing.T, mem *memory, change func(*Config), identities ...string) *judged {
	t.Helper()
	dir := t.TempDir()
	j := &judged{file: filepath.Join(dir, "keys"), lines: map[string]string{}, journal: journal.New(100), records: filepath.Join(dir, "audit.json")}
	for _, id := range identities {
		line, err := tlsauth.NewPSK(id)
		must(t, err)
		j.lines[id] = line
	}
	j.write(t, identities...)
	var err error
	j.keys, err = tlsauth.New(tlsauth.Config{Files: tlsauth.Files{PSK: j.file}, Logger: slog.New(slog.DiscardHandler)})
	must(t, err)
	j.audit, err = audit.Open(j.records, "server", audit.Continue, slog.New(slog.DiscardHandler))
	must(t, err)
	t.Cleanup(func() { j.audit.Close() })
	j.rig = newRig(t, mem, func(c *Config) {
		c.Auth, c.Journal, c.Audit = j.keys, j.journal, j.audit
		c.Listen[0].Auth = rtrs.AuthRequire
		change(c)
	})
	return j
}

// write has the server's file have the keys of identities.
func (j *judged) write(t *testing.T, identities ...string) {
	t.Helper()
	var all strings.Builder
	for _, id := range identities {
		all.WriteString(j.lines[id])
	}
	must(t, os.WriteFile(j.file, []byte(all.String()), 0o600))
}

// as connects a client with the key of an identity.
func (j *judged) as(t *testing.T, identity string) *initiator {
	t.Helper()
	file := filepath.Join(t.TempDir(), "key")
	must(t, os.WriteFile(file, []byte(j.lines[identity]), 0o600))
	a, err := tlsauth.New(tlsauth.Config{Files: tlsauth.Files{PSK: file}, Logger: slog.New(slog.DiscardHandler)})
	must(t, err)
	j.auth = a
	return j.connect(identity)
}

// keep has the server's file have these identities only, and the server look at it.
func (j *judged) keep(t *testing.T, grace time.Duration, identities ...string) {
	t.Helper()
	j.write(t, identities...)
	must(t, j.keys.Reload(true))
	j.server.RecheckIdentities(grace)
}

// A session ends when the identity of its client does not hold any more, with a record
// and an event. Its neighbour goes on.
func TestJudge_AnIdentityThatIsTakenAway(t *testing.T) {
	j := newJudged(t, "a", "b")
	a, b := j.as(t, "a"), j.as(t, "b")
	for _, i := range []*initiator{a, b} {
		_, err := i.open("d", blk.ReadOnly)
		must(t, err)
	}
	j.keep(t, time.Millisecond, "b")
	eventually(t, "the session ends, and then its devices are closed", func() bool {
		_, err := j.server.sessionByName("a")
		return err != nil && j.openMappings() < 2
	})
	if _, err := j.server.sessionByName("b"); err != nil || j.openMappings() != 1 {
		t.Errorf("%v, %d devices are open", err, j.openMappings())
	}
	eventually(t, "the client is not let in again", func() bool {
		return strings.Contains(readAll(t, j.records), `"event":"proof"`)
	})
	if _, err := j.server.sessionByName("a"); err == nil {
		t.Error("the session is back")
	}
	forced := 0
	for _, r := range auditRecords(t, j.records) {
		if r.Event == audit.EventForced {
			forced++
			if r.Session != "a" || r.Identity != "psk:a" || r.Client == "" || !strings.Contains(r.Reason, "not in the file of shared keys any more") {
				t.Errorf("record: %+v", r)
			}
		}
	}
	told := 0
	for _, e := range j.journal.After(0) {
		if e.Kind == journal.Path && e.To == "closed" && e.Session == "a" && strings.Contains(e.Why, "any more") {
			told++
		}
	}
	if forced != 1 || told != 1 {
		t.Errorf("%d records, %d events", forced, told)
	}
}

func readAll(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	must(t, err)
	return string(b)
}

// A session goes on for the grace time, and after it if the identity holds again.
func TestJudge_GraceTime(t *testing.T) {
	j := newJudged(t, "a", "b")
	i := j.as(t, "a")
	dev, err := i.open("d", blk.ReadOnly)
	must(t, err)
	const grace = 50 * time.Millisecond
	j.keep(t, time.Hour, "b")
	j.keep(t, grace, "a", "b")
	time.Sleep(3 * grace)
	must(t, i.read(dev.DeviceID, 0).Err())
	if _, err := j.server.sessionByName("a"); err != nil || j.openMappings() != 1 {
		t.Errorf("%v, %d devices are open", err, j.openMappings())
	}
}

// Sessions whose clients have proved no identity are not judged.
func TestJudge_WithoutIdentity(t *testing.T) {
	mem := newMemory()
	mem.add("d", 1<<20)
	r := newRig(t, mem)
	r.connect("s")
	if d := r.server.unprovedPaths(); len(d) != 0 {
		t.Errorf("%+v", d)
	}
}
