package main

import (
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
)

func TestWordsMayBeShortenedTurnedAndLeftOut(t *testing.T) {
	for line, want := range map[string]string{
		"client device list":         "client device list",
		"cl dev li":                  "client device list",
		"devices list":               "device list",
		"list devices":               "device list",
		"list sessions":              "session list",
		"li s":                       "session list",
		"ls":                         "list",
		"device ls":                  "device list",
		"ls devices":                 "device list",
		"status rnbd0":               "show rnbd0",
		"--json list":                "list --output=json",
		"list --json":                "list --output=json",
		"unmap -- --json":            "unmap -- --json",
		"session list":               "session list",
		"ses li":                     "session list",
		"server list paths":          "server path list",
		"d li":                       "device list",
		"se dev li":                  "server device list",
		"p l":                        "path list",
		"list":                       "list",
		"list json":                  "list json",
		"show device rnbd0":          "device show rnbd0",
		"show device":                "show device",
		"show dev":                   "show dev",
		"map a from b":               "map a from b",
		"map device a from b":        "device map a from b",
		"map session from b":         "map session from b",
		"unm rnbd0":                  "unmap rnbd0",
		"client unm rnbd0 force":     "client unmap rnbd0 force",
		"remove s 1":                 "delete s 1",
		"rem s 1":                    "delete s 1 OR remap",
		"path rem s 1":               "path delete s 1",
		"disconnect session s":       "session disconnect s",
		"-o json client path list":   "client path list -o json",
		"--output=json dev list K":   "device list --output=json K",
		"cl --socket x dev li":       "client device list --socket x",
		"--timeout 1s map a from b":  "map --timeout 1s a from b",
		"dev li -state":              "device list ,-state",
		"dev li -state,devname":      "device list ,-state,devname",
		"path list -fabric":          "path list ,-fabric",
		"dev li -ojson":              "device list -ojson",
		"dev li -u K":                "device list -u K",
		"unmap -- -x":                "unmap -- -x",
		"help cl dev map":            "help client device map",
		"map help":                   "map --help",
		"device list help all":       "device list --help",
		"ver":                        "version",
		"exit":                       "exit-codes",
		"server run --pumps 3":       "server run --pumps 3",
		"map-line -":                 "map-line -",
		"map-l x":                    "map-line x",
		"session set s mp_policy=rr": "session set s mp_policy=rr",
	} {
		got, err := resolve(newRoot(), strings.Fields(line))
		if alternative := strings.Contains(want, " OR "); alternative {
			if err == nil {
				t.Errorf("%q is %q, want it to be ambiguous", line, strings.Join(got, " "))
			}
			continue
		}
		if err != nil || strings.Join(got, " ") != want {
			t.Errorf("%q is %q, %v, want %q", line, strings.Join(got, " "), err, want)
		}
	}
}

func TestUnclearWordsNameWhatTheyMayBe(t *testing.T) {
	for line, want := range map[string]string{
		"re":            `"re" is short for several commands: readd, reconnect, recover, remap, remove, resize`,
		"s":             "server, session, show",
		"se li":         "server, session",
		"cl":            "client, close",
		"cl rnbd0":      "client, close",
		"device re":     "recover, remap, resize",
		"devcie list":   `"devcie" for "rnbd"; did you mean "device"?`,
		"device lsit":   `"lsit" for "rnbd device"; did you mean "list"?`,
		"client mpa":    `did you mean "map"?`,
		"session unmap": `"unmap" for "rnbd session"`,
		"frobnicate":    `unknown command "frobnicate" for "rnbd"; see rnbd --help`,
		"help devcie":   `did you mean "device"?`,
	} {
		got, err := resolve(newRoot(), strings.Fields(line))
		if err == nil || exitCode(err) != exitUsage || !strings.Contains(err.Error(), want) {
			t.Errorf("%q is %q, %v, want an error with %s", line, strings.Join(got, " "), err, want)
		}
	}
}

