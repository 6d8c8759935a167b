package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/rnbd-go/rnbd/modules/rnbd-client"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/names"
	"github.com/rnbd-go/rnbd/test/lab"
)

// foreignNames are names that a peer can send: those that have caused trouble, and
// random ones of a seed.
func foreignNames(t *testing.T) []string {
	list := []string{"s\xff\xe9", "caf\xe9", "a\nlevel=ERROR msg=forged", "\x1b[2J\x1b[31m", "\u202egnp", `CORP\alice`, `dev\x2d1`, "\x7f\x01", "a b\tc", "\xed\xa0\x80",
		"'\"`$(id)", "-o", "%s%n", strings.Repeat("\xfe", 200)}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for range 10 {
		b := make([]byte, 1+r.IntN(40))
		for i := range b {
			if b[i] = byte(1 + r.IntN(255)); b[i] == '/' || b[i] == '.' {
				b[i] = 0xff
			}
		}
		list = append(list, string(b))
	}
	return list
}

// checkText reports bytes that a terminal, a log or a reader of JSON would trip over.
func checkText(t *testing.T, what, text string) {
	t.Helper()
	if !utf8.ValidString(text) {
		t.Errorf("%s is not UTF-8: %q", what, text)
	}
	if i := strings.IndexFunc(text, func(r rune) bool { return !unicode.IsPrint(r) && r != '\n' && r != '\t' }); i >= 0 {
		t.Errorf("%s has a character that is not printable: %q", what, text[i:min(len(text), i+20)])
	}
}

// TestForeignNames has a peer send names of any bytes: of sessions, and of devices that
// are there and that are not. Every command about the server works then, and each
// session can be named and disconnected.
func TestForeignNames(t *testing.T) {
	l := lab.New(t)
	dir := l.Image("disk.img", 1<<20)
	l.Image("caf\xe9.img", 1<<20)
	log, sys := filepath.Join(l.Dir, "audit.json"), filepath.Join(l.Dir, "sys")
	s := l.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"}, Sys: sys, Extra: []string{"--metrics", "127.0.0.1:0", "--audit", log}})
	lib, err := (&house{t: t}).newClient(nil, "")
	if err != nil {
		t.Fatal(err)
	}
	var sessions []string
	for i, name := range foreignNames(t) {
		request := client.MapRequest{Path: "disk.img", Paths: s.Addrs, Session: name, Mode: blk.ReadOnly, Frontend: client.FrontendNone, Slots: 1}
		if i == 0 {
			request.Path = "caf\xe9.img"
		}
		if _, err := lib.Map(t.Context(), request); err != nil {
			t.Errorf("session %q is refused: %v", name, err)
			continue
		}
		sessions = append(sessions, name)
		request.Path = name
		if _, err := lib.Map(t.Context(), request); err == nil {
			t.Errorf("device %q is there", name)
		}
	}
	everyCommandWorks(t, s, sessions)
	for _, place := range []string{"class/rtrs-server", "class/rnbd-server/ctl/devices"} {
		entries, err := os.ReadDir(filepath.Join(sys, place))
		if err == nil && len(entries) == 0 {
			err = fmt.Errorf("it is empty")
		}
		if err != nil {
			t.Errorf("control files: %v", err)
		}
		for _, e := range entries {
			checkText(t, place, e.Name())
		}
	}
	for _, name := range sessions {
		rnbd(t, "server", "session", "disconnect", "--socket", s.Socket, "--", names.Spell(name)).want(t, 0)
	}
	closeLibrary(lib)
	everyCommandWorks(t, s, nil)
	for line := range strings.Lines(read(t, log)) {
		checkText(t, "the audit log", line)
		var r map[string]any
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Errorf("the audit log: %v", err)
		}
	}
	checkText(t, "the log", s.Log())
}

// everyCommandWorks asks all that a server shows. The names of sessions must be there,
// spelled.
func everyCommandWorks(t *testing.T, s *lab.Server, sessions []string) {
	t.Helper()
	for _, args := range []string{"server list", "server device list", "server session list", "server path list", "server events", "server show",
		"server session list -o json", "server device list -o json", "server device list -o csv", "server path list -o yaml", "server session list -o xml",
		"server events json", "top --once", "doctor"} {
		r := rnbd(t, append(strings.Fields(args), "--socket", s.Socket)...)
		if r.code != 0 && args != "doctor" {
			t.Errorf("%s: exit code %d: %s", args, r.code, r.err)
		}
		checkText(t, args, r.out+r.err)
	}
	var listed []struct {
		Name string `json:"sessname"`
	}
	out := rnbd(t, "server", "session", "list", "-o", "json", "--socket", s.Socket).out
	if err := json.Unmarshal([]byte(out), &listed); err != nil {
		t.Errorf("sessions: %v: %s", err, out)
	}
	found := map[string]bool{}
	for _, one := range listed {
		found[one.Name] = true
	}
	for _, name := range sessions {
		if !found[names.Spell(name)] {
			t.Errorf("session %q is not listed as %s", name, names.Spell(name))
		}
	}
	for _, page := range []string{"metrics", "status.json"} {
		answer, err := http.Get(pageOf(t, s.Log()) + page)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(answer.Body)
		answer.Body.Close()
		if err != nil || answer.StatusCode != http.StatusOK {
			t.Errorf("%s: %s, %v: %.300s", page, answer.Status, err, text)
		}
		checkText(t, page, string(text))
	}
}

// TestForeignNames_Mapped maps a file whose name is not UTF-8 by the name that discover
// lists, and uses the spelling in the commands of the client.
func TestForeignNames_Mapped(t *testing.T) {
	l := lab.New(t)
	dir := l.Image("caf\xe9 "+`\x41`+".img", 1<<20)
	s := l.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"}})
	c := l.Client(lab.ClientOptions{Extra: []string{"--config-dir", shortDir(t)}})
	const spelled = `caf\xe9 \\x41.img`
	rnbd(t, "discover", s.Addrs[0]).want(t, 0, spelled)
	rnbd(t, "map", spelled, "from", s.Addrs[0], "--name", "one", "--persist", "--socket", c.Socket).want(t, 0)
	rnbd(t, "client", "show", "one", "--socket", c.Socket).want(t, 0, spelled)
	rnbd(t, "client", "device", "list", "-o", "json", "--socket", c.Socket).want(t, 0)
	if err := c.Stop(); err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the mapping of the configuration is made again", func() bool {
		d, err := c.Device("one")
		return err == nil && d.State == "open" && d.Path == spelled
	})
	rnbd(t, "unmap", spelled, "--persist", "--socket", c.Socket).want(t, 0)
	rnbd(t, "map", "caf\xe9 "+`\\x41`+".img", "from", s.Addrs[0], "--socket", c.Socket).want(t, 0) // as bytes
}
