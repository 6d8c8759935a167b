package diskio

import (
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
)

// Server is the part of a plugin.Backend that is the same for all disks on
// descriptors: Configure and Serve. The zero value is fit for use; it is to be
// embedded.
type Server struct {
	prefer string // engine; empty: auto
	warned sync.Once
	count  Counters
}

// Counters count unusual events, and those worth knowing.
type Counters struct {
	Inline       atomic.Uint64 // requests that needed no engine
	BouncedBytes atomic.Uint64 // copied because of misaligned memory
	Retries      atomic.Uint64 // steps tried again after EAGAIN or EINTR
	Fallbacks    atomic.Uint64 // steps replaced because they were refused
}

func (c *Counters) add(o *Counters) {
	c.Inline.Add(o.Inline.Load())
	c.BouncedBytes.Add(o.BouncedBytes.Load())
	c.Retries.Add(o.Retries.Load())
	c.Fallbacks.Add(o.Fallbacks.Load())
}

// Counters are those of the queues that have ended.
func (s *Server) Counters() *Counters { return &s.count }

// Configure takes the setting "engine": auto (the default), uring or threads.
func (s *Server) Configure(settings map[string]string) error {
	for key, value := range settings {
		if key != "engine" {
			return fmt.Errorf("setting %q is not known, only engine is: %w", key, blk.EINVAL)
		}
		switch value {
		case "auto", "uring", "threads":
			s.prefer = value
		default:
			return fmt.Errorf("engine %q is not auto, uring or threads: %w", value, blk.EINVAL)
		}
	}
	return nil
}

// Serve runs the requests of r until it is closed and nothing is in flight.
// The disks of r must be Planners.
func (s *Server) Serve(r *plugin.Queue) error {
	signal.Ignore(unix.SIGXFSZ)
	engine, err := uring.NewEngine(uring.EngineConfig{Depth: r.Depth(), Prefer: s.preference()})
	if err != nil {
		return fmt.Errorf("serve queue %d: %w", r.Pump(), err)
	}
	defer engine.Close()
	s.warnOnce(engine)
	q := newQueue(r, engine)
	defer s.end(r.Pump(), q)
	if err := q.pump(fmt.Sprintf("disk%d", r.Pump())); err != nil {
		return fmt.Errorf("serve queue %d: %w", r.Pump(), err)
	}
	return nil
}

// pump runs the queue on the calling thread.
func (q *queue) pump(name string) error {
	p, err := pump.New(pump.Config{Name: name})
	if err != nil {
		return err
	}
	q.ring.UseClock(p.Now)
	if err := p.Add(outlet{q}); err != nil {
		return err
	}
	if err := p.Add(intake{q}); err != nil {
		return err
	}
	return p.Run(func() bool { return q.inFlight == 0 && q.ring.Closed() })
}

func (s *Server) preference() string {
	if s.prefer == "" {
		return "auto"
	}
	return s.prefer
}

// warnOnce tells, once per process, that io_uring was wanted and refused.
func (s *Server) warnOnce(e uring.Engine) {
	if s.preference() == "threads" || os.Getenv("RNBD_IO_ENGINE") == "threads" {
		return
	}
	if err := uring.Supported(); err != nil {
		s.warned.Do(func() { slog.Warn("no io_uring, using threads", "engine", e.Name(), "cause", err) })
	}
}

// end adds a queue's counters up.
func (s *Server) end(number int, q *queue) {
	s.count.add(&q.count)
	slog.Debug("queue ended", "queue", number, "inline", q.count.Inline.Load(), "bounced_bytes", q.count.BouncedBytes.Load(),
		"retries", q.count.Retries.Load(), "fallbacks", q.count.Fallbacks.Load())
}
