package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
)

// disk is an open export.
type disk struct {
	b        *backend
	hub      *hub
	name     string
	export   string
	readOnly bool
	flags    uint16 // transmission flags of the export
	ctx      context.Context
	cancel   context.CancelFunc

	// Of the thread of the hub.
	limits  blk.Limits
	conns   []*conn // those that take requests
	want    int     // connections to have
	waiting opList  // requests without a connection
	down    bool    // requests without a connection fail at once
	held    bool    // connections are being replaced
	dialing bool
	closed  bool

	// acked counts the answered writes, and flushed is its value at the start of the last
	// flush that has succeeded. A remote server that was started again may have lost
	// the writes between: the next flush fails then.
	acked, flushed uint64
	mayHaveLost    bool
}

// submit gives o to the connection with the fewest requests.
func (d *disk) submit(o *op) {
	var best *conn
	for _, c := range d.conns {
		if best == nil || c.inFlight < best.inFlight {
			best = c
		}
	}
	switch {
	case best != nil:
		best.push(o)
	case d.down || d.closed:
		o.finish(blk.EIO)
	default:
		d.waiting.push(o)
	}
}

// answered keeps account of what a flush covers. A flush that cannot say that all writes
// before it are safe becomes an error, once.
func (d *disk) answered(o *op, e *blk.Errno) {
	switch {
	case *e != blk.OK:
	case o.req.Op.Modifies():
		d.acked++
	case o.req.Op == blk.Flush:
		d.flushed = max(d.flushed, o.epoch)
		if d.mayHaveLost {
			d.mayHaveLost = false
			*e = blk.EIO
		}
	}
}

// retry sends a request of a lost connection again, or fails it. A write may have been
// carried out, and may be carried out later: only the end of the server's process would
// tell. With a captive server the process ends, and the host decides. It returns the
// number of requests that are not answered.
func (d *disk) retry(o *op, err error) int {
	if d.b.run != "" && !errors.Is(err, errQueueEnded) {
		o.restart()
		d.waiting.push(o)
		return 1
	}
	if o.req.Op != blk.Read && !d.b.replay || errors.Is(err, errQueueEnded) || errors.Is(err, errClosed) {
		o.finish(blk.EIO)
		return 0
	}
	o.restart()
	d.submit(o)
	return 1
}

// forget takes a request out of those that wait.
func (d *disk) forget(o *op) {
	var rest opList
	for d.waiting.head != nil {
		if w := d.waiting.pop(); w != o {
			rest.push(w)
		}
	}
	d.waiting = rest
}

func (d *disk) withoutConn(c *conn) {
	if i := slices.Index(d.conns, c); i >= 0 {
		d.conns = slices.Delete(d.conns, i, i+1)
	}
}

// lost is called after the end of a connection that is still needed.
func (d *disk) lost(err error, inFlight, again int) {
	if d.closed || errors.Is(err, errClosed) {
		return
	}
	if d.flags&nbdwire.SendFlush != 0 && d.acked != d.flushed && !d.b.replay {
		d.mayHaveLost = true
	}
	slog.Warn("connection lost", "device", d.name, "server", d.b.where(), "err", err, "requests", inFlight,
		"retries", again, "connections", len(d.conns))
	if d.b.run != "" {
		d.b.connectionLost()
		return
	}
	if !d.dialing && !d.held {
		d.dialing = true
		go d.redial()
	}
}

// Pauses between tries to connect.
const (
	dialFirst   = 50 * time.Millisecond
	dialMost    = 5 * time.Second
	dialTimeout = 10 * time.Second
)

// redial connects until the disk has all of its connections again.
func (d *disk) redial() {
	begun, told := time.Now(), false
	for pause := dialFirst; d.ctx.Err() == nil; pause = min(2*pause, dialMost) {
		c, err := d.dial(d.ctx)
		if err == nil {
			var more bool
			if more, err = d.attach(c); !more {
				return
			}
		}
		if err == nil {
			pause = 0
			continue
		}
		if !told && time.Since(begun) > d.b.reconnect {
			told = true
			d.hub.pump.Call(func() { d.giveUp(err) })
		}
		wait := min(pause, max(d.b.reconnect-time.Since(begun), dialFirst))
		select {
		case <-time.After(wait):
		case <-d.ctx.Done():
		}
	}
}

// giveUp fails requests until there is a connection again.
func (d *disk) giveUp(err error) {
	if len(d.conns) > 0 || d.closed {
		return
	}
	slog.Error("requests fail until the server is back", "device", d.name, "server", d.b.where(), "err", err)
	d.down = true
	for d.waiting.head != nil {
		d.waiting.pop().finish(blk.EIO)
	}
	d.hub.publish()
}

