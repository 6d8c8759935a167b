package client

import (
	"context"
	"crypto/rand"
	"slices"
	"strings"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// Probe is the result of a short session over one path to a server.
type Probe struct {
	Fabric     string
	Version    uint8           // of the protocol
	Features   uint16          // extensions of the server, as in docs/extend/protocol/rnbd.md; 0: a kernel
	QueueDepth int             // requests in flight per session
	MaxIO      int             // bytes of the largest request
	Latency    []time.Duration // round trips of small messages to the server, the shortest first
}

// Median returns the median round trip, 0 without any.
func (p *Probe) Median() time.Duration {
	if len(p.Latency) == 0 {
		return 0
	}
	return p.Latency[len(p.Latency)/2]
}

// Probe opens a session over one path, written as in MapRequest, sends rounds
// messages one after the other, and closes the session. It maps nothing. ctx
// bounds the time. The errors are those of Map.
func (c *Client) Probe(ctx context.Context, path string, rounds int) (p Probe, err error) {
	err = c.withSession(ctx, "", []string{path}, func(s *session) error {
		p = Probe{
			Fabric: s.fabric, Version: s.version, Features: uint16(s.features.Load()),
			QueueDepth: s.transport.QueueDepth(), MaxIO: s.maxIO(),
		}
		msg := make(rnbdwire.SessInfo, rnbdwire.SessInfoSize)
		rnbdwire.SessInfoFields{Version: rnbdwire.Version}.Put(msg)
		rsp := make(rnbdwire.SessInfoRsp, rnbdwire.SessInfoRspSize)
		for range rounds {
			start := time.Now()
			if err := s.transport.AdminRead(ctx, msg, rsp); err != nil {
				return err
			}
			p.Latency = append(p.Latency, time.Since(start))
		}
		slices.Sort(p.Latency)
		return nil
	})
	return p, err
}

// withSession opens a session, calls f and closes the session. If name is empty the
// session gets one that no other session has.
func (c *Client) withSession(ctx context.Context, name string, paths []string, f func(*session) error) error {
	if name == "" {
		clean := strings.NewReplacer("/", "-", ".", "-")
		name = clean.Replace(c.cfg.Hostname) + "-visit-" + strings.ToLower(rand.Text()[:12])
	}
	s, err := c.openSession(ctx, name, MapRequest{Paths: paths})
	if err != nil {
		return err
	}
	err = f(s)
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), forcedClose)
	defer cancel()
	if cerr := s.close(closing); cerr != nil {
		s.log.Debug("closing the session failed", "err", cerr)
	}
	return err
}
