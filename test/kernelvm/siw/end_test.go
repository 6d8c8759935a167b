//go:build linux && cgo && ibverbs

package siw

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/ibverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/iwarp"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

const (
	memSize = 1 << 20
	queue   = 128
	limit   = 20 * time.Second // for operations that take milliseconds on a quiet machine
)

var quiet = slog.New(slog.DiscardHandler)

// fabric is the kernel's side; devices are found once.
var fabric = sync.OnceValue(func() *ibverbs.Fabric { return ibverbs.Open(ibverbs.Config{Logger: quiet}) })

// addresses of siw0.
func addresses(t testing.TB) (v4, v6 netip.Addr) {
	t.Helper()
	name, err := os.ReadFile("/sys/class/infiniband/siw0/ports/1/gid_attrs/ndevs/0")
	if err != nil {
		t.Skip("no siw0 here: test/kernelvm runs this in a guest that has one")
	}
	ifi, err := net.InterfaceByName(string(name[:len(name)-1]))
	check(t, err)
	list, err := ifi.Addrs()
	check(t, err)
	for _, a := range list {
		switch p := netip.MustParsePrefix(a.String()).Addr(); {
		case p.Is4():
			v4 = p
		case !p.IsLinkLocalUnicast():
			v6 = p
		}
	}
	return v4, v6
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// siwAt is the kernel's device with this address.
func siwAt(t testing.TB, addr netip.Addr) verbs.Device {
	t.Helper()
	d, err := fabric().DeviceFor(t.Context(), addr, addr)
	check(t, err)
	if d.Info().Caps&(verbs.CapWriteImm|verbs.CapSendImm) != 0 {
		t.Fatalf("%s claims immediates", d.Info().Name)
	}
	return d
}

// ours is a device of the provider for peers that are not.
func ours(t testing.TB, change ...func(*iwarp.Config)) verbs.Device {
	t.Helper()
	cfg := iwarp.DefaultConfig()
	cfg.Foreign, cfg.Logger = true, quiet
	for _, f := range change {
		f(&cfg)
	}
	d, err := iwarp.Open(cfg)
	check(t, err)
	t.Cleanup(func() { d.Close() })
	return d
}

func noCRC(c *iwarp.Config) { c.CRC = false }

// end is one side of a connection. The test polls it.
type end struct {
	t    testing.TB
	name string
	dev  verbs.Device
	pd   verbs.PD
	cq   verbs.CQ
	qp   verbs.QP
	mem  []byte
	mr   verbs.MR // of mem, with all rights
	wcs  []verbs.WC
	buf  [32]verbs.WC
	up   bool // was connected
	down bool
}

func newEnd(t testing.TB, name string, dev verbs.Device) *end {
	t.Helper()
	e := &end{t: t, name: name, dev: dev, mem: make([]byte, memSize)}
	var err error
	e.pd, err = dev.AllocPD()
	check(t, err)
	e.cq, err = dev.CreateCQ(2 * queue)
	check(t, err)
	e.mr, err = e.pd.RegMR(e.mem, verbs.AccessRemoteRead|verbs.AccessRemoteWrite)
	check(t, err)
	e.qp, err = dev.CreateQP(e.pd, verbs.QPConfig{CQ: e.cq, Context: 7, SendQueue: queue, RecvQueue: queue, MaxSGE: 4})
	check(t, err)
	t.Cleanup(e.close)
	return e
}

// close ends the connection in the order that verbs asks for.
func (e *end) close() {
	e.qp.Disconnect()
	for stop := time.Now().Add(limit); e.up && !e.down && time.Now().Before(stop); {
		if e.poll() == 0 {
			time.Sleep(100 * time.Microsecond)
		}
	}
	e.qp.Destroy()
	e.poll()
	for _, err := range []error{e.mr.Close(), e.cq.Close(), e.pd.Close()} {
		if err != nil {
			e.t.Errorf("%s: %v", e.name, err)
		}
	}
}

func (e *end) poll() int {
	n := e.cq.Poll(e.buf[:])
	for _, wc := range e.buf[:n] {
		e.down = e.down || wc.Op == verbs.OpDisconnected
	}
	e.wcs = append(e.wcs, e.buf[:n]...)
	return n
}

// sge is a piece of the end's memory.
func (e *end) sge(off, n int) verbs.SGE { return verbs.SGE{Buf: e.mem[off : off+n], LKey: e.mr.LKey()} }

func (e *end) send(wrs ...verbs.SendWR) {
	e.t.Helper()
	if n, err := e.qp.PostSend(wrs); err != nil {
		e.t.Fatalf("%s: PostSend took %d of %d: %v", e.name, n, len(wrs), err)
	}
}

// message is a SEND of n bytes at off.
func (e *end) message(id uint64, off, n int) verbs.SendWR {
	return verbs.SendWR{ID: id, Op: verbs.OpSend, Signaled: true, SGEs: []verbs.SGE{e.sge(off, n)}}
}

// to is a WRITE or a READ between off of e's memory and at of peer's.
func (e *end) to(peer *end, op verbs.Opcode, id uint64, off, n, at int) verbs.SendWR {
	return verbs.SendWR{ID: id, Op: op, Signaled: true, SGEs: []verbs.SGE{e.sge(off, n)},
		RemoteAddr: peer.mr.Addr() + uint64(at), RKey: peer.mr.RKey()}
}

func (e *end) recv(id uint64, off, n int) {
	e.t.Helper()
	if _, err := e.qp.PostRecv([]verbs.RecvWR{{ID: id, Buf: e.mem[off : off+n], LKey: e.mr.LKey()}}); err != nil {
		e.t.Fatalf("%s: PostRecv: %v", e.name, err)
	}
	e.poll() // siw does not wait for receives: now it has this one
}

// next polls e and its peer until e has a completion.
func (e *end) next(peer *end) verbs.WC {
	e.t.Helper()
	for stop := time.Now().Add(limit); len(e.wcs) == 0; {
		if e.poll()+peer.poll() == 0 {
			time.Sleep(100 * time.Microsecond)
		}
		if time.Now().After(stop) {
			e.t.Fatalf("%s: no completion came; the other end has %+v", e.name, peer.wcs)
		}
	}
	wc := e.wcs[0]
	e.wcs = e.wcs[1:]
	return wc
}

// want returns the next completion. It must be of this request and good.
func (e *end) want(peer *end, op verbs.Opcode, id uint64) verbs.WC {
	e.t.Helper()
	wc := e.next(peer)
	if wc.Op != op || wc.ID != id || wc.Status != verbs.StatusOK || wc.QP != 7 {
		e.t.Fatalf("%s: %+v, want operation %d of request %d", e.name, wc, op, id)
	}
	return wc
}

// end waits for OpDisconnected and returns it with the completions before it.
func (e *end) end(peer *end) (last verbs.WC, before []verbs.WC) {
	e.t.Helper()
	for {
		wc := e.next(peer)
		if wc.Op == verbs.OpDisconnected {
			return wc, before
		}
		before = append(before, wc)
	}
}

func (e *end) fill(off, n int) []byte {
	b := e.mem[off : off+n]
	r := rand.NewChaCha8([32]byte{byte(n), byte(n >> 8), byte(off)})
	r.Read(b)
	return b
}

// pair is a connection between the provider and siw.
type pair struct {
	our, siw       *end
	client, server *end
	asked, said    []byte // private data as it arrived
}

// connect makes one; active names the end that dials.
func connect(t testing.TB, addr netip.Addr, active string, change ...func(*iwarp.Config)) *pair {
	t.Helper()
	return connectWith(t, addr, active, []byte("question"), []byte("answer"), change...)
}

func connectWith(t testing.TB, addr netip.Addr, active string, ask, say []byte, change ...func(*iwarp.Config)) (p *pair) {
	t.Helper()
	check(t, onFreePort(func() error {
		p = newPair(t, addr, active, change...)
		return p.join(addr, ask, say)
	}))
	return p
}

// onFreePort tries with another port if siw's was taken: the kernel chooses it
// from a list of its own, beside the list of TCP, and siw opens it in that.
func onFreePort(try func() error) (err error) {
	for range 5 {
		if err = try(); !portTaken(err) {
			break
		}
	}
	return err
}

// portTaken reports whether siw could not have the port that the kernel chose
// for it: TCP says EADDRINUSE where a socket is bound to it, EADDRNOTAVAIL
// where a connection with both ports exists, or did a minute ago.
func portTaken(err error) bool {
	return errors.Is(err, syscall.EADDRINUSE) || errors.Is(err, syscall.EADDRNOTAVAIL)
}

func newPair(t testing.TB, addr netip.Addr, active string, change ...func(*iwarp.Config)) *pair {
	t.Helper()
	p := &pair{our: newEnd(t, "ours", ours(t, change...)), siw: newEnd(t, "siw", siwAt(t, addr))}
	p.client, p.server = p.our, p.siw
	if active == "siw" {
		p.client, p.server = p.siw, p.our
	}
	return p
}

// listen takes another port where the one that the kernel chose is taken.
func listen(t testing.TB, d verbs.Device, addr netip.Addr) (l verbs.Listener) {
	t.Helper()
	check(t, onFreePort(func() (err error) {
		l, err = d.Listen(netip.AddrPortFrom(addr, 0))
		return err
	}))
	return l
}

// join connects the ends.
func (p *pair) join(addr netip.Addr, ask, say []byte) error {
	l, err := p.server.dev.Listen(netip.AddrPortFrom(addr, 0))
	if err != nil {
		return err
	}
	defer l.Close()
	accepted := make(chan error, 1)
	go func() {
		r, err := l.Accept()
		if err == nil {
			p.asked = append([]byte(nil), r.Private()...)
			err = r.Accept(p.server.qp, say)
		}
		accepted <- err
	}()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	p.said, err = p.client.dev.Connect(ctx, p.client.qp, verbs.ConnectParams{Src: addr, Dst: l.Addr(), Private: ask})
	p.client.up = err == nil
	if err != nil {
		l.Close()
	}
	if e := <-accepted; e != nil {
		return errors.Join(err, e)
	}
	p.server.up = true
	return err
}

// each runs f with either end as the one that connects.
func each(t *testing.T, f func(t *testing.T, active string)) {
	for _, active := range []string{"ours", "siw"} {
		t.Run(active+" connects", func(t *testing.T) { f(t, active) })
	}
}
