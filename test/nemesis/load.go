package nemesis

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rnbd-go/rnbd/test/blockhistory"
	"github.com/rnbd-go/rnbd/test/nbdclient"
)

const (
	blockSize  = 512
	loadBlocks = 256 // that a device's load uses: few, so that requests meet
	maxBlocks  = 128 // of a request: 64 KiB
	workers    = 6   // of a device
)

// load keeps some requests in flight on one device, at random places of a small
// range, so that they overlap.
type load struct {
	w      *world
	device string
	fails  bool // requests may fail: the device does not wait for its server
	h      *blockhistory.History
	quit   chan struct{}
	wg     sync.WaitGroup
	ops    atomic.Int64
	failed atomic.Int64

	mu   sync.Mutex
	conn *nbdclient.Client
	err  error // the first
	busy map[int]time.Time
}

func (w *world) startLoad(device string, seed uint64) *load {
	l := &load{
		w: w, device: device, fails: w.setup.Loss == "fail",
		h: blockhistory.New(blockSize, seed), quit: make(chan struct{}), busy: map[int]time.Time{},
	}
	for i := range workers {
		l.wg.Go(func() { l.work(i, rand.New(rand.NewPCG(seed, uint64(i)))) })
	}
	return l
}

func (l *load) stopped() bool {
	select {
	case <-l.quit:
		return true
	default:
		return false
	}
}

func (l *load) work(worker int, rnd *rand.Rand) {
	buf := make([]byte, maxBlocks*blockSize)
	for !l.stopped() {
		time.Sleep(time.Duration(rnd.Int64N(int64(25 * time.Millisecond))))
		n := int64(logarithmic(rnd, 1, maxBlocks))
		at := rnd.Int64N(loadBlocks - n + 1)
		l.note(worker, time.Now())
		op := l.write
		switch rnd.IntN(20) {
		case 0:
			op = l.flush
		case 1, 2, 3, 4, 5, 6, 7, 8, 9:
			op = l.read
		}
		err := op(at, buf[:n*blockSize])
		l.note(worker, time.Time{})
		if err != nil {
			l.fail(err)
		}
	}
}

// note says since when a worker waits for an answer.
func (l *load) note(worker int, since time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.busy[worker] = since; since.IsZero() {
		delete(l.busy, worker)
	}
}

func (l *load) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err == nil {
		l.err = fmt.Errorf("device %s: %w", l.device, err)
	}
}

func (l *load) write(at int64, buf []byte) error {
	w := l.h.BeginWrite(at, buf)
	ok, err := l.do("write", func(c *nbdclient.Client) error {
		_, err := c.WriteAt(buf, at*blockSize)
		return err
	})
	if ok {
		w.Done()
	}
	return err
}

func (l *load) read(at int64, buf []byte) error {
	r := l.h.BeginRead(at, len(buf)/blockSize)
	ok, err := l.do("read", func(c *nbdclient.Client) error {
		_, err := c.ReadAt(buf, at*blockSize)
		return err
	})
	if ok {
		return r.Done(buf)
	}
	return err
}

func (l *load) flush(int64, []byte) error {
	_, err := l.do("flush", func(c *nbdclient.Client) error { return c.Flush() })
	return err
}

// do runs a request. It is ok if it succeeded; an error is one that the schedule
// does not explain.
func (l *load) do(what string, request func(*nbdclient.Client) error) (ok bool, _ error) {
	c := l.dial()
	if c == nil {
		return false, nil
	}
	from, mayFail := time.Now(), l.w.failing(l.device)
	err := request(c)
	switch {
	case err == nil:
		l.ops.Add(1)
		return true, nil
	case errors.Is(err, nbdclient.ErrClosed):
		l.hangUp(c)
		return false, nil
	case l.fails, mayFail, l.w.failing(l.device), l.w.failedSince(l.device, from):
		l.failed.Add(1)
		time.Sleep(20 * time.Millisecond)
		return false, nil
	}
	return false, fmt.Errorf("%s failed %v after it was sent: %w", what, time.Since(from).Round(time.Millisecond), err)
}

// dial returns the connection to the device, a new one where that is needed; nil
// when the load ends before there is one.
func (l *load) dial() *nbdclient.Client {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.conn == nil && !l.stopped() {
		c, err := l.w.dial(l.device, time.Second)
		if err != nil {
			l.mu.Unlock()
			time.Sleep(50 * time.Millisecond)
			l.mu.Lock()
			continue
		}
		l.conn = c
	}
	return l.conn
}

// hangUp gives up a connection that has ended.
func (l *load) hangUp(c *nbdclient.Client) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == c {
		l.conn.Close()
		l.conn = nil
	}
}

// end ends the load. A request without answer at the deadline is an error, and is
// cut off.
func (l *load) end(deadline time.Time) error {
	close(l.quit)
	ended := make(chan struct{})
	go func() { l.wg.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(time.Until(deadline)):
		l.mu.Lock()
		for _, since := range l.busy {
			if l.err == nil {
				l.err = fmt.Errorf("device %s: a request has no answer after %v, when nothing was broken any more", l.device, time.Since(since).Round(time.Millisecond))
			}
		}
		c := l.conn
		l.mu.Unlock()
		if c != nil {
			c.Close()
		}
		<-ended
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn != nil {
		l.conn.Close()
		l.conn = nil
	}
	return l.err
}

// last reads everything until the deadline, and judges.
func (l *load) last(deadline time.Time) error {
	buf := make([]byte, loadBlocks*blockSize)
	err := l.w.answers(l.device, deadline, func(c *nbdclient.Client) error {
		r := l.h.BeginRead(0, loadBlocks)
		if _, err := c.ReadAt(buf, 0); err != nil {
			return err
		}
		return r.Done(buf)
	})
	return errors.Join(err, l.h.Judge())
}

// dial opens an NBD connection to a device.
func (w *world) dial(device string, limit time.Duration) (*nbdclient.Client, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return nbdclient.Dial(ctx, "unix", w.client.NBD, nbdclient.Options{Export: w.names[device]})
}

// answers tries a request until the deadline; each try has a connection of its
// own.
func (w *world) answers(device string, deadline time.Time, request func(*nbdclient.Client) error) error {
	for {
		err := w.once(device, deadline, request)
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func (w *world) once(device string, deadline time.Time, request func(*nbdclient.Client) error) error {
	limit := max(time.Until(deadline), time.Second)
	c, err := w.dial(device, limit)
	if err != nil {
		return fmt.Errorf("device %s: %w", device, err)
	}
	defer c.Close()
	late := time.AfterFunc(limit, func() { c.Close() })
	defer late.Stop()
	if err := request(c); err != nil {
		return fmt.Errorf("device %s does not answer when nothing is broken any more: %w", device, err)
	}
	return nil
}
