package faults

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sdktest"
	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/nbdclient"
)

// loadOptions configure a load. The zero value writes and reads 4 to 128 KiB
// with 16 requests in flight, and fails the test at the first error.
type loadOptions struct {
	workers   int
	blocks    int    // per worker
	maxBlocks int    // per request
	reads     int    // one request of that many is a read; 0: 3
	reconnect bool   // when the NBD connection ends
	tcp       string // address to connect to; empty: the client's unix socket
	allow     func(error) bool
	history   *History // of an earlier load of the same shape
}

// load keeps requests in flight on a device and judges the answers. Each
// worker has blocks of its own, so writes of one block never overlap.
type load struct {
	t      *testing.T
	h      *History
	o      loadOptions
	client *lab.Client
	device string
	seed   uint64
	quit   chan struct{}
	wg     sync.WaitGroup
	ops    atomic.Int64
	gate   sync.RWMutex // held for reading during a request

	mu      sync.Mutex
	conn    *nbdclient.Client
	dials   int
	slow    []span    // requests of more than slowRequest
	back    time.Time // first answer on the newest connection
	allowed map[error]int
}

// span is the time of a request.
type span struct{ from, to time.Time }

const (
	loadBlock   = 4096
	slowRequest = 5 * time.Millisecond
	never       = 1 << 30 // for reads
)

// startLoad starts a load on device. It ends with the test, if not before.
func startLoad(t *testing.T, c *lab.Client, device string, o loadOptions) *load {
	t.Helper()
	if o.workers == 0 {
		o.workers = 16
	}
	if o.blocks == 0 {
		o.blocks = 128
	}
	if o.maxBlocks == 0 {
		o.maxBlocks = 32
	}
	if o.reads == 0 {
		o.reads = 3
	}
	seed := rand.Uint64()
	t.Logf("load on %s: seed %d, %d workers", device, seed, o.workers)
	l := &load{
		t: t, o: o, client: c, device: device, seed: seed,
		h: NewHistory(o.workers*o.blocks, loadBlock, seed), quit: make(chan struct{}), allowed: map[error]int{},
	}
	if o.history != nil {
		l.h = o.history
	}
	if _, err := l.dial(nil); err != nil {
		t.Fatalf("load: %v", err)
	}
	for w := range o.workers {
		l.wg.Go(func() { l.work(w) })
	}
	t.Cleanup(l.end)
	return l
}

// end ends the load, for the second time too.
func (l *load) end() {
	select {
	case <-l.quit:
	default:
		close(l.quit)
	}
	ended := make(chan struct{})
	go func() {
		l.wg.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(5 * time.Second): // a test failed while its requests were held
	}
	l.mu.Lock()
	if l.conn != nil {
		l.conn.Close() // ends the requests in flight
		l.conn = nil
	}
	l.mu.Unlock()
	<-ended
}

// stop ends the load and reads every block once more.
func (l *load) stop() {
	l.t.Helper()
	close(l.quit)
	l.wg.Wait()
	l.readAll()
}

func (l *load) readAll() {
	l.t.Helper()
	buf := make([]byte, loadBlock)
	for b := range l.h.Blocks() {
		if err := l.read(buf, b, 1); err != nil {
			l.t.Error(err)
			return
		}
	}
}

// still runs f while no request is in flight, and reads every block after it.
func (l *load) still(f func()) {
	l.t.Helper()
	l.gate.Lock()
	defer l.gate.Unlock()
	f()
	l.readAll()
}

func (l *load) stopped() bool {
	select {
	case <-l.quit:
		return true
	default:
		return false
	}
}

func (l *load) work(w int) {
	rnd := rand.New(rand.NewPCG(l.seed, uint64(w)))
	buf := make([]byte, l.o.maxBlocks*loadBlock)
	for !l.stopped() {
		n := 1 + rnd.IntN(min(l.o.maxBlocks, l.o.blocks))
		first := w*l.o.blocks + rnd.IntN(l.o.blocks-n+1)
		do := l.read
		if rnd.IntN(l.o.reads) > 0 {
			do = l.write
		}
		l.gate.RLock()
		err := do(buf[:n*loadBlock], first, n)
		l.gate.RUnlock()
		if err != nil {
			l.t.Errorf("worker %d: %v", w, err)
			return
		}
		l.ops.Add(1)
	}
}

func (l *load) write(buf []byte, first, n int) error {
	stamps := make([]Stamp, n)
	for {
		for i := range n {
			stamps[i] = l.h.Begin(first+i, buf[i*loadBlock:][:loadBlock])
		}
		err := l.timed(func(c *nbdclient.Client) error {
			_, err := c.WriteAt(buf, int64(first)*loadBlock)
			return err
		})
		if again, err := l.judge(err); err != nil || !again {
			if err != nil {
				return fmt.Errorf("write of blocks %d to %d: %w", first, first+n-1, err)
			}
			break
		}
		if l.stopped() {
			return nil
		}
	}
	for i, s := range stamps {
		l.h.Acknowledge(first+i, s)
	}
	return nil
}

