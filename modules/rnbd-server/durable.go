package server

// The incarnation of a device's storage in OPEN_RSP: docs/extend/protocol/rnbd.md, "Writes that
// a power cut loses". A client that opens a device again compares the numbers. Another
// one says that writes which were acknowledged, and not flushed, may be lost.

import (
	"fmt"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// verifier returns the verifier of a disk that the process of that generation has opened.
// A plugin that names no incarnation loses writes with its process, or with the kernel, as
// its crash class says. 0, where the boot id is not known, tells clients nothing.
func (p *ioPlugin) verifier(generation uint32, opened *plugin.OpenedDisk) rnbdwire.Verifier {
	s := p.server
	switch {
	case len(opened.Verifier) > 0:
		return rnbdwire.NewVerifier(volume("plugin", p.cfg.Name, string(opened.Verifier)), true)
	case p.info().Crash != plugin.KeepsAcknowledged:
		return rnbdwire.NewVerifier(volume("process", fmt.Sprint(s.number), p.cfg.Name, fmt.Sprint(generation)), true)
	case s.cfg.BootID == "":
		return 0
	}
	return rnbdwire.NewVerifier(volume("boot", s.cfg.BootID), opened.Limits.WriteCache)
}
