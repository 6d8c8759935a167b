package server

// The incarnation of a device's storage in OPEN_RSP: docs/extend/protocol/rnbd.md, "Writes that
// a power cut loses". A client that opens a device again compares the numbers. Another
// one says that writes which were acknowledged, and not flushed, may be lost.

import (
	"fmt"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// verifierOf returns the verifier of a disk that the process of that generation has opened.
// A plugin that names no incarnation loses writes with its process, or with the kernel, as
// its crash class says. 0, where the boot id is not known, tells clients nothing.
func (p *ioPlugin) verifierOf(generation uint32, opened *plugin.OpenedDisk) rnbdwire.Verifier {
	s := p.server
	switch {
	case len(opened.Verifier) > 0:
		return rnbdwire.NewVerifier(volumeID("plugin", p.cfg.Name, string(opened.Verifier)), true)
	case p.info().Crash != plugin.KeepsAcknowledged:
		return rnbdwire.NewVerifier(volumeID("process", fmt.Sprint(s.number), p.cfg.Name, fmt.Sprint(generation)), true)
	case s.cfg.BootID == "":
		return 0
	}
	return rnbdwire.NewVerifier(volumeID("boot", s.incarnation.now()), opened.Limits.WriteCache)
}

// noteWriter records that d, which is open for writing, has to be flushed before the host is
// shut down in order. The verifier of another plugin does not depend on that.
func (s *Server) noteWriter(d *device, opened *plugin.OpenedDisk) {
	if d.key.readOnly || len(opened.Verifier) > 0 || d.plugin.info().Crash != plugin.KeepsAcknowledged || !opened.Limits.WriteCache {
		return
	}
	path := d.path
	if d.file == nil {
		path = noPath
	}
	if err := s.incarnation.noteOpen(path); err != nil {
		s.log.Error("an orderly stop is not recorded", "err", err)
	}
}

// errOtherIncarnation is the reason of the EIO that a flush gets.
var errOtherIncarnation = fmt.Errorf("the storage behind the plugin was restarted without its caches: writes that were acknowledged after the last flush may be lost: %w", syscall.EIO)

// noteIncarnation compares the verifier of d, which in has opened again, with that of
// before. Sessions that stay up do not open d again, so where it is another one the server
// makes their next flush fail itself.
func (p *ioPlugin) noteIncarnation(in *supervise.Instance, d *device, opened *plugin.OpenedDisk) {
	now := p.verifierOf(in.Generation, opened)
	was := rnbdwire.Verifier(d.verifier.Swap(uint64(now)))
	if was.LosesWrites() && now != 0 && !was.IsSame(now) && !d.key.readOnly {
		p.server.flushFailed(p.server.historyOf(d.key.id), d.name, errOtherIncarnation)
	}
}
