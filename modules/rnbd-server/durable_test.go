package server

import (
	"context"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// openFull opens a device for reading and asks for the verifier.
func (i *initiator) openFull(name string) rnbdwire.OpenRspFields {
	return i.openVerified(name, blk.ReadOnly)
}

// openToWrite opens a device for writing and asks for the verifier.
func (i *initiator) openToWrite(name string) rnbdwire.OpenRspFields {
	return i.openVerified(name, blk.ReadWrite)
}

func (i *initiator) openVerified(name string, mode blk.AccessMode) rnbdwire.OpenRspFields {
	i.t.Helper()
	msg, rsp := make([]byte, rnbdwire.OpenSize), make(rnbdwire.OpenRsp, rnbdwire.OpenRspFullSize)
	must(i.t, rnbdwire.OpenFields{AccessMode: uint8(mode), Name: name}.Put(msg))
	must(i.t, i.session.AdminRead(i.ctx(), msg, rsp))
	return rsp.Fields()
}

// verifyingDisk names the incarnation of its storage itself.
type verifyingDisk struct {
	*memDisk
	verifier string
}

func (d *verifyingDisk) Verifier() []byte { return []byte(d.verifier) }

// The verifier is another one when writes without a flush may be lost: with the kernel of
// the host, with the process of a plugin that keeps nothing, or as the plugin says.
func TestE053_VerifierNamesTheIncarnationOfTheStorage(t *testing.T) {
	type server struct {
		crash  plugin.CrashClass
		boot   string
		plugin string // verifier of the plugin itself
		cache  bool
	}
	keeps := plugin.KeepsAcknowledged
	verifier := func(t *testing.T, x server) rnbdwire.Verifier {
		mem := newMemory()
		mem.crash = x.crash
		mem.add("vol", 1<<20, func(l *blk.Limits) { l.WriteCache, l.FUA = x.cache, x.cache })
		if x.plugin != "" {
			mem.wrap = func(_ context.Context, _ plugin.OpenRequest, d *memDisk) (plugin.Disk, error) {
				return &verifyingDisk{d, x.plugin}, nil
			}
		}
		return newRig(t, mem, func(c *Config) { c.BootID = x.boot }).connect("s").openFull("vol").Verifier
	}
	for _, x := range []struct {
		name        string
		first, next server
		same        bool
	}{
		{"a restart of the daemon", server{keeps, "a", "", true}, server{keeps, "a", "", true}, true},
		{"a start of the host", server{keeps, "a", "", true}, server{keeps, "b", "", true}, false},
		{"a start of the host, without a cache", server{keeps, "a", "", false}, server{keeps, "b", "", false}, false},
		{"a plugin that loses all", server{plugin.LosesAll, "a", "", false}, server{plugin.LosesAll, "a", "", false}, false},
		{"a plugin that keeps what was flushed", server{plugin.KeepsFlushed, "a", "", true}, server{plugin.KeepsFlushed, "a", "", true}, false},
		{"a remote store, from another host", server{keeps, "a", "x", true}, server{keeps, "b", "x", true}, true},
		{"a remote store that was started again", server{keeps, "a", "x", true}, server{keeps, "a", "y", true}, false},
	} {
		t.Run(x.name, func(t *testing.T) {
			first, next := verifier(t, x.first), verifier(t, x.next)
			loses := x.first.cache || x.first.crash == plugin.LosesAll
			if first.IsSame(next) != x.same || first == 0 || first.LosesWrites() != loses {
				t.Errorf("%x, then %x", first, next)
			}
		})
	}
}

// A client that asks for 56 bytes, as a kernel does, gets them.
func TestE053_VerifierOnlyToClientsThatAskForIt(t *testing.T) {
	mem := newMemory()
	mem.crash = plugin.KeepsAcknowledged
	mem.add("vol", 1<<20)
	i := newRig(t, mem).connect("s")
	full := i.openFull("vol")
	short, err := i.open("vol", blk.ReadOnly)
	must(t, err)
	if full.Verifier == 0 || short.Verifier != 0 || short.Sectors != full.Sectors {
		t.Errorf("asked for 64 bytes %+v, for 56 %+v", full, short)
	}
}