// TestHabitsOfOtherToolsHaveHints runs command lines that other tools take.
func TestHabitsOfOtherToolsHaveHints(t *testing.T) {
	for line, want := range map[string]string{
		"rm rnbd0":       "rnbd unmap DEVICE",
		"device rm x":    "rnbd unmap DEVICE",
		"attach a":       "rnbd map DEVICE from SERVER",
		"info rnbd0":     "rnbd show",
		"unmap -f rnbd0": "write --force",
		"list -f":        "--watch",
		"show -f":        "-f chooses fields",
		"wait -f rnbd0":  "rnbd events --follow",
		"show -w rnbd0":  "rnbd list --watch",
		"list --watc":    "did you mean --watch?",
		"list --zzzzzzz": "rnbd list --help",
	} {
		err := execute(t.Context(), newRoot(), strings.Fields(line))
		if err == nil || exitCode(err) != exitUsage || !strings.Contains(hintOf(err), want) {
			t.Errorf("%q fails with %v and the hint %q, want one with %s", line, err, hintOf(err), want)
		}
	}
}

// TestEveryVerbHasHelp also finds the verbs that are alone with a word.
func TestEveryVerbHasHelp(t *testing.T) {
	all := nouns()
	verbs := generalVerbs(all)
	for _, n := range all {
		verbs = append(verbs, n.verbs...)
	}
	for _, v := range verbs {
		if v.short == "" || !strings.Contains(v.example, "rnbd ") || strings.HasSuffix(v.short, ".") {
			t.Errorf("%s has short help %q and example %q", v.name, v.short, v.example)
		}
		if v.min > 0 && v.args == "" || v.run == nil || v.on == 0 {
			t.Errorf("%s: %+v", v.name, v)
		}
		for _, line := range strings.Split(v.example, "\n") {
			words := strings.Fields(line)
			if !strings.HasPrefix(line, "  rnbd ") {
				t.Errorf("example of %s: %q", v.name, line)
			} else if _, err := resolve(newRoot(), words[1:]); err != nil {
				t.Errorf("example of %s: %v", v.name, err)
			}
		}
	}
}

// FuzzResolve: whatever is typed, the answer is a command line or an error of
// usage; words that were found resolve to themselves.
func FuzzResolve(f *testing.F) {
	for _, line := range []string{"cl dev li", "list p", "map a from b", "-o json path list -state", "help map", "-- x", "re", "dev li -", "--socket", "\x00"} {
		f.Add(line)
	}
	root := newRoot()
	f.Fuzz(func(t *testing.T, line string) {
		got, err := resolve(root, strings.Split(line, " "))
		if err != nil {
			if exitCode(err) != exitUsage {
				t.Fatalf("%q: %v", line, err)
			}
			return
		}
		if strings.Contains(line, "-") { // flags move behind the words, and mean more there
			return
		}
		again, err := resolve(root, got)
		if err != nil || strings.Join(again, " ") != strings.Join(got, " ") {
			t.Fatalf("%q is %q, and that is %q, %v", line, got, again, err)
		}
	})
}