func (l *load) read(buf []byte, first, n int) error {
	since := make([]Stamp, n)
	for {
		for i := range n {
			since[i] = l.h.Reading(first + i)
		}
		err := l.timed(func(c *nbdclient.Client) error {
			_, err := c.ReadAt(buf[:n*loadBlock], int64(first)*loadBlock)
			return err
		})
		again, err := l.judge(err)
		if err != nil {
			return fmt.Errorf("read of blocks %d to %d: %w", first, first+n-1, err)
		}
		if !again {
			break
		}
		if l.stopped() {
			return nil
		}
	}
	for i := range n {
		if err := l.h.Check(first+i, since[i], buf[i*loadBlock:][:loadBlock]); err != nil {
			return err
		}
	}
	return nil
}

// timed runs f on the connection and notes slow requests. A connection that
// ended is replaced for the next one.
func (l *load) timed(f func(*nbdclient.Client) error) error {
	l.mu.Lock()
	c := l.conn
	l.mu.Unlock()
	start := time.Now()
	err := f(c)
	if took := time.Since(start); took > slowRequest {
		l.mu.Lock()
		l.slow = append(l.slow, span{start, start.Add(took)})
		l.mu.Unlock()
	}
	l.mu.Lock()
	if err == nil && c == l.conn && l.back.IsZero() {
		l.back = time.Now()
	}
	l.mu.Unlock()
	if errors.Is(err, nbdclient.ErrClosed) && l.o.reconnect {
		if err := l.redial(c); err != nil {
			return err
		}
	}
	return err
}

// redial connects again. A new front end refuses connections until it has the
// device. On a busy machine that takes longer than connections wait.
func (l *load) redial(old *nbdclient.Client) (err error) {
	for end := time.Now().Add(2 * enough); ; time.Sleep(50 * time.Millisecond) {
		if _, err = l.dial(old); err == nil || l.stopped() { // the worker ends by itself then
			return nil
		}
		if time.Now().After(end) {
			return err
		}
	}
}

// judge reports whether a request is to be tried again.
func (l *load) judge(err error) (again bool, _ error) {
	var errno syscall.Errno
	switch {
	case err == nil:
		return false, nil
	case errors.Is(err, nbdclient.ErrClosed) && l.o.reconnect:
		return true, nil
	case l.o.allow != nil && l.o.allow(err):
		errors.As(err, &errno)
		l.mu.Lock()
		l.allowed[errno]++
		l.mu.Unlock()
		time.Sleep(5 * time.Millisecond)
		return true, nil
	}
	return false, err
}

// dial connects, unless another worker has replaced old already.
func (l *load) dial(old *nbdclient.Client) (*nbdclient.Client, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn != old {
		return l.conn, nil
	}
	c, err := dialAt(l.client, l.device, l.o.tcp)
	if err != nil {
		return nil, err
	}
	l.conn, l.back = c, time.Time{}
	l.dials++
	return c, nil
}

// dialDevice opens an NBD connection to a device of c.
func dialDevice(c *lab.Client, device string) (*nbdclient.Client, error) {
	return dialAt(c, device, "")
}

// dialAt does, at an address of TCP if that is not empty.
func dialAt(c *lab.Client, device, tcp string) (*nbdclient.Client, error) {
	ctx, cancel := context.WithTimeout(context.Background(), enough)
	defer cancel()
	if tcp != "" {
		return nbdclient.Dial(ctx, "tcp", tcp, nbdclient.Options{Export: device})
	}
	return nbdclient.Dial(ctx, "unix", c.NBD, nbdclient.Options{Export: device})
}

// mustDial does, or fails the test.
func mustDial(t *testing.T, c *lab.Client, device string) *nbdclient.Client {
	t.Helper()
	n, err := dialDevice(c, device)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	return n
}

// pause returns the longest wait of a request due to the event at the time
// at.
func (l *load) pause(at time.Time) (longest time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.slow {
		if s.to.After(at) && s.from.Before(at.Add(500*time.Millisecond)) {
			from := s.from
			if from.Before(at) {
				from = at
			}
			longest = max(longest, s.to.Sub(from))
		}
	}
	return longest
}

// longest returns the longest wait of a request since the time at.
func (l *load) longest(at time.Time) (longest time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.slow {
		if s.from.After(at) {
			longest = max(longest, s.to.Sub(s.from))
		}
	}
	return longest
}

// awaitProgress waits until n more requests have been answered.
func (l *load) awaitProgress(n int64) {
	l.t.Helper()
	want := l.ops.Load() + n
	eventually(l.t, 2*enough, fmt.Sprintf("%d more requests are answered", n), func() bool {
		return l.ops.Load() >= want
	})
}

// eventually waits until a condition holds, and ends the test after a limit.
var eventually = sdktest.Within

// figures is a line about durations.
func figures(d []time.Duration) string {
	d = slices.Sorted(slices.Values(d))
	at := func(p int) time.Duration { return d[min(len(d)-1, len(d)*p/100)].Round(100 * time.Microsecond) }
	return fmt.Sprintf("%d measured, shortest %v, p50 %v, p99 %v, longest %v", len(d), at(0), at(50), at(99), at(100))
}

// away is how long after at the first request was answered on the newest
// connection.
func (l *load) away(at time.Time) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.back.Sub(at)
}