// attach puts a new connection of redial into use. It reports whether more are to be made.
func (d *disk) attach(c *conn) (more bool, err error) {
	d.hub.pump.Call(func() {
		err = stillServes(&d.limits, &c.export, d.readOnly)
		if err == nil && d.closed {
			err = errClosed
		}
		if err == nil {
			err = d.use(c)
		}
		if err != nil {
			c.abandon()
		}
		more = !d.closed && len(d.conns) < d.want
		d.dialing = more
	})
	return more, err
}

// use lets requests go to c.
func (d *disk) use(c *conn) error {
	if err := d.hub.sockets.add(c); err != nil {
		return err
	}
	if len(d.conns) == 0 && (d.down || d.waiting.head != nil) {
		slog.Info("connected again", "device", d.name, "server", d.b.where())
	}
	d.conns = append(d.conns, c)
	d.down = false
	for d.waiting.head != nil {
		d.submit(d.waiting.pop())
	}
	d.hub.flush()
	return nil
}

// Limits returns those of the export.
func (d *disk) Limits() (l blk.Limits) {
	d.hub.pump.Call(func() { l = d.limits })
	return l
}

// Close ends the connections.
func (d *disk) Close() error {
	d.cancel()
	d.hub.pump.Call(func() {
		d.closed = true
		for _, c := range d.conns {
			c.disconnect()
		}
		d.conns = nil
	})
	return d.b.closed(d)
}

// Resize asks the server for the size on a new connection: those in use keep the size that
// they began with. After a change they are replaced.
func (d *disk) Resize(ctx context.Context) (blk.Limits, error) {
	c, err := d.dial(ctx)
	if err != nil {
		return blk.Limits{}, err
	}
	l, err := limitsOf(&c.export, d.readOnly)
	var size uint64
	d.hub.pump.Call(func() { size = d.limits.Size })
	if err != nil || l.Size == size {
		c.abandon()
		return d.Limits(), err
	}
	return l, d.replace(ctx, c, l)
}

// replace puts c in the place of all connections. Requests wait until those in flight have
// ended; then a flush makes what the old connections wrote visible to c.
func (d *disk) replace(ctx context.Context, c *conn, l blk.Limits) error {
	var old []*conn
	var drained []<-chan struct{}
	d.hub.pump.Call(func() {
		old, d.conns, d.held = d.conns, nil, true
		for _, o := range old {
			drained = append(drained, o.drain())
		}
	})
	var err error
	for _, done := range drained {
		select {
		case <-done:
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
	}
	if err == nil && l.WriteCache && !l.ReadOnly && len(old) > 0 {
		err = d.wait(ctx, old[0], &call{command: nbdwire.CmdFlush})
	}
	d.hub.pump.Call(func() {
		d.held = false
		if err == nil {
			err = d.use(c)
		}
		if err != nil {
			d.restore(old)
			c.abandon()
			return
		}
		d.limits, d.flags = l, c.export.Flags
		for _, o := range old {
			o.disconnect()
		}
		d.fill()
	})
	if err != nil {
		return fmt.Errorf("replace the connections: %w", err)
	}
	return nil
}

// restore puts the connections that are left back into use.
func (d *disk) restore(old []*conn) {
	for _, o := range old {
		if !o.ended {
			o.drained = nil
			d.conns = append(d.conns, o)
		}
	}
	for len(d.conns) > 0 && d.waiting.head != nil {
		d.submit(d.waiting.pop())
	}
	d.hub.flush()
	d.fill()
}

// fill makes the connections that are missing.
func (d *disk) fill() {
	if len(d.conns) < d.want && !d.dialing && !d.closed {
		d.dialing = true
		go d.redial()
	}
}

// wait sends a call on c, or on any connection if c is nil, and waits for its reply. After
// an error of ctx the reply may still come.
func (d *disk) wait(ctx context.Context, c *conn, k *call) error {
	k.done = make(chan struct{})
	d.hub.pump.Call(func() {
		h := d.hub
		h.lastCall++
		o := &op{disk: d, call: k, cookie: callCookie | h.lastCall, busy: true}
		if c == nil && len(d.conns) > 0 {
			c = d.conns[0]
		}
		h.statuses[o.cookie] = o
		if c == nil || c.ended {
			o.finish(blk.EIO)
			return
		}
		c.push(o)
		h.flush()
	})
	select {
	case <-k.done:
		return k.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