func TestOptionWordsAreTaken(t *testing.T) {
	list, show := deviceNoun().verbs[0], deviceNoun().verbs[1]
	list.noun, show.noun = deviceNoun(), deviceNoun()
	show.max = 2
	mapping := mapVerbs()[0]
	mapping.noun = deviceNoun()
	for _, c := range []struct {
		v    *verb
		line string
		rest string
		want options
	}{
		{list, "", "", options{}},
		{list, "json", "", options{Options: report.Options{Format: "json"}}},
		{list, "K csv noheaders", "", options{Options: report.Options{Format: "csv", Unit: 'K', NoHeaders: true}}},
		{list, "sessname,state M", "", options{chosen: ",sessname,state", Options: report.Options{Unit: 'M'}}},
		{list, "state +size notree tree nototals", "", options{chosen: ",state,+size", Options: report.Options{NoTotals: true}}},
		{list, "all", "", options{chosen: ",all"}},
		{list, "verbose", "", options{verbose: true}},
		{show, "json", "json", options{}},
		{show, "t t", "t t", options{}},
		{mapping, "ro from T ro T", "ro from T", options{access: "ro", Options: report.Options{Unit: 'T'}}},
		{show, "state state", "state", options{chosen: ",state"}},
		{show, ",-state rnbd0", "rnbd0", options{chosen: ",,-state"}},
		{show, "rnbd0 xml", "rnbd0", options{Options: report.Options{Format: "xml"}}},
	} {
		var o options
		rest, err := o.takeWords(c.v, strings.Fields(c.line))
		if err != nil || strings.Join(rest, " ") != c.rest || o != c.want {
			t.Errorf("%s %q: %q, %+v, %v", c.v.name, c.line, rest, o, err)
		}
	}
	for line, want := range map[string]string{"stat": `did you mean "state"?`, "jsn": `did you mean "json"?`, "force": "does not take"} {
		c := &call{verb: list}
		var err error
		if c.args, err = c.takeWords(list, strings.Fields(line)); err == nil {
			err = c.keepNamed(&inventory{})
		}
		if err == nil || exitCode(err) != exitUsage || !strings.Contains(err.Error(), want) {
			t.Errorf("%q gives %v, want %s", line, err, want)
		}
	}
}

func TestAddressesAreToldFromNames(t *testing.T) {
	for s, want := range map[string]bool{
		"10.0.0.1": true, "10.0.0.1:1234": true, "10.0.0.1%rocev2": true, "10.0.0.2@10.0.0.1": true, "10.0.0.2,10.0.0.1": true,
		"fd00::1": true, "[fd00::1]:1234": true, "[fd00::1]": true, "::1@127.0.0.1": true, "ip:10.0.0.1": true, "gid:fe80::1": true,
		"[fe80::1%eth0]": true, "[fe80::1%eth0]:1234%iwarp": true, "[fe80::2%e]@[fe80::1%e]": true,
		"gid:[fe80::1]:1234": true, "gid:fe80::2@gid:fe80::1%ibverbs": true,
		"ip:10.0.0.2@ip:10.0.0.1": true, "127.0.0.1:99999": true,
		"storage": false, "web1@storage": false, "storage.example:1234": false, "10.0.0.2@storage": false, "demo": false, "": false, "@": false, "1234": false,
	} {
		if got := isAddress(s); got != want {
			t.Errorf("%q is an address: %t, want %t", s, got, want)
		}
	}
}

func TestSameURI(t *testing.T) {
	const uri = "nbd+unix:///rnbd0?socket=/run/rnbd/nbd.sock"
	for other, want := range map[string]bool{
		uri: true, "nbd+unix:///rnbd0?socket=%2Frun%2Frnbd%2Fnbd.sock": true, "nbd+unix:///rnbd1?socket=/run/rnbd/nbd.sock": false,
		"nbd+unix:///rnbd0?socket=/run/rnbd/other.sock": false, "nbds+unix:///rnbd0?socket=/run/rnbd/nbd.sock": false, "rnbd0": false, "": false, "%": false,
	} {
		if got := sameURI(uri, other); got != want {
			t.Errorf("%q is the same: %t, want %t", other, got, want)
		}
	}
}

func TestHostOf(t *testing.T) {
	const gid = "0000:0000:0000:0000:0000:ffff:0a00:0001"
	for addr, want := range map[string]string{
		"10.0.0.1:1234": "10.0.0.1", "[fd00::1]:1234": "fd00::1", "10.0.0.1": "10.0.0.1", "": "",
		"[fe80::1%eth0]:1234":    "[fe80::1%eth0]",
		"gid:[" + gid + "]:1234": "gid:" + gid, "gid:" + gid: "gid:" + gid,
	} {
		if got := hostOf(addr); got != want {
			t.Errorf("%q is on the host %q, want %q", addr, got, want)
		}
	}
}
