package main

import (
	"bytes"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

func data(n uint64) extents.Extent { return extents.Extent{Len: n} }
func hole(n uint64) extents.Extent { return extents.Extent{Len: n, Hole: true} }

func TestClip(t *testing.T) {
	type list = []extents.Extent
	for _, v := range []struct {
		name           string
		list           list
		from, to, unit uint64
		want           list
	}{
		{"nothing is known", nil, 0, 4096, 1, list{data(4096)}},
		{"nothing is known of an odd range", nil, 100, 300, 1, list{data(200)}},
		{"all of it", list{hole(512), data(1024)}, 0, 1536, 1, list{hole(512), data(1024)}},
		{"odd bounds", list{hole(512), data(1024)}, 100, 1500, 1, list{hole(412), data(988)}},
		{"within one extent", list{hole(512), data(1024), hole(512)}, 600, 700, 1, list{data(100)}},
		{"the first lies before it", list{data(512), hole(1024)}, 512, 1536, 1, list{hole(1024)}},
		{"the last lies behind it", list{data(512), hole(1024)}, 0, 512, 1, list{data(512)}},
		{"a beginning", list{hole(512)}, 100, 4096, 1, list{hole(412)}},
		{"a beginning that ends before it", list{hole(512)}, 512, 4096, 1, list{data(3584)}},
		{"neighbours of one kind", list{hole(512), hole(512), data(512), data(512)}, 1, 2048, 1, list{hole(1023), data(1024)}},
		{"whole blocks", list{hole(8192), data(512), hole(7680), data(4096)}, 0, 20480, 4096, list{hole(8192), data(4096), hole(4096), data(4096)}},
		{"a hole that is no block", list{data(512), hole(3584), data(4096)}, 0, 8192, 4096, list{data(8192)}},
		{"a hole in two extents", list{hole(512), hole(7680), data(4096)}, 0, 12288, 4096, list{hole(8192), data(4096)}},
		{"a hole and a piece", list{hole(4608), data(3584)}, 0, 8192, 4096, list{hole(4096), data(4096)}},
		{"a piece of data at the end", list{hole(4096), data(512)}, 0, 12288, 4096, list{hole(4096), data(4096)}},
		{"nothing but a piece of a hole", list{hole(512)}, 0, 8192, 4096, list{data(8192)}},
	} {
		t.Run(v.name, func(t *testing.T) {
			memory := append(make(list, 0, extents.Max), v.list...)
			if got := clipExtents(memory, v.from, v.to, v.unit); !slices.Equal(got, v.want) {
				t.Errorf("%v, want %v", got, v.want)
			}
		})
	}
}

// A byte is in a hole after clip only if it was in one before.
func TestClip_AgainstAModel(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 9))
	for range 20000 {
		unit := uint64(1)
		if rnd.IntN(2) == 0 {
			unit = 2048
		}
		size := 2048 * uint64(1+rnd.IntN(8))
		var list []extents.Extent
		var model []bool // by sector
		for n := uint64(0); n < size && rnd.IntN(6) > 0; {
			e := extents.Extent{Len: min(512*uint64(1+rnd.IntN(8)), size-n), Hole: rnd.IntN(2) == 0}
			n += e.Len
			list, model = append(list, e), append(model, slices.Repeat([]bool{e.Hole}, int(e.Len/512))...)
		}
		from := rnd.Uint64N(size) / unit * unit
		to := from + unit + rnd.Uint64N(size-from)/unit*unit
		if to > size {
			continue
		}
		got := clipExtents(append(make([]extents.Extent, 0, extents.Max), list...), from, to, unit)
		at := from
		for i, e := range got {
			if e.Len == 0 || e.Len%unit != 0 || i > 0 && got[i-1].Hole == e.Hole {
				t.Fatalf("%v of %v", got, list)
			}
			for b := at; e.Hole && b < at+e.Len; b++ {
				if b/512 >= uint64(len(model)) || !model[b/512] {
					t.Fatalf("byte %d of [%d, %d) by %d is no hole: %v of %v", b, from, to, unit, got, list)
				}
			}
			at += e.Len
		}
		if len(got) == 0 || at > to {
			t.Fatalf("%v of %v in [%d, %d)", got, list, from, to)
		}
	}
}

// blockStatus runs a block status.
func (c *client) blockStatus(flags uint16, off uint64, n int) []extent {
	c.t.Helper()
	p := c.start(nbdwire.CmdBlockStatus, flags, off, n, nil)
	if code, err := p.wait(); code != 0 || err != nil {
		c.t.Fatalf("block status of %d bytes at %d: code %d, %v", n, off, code, err)
	}
	return p.list
}

// puts answers with a list.
func puts(list ...extents.Extent) func(*shm.SQE, []byte) blk.Errno {
	return func(_ *shm.SQE, b []byte) blk.Errno {
		extents.Put(b, list)
		return blk.OK
	}
}

func TestBlockStatus(t *testing.T) {
	r := newRig(t, rigConfig{limits: testLimits(1 << 20)})
	c := r.connect(true)
	for _, v := range []struct {
		name  string
		flags uint16
		off   uint64
		n     int
		list  []extents.Extent
		asked extent // offset and length
		want  []extent
	}{
		{"data", 0, 0, 4096, []extents.Extent{data(4096)}, extent{0, 4096}, []extent{{4096, 0}}},
		{"a hole", 0, 512, 4096, []extents.Extent{hole(4096)}, extent{512, 4096}, []extent{{4096, 3}}},
		{"several", 0, 0, 8192, []extents.Extent{data(512), hole(4096), data(3584)}, extent{0, 8192}, []extent{{512, 0}, {4096, 3}, {3584, 0}}},
		{"one is asked for", nbdwire.CmdFlagReqOne, 0, 8192, []extents.Extent{hole(512), data(7680)}, extent{0, 8192}, []extent{{512, 3}}},
		{"one in two pieces", nbdwire.CmdFlagReqOne, 0, 8192, []extents.Extent{hole(512), hole(512), data(512)}, extent{0, 8192}, []extent{{1024, 3}}},
		{"one at odd bounds", nbdwire.CmdFlagReqOne, 1000, 8192, []extents.Extent{data(512), hole(8192)}, extent{512, 9216 - 512 + 0}, []extent{{24, 0}}},
		{"a byte", 0, 777, 1, []extents.Extent{hole(512)}, extent{512, 512}, []extent{{1, 3}}},
		{"odd bounds", 0, 1000, 1000, []extents.Extent{hole(512), data(512), hole(512)}, extent{512, 1536}, []extent{{24, 3}, {512, 0}, {464, 3}}},
		{"less than asked for", 0, 0, 8192, []extents.Extent{hole(512)}, extent{0, 8192}, []extent{{512, 3}}},
		{"the end of the device", 0, 1<<20 - 1, 1, []extents.Extent{hole(512)}, extent{1<<20 - 512, 512}, []extent{{1, 3}}},
		{"with FUA, which means nothing", nbdwire.CmdFlagFUA, 0, 512, []extents.Extent{hole(512)}, extent{0, 512}, []extent{{512, 3}}},
		{"all", 0, 0, 1 << 20, []extents.Extent{hole(1 << 20)}, extent{0, 1 << 20}, []extent{{1 << 20, 3}}},
	} {
		t.Run(v.name, func(t *testing.T) {
			var asked shm.SQE
			r.disks[0].telling(func(e *shm.SQE, b []byte) blk.Errno {
				asked = *e
				return puts(v.list...)(e, b)
			})
			if got := c.blockStatus(v.flags, v.off, v.n); !slices.Equal(got, v.want) {
				t.Errorf("%v, want %v", got, v.want)
			}
			r.disks[0].with(func() {
				if asked.Offset != uint64(v.asked.n) || asked.Len != v.asked.flags || asked.Arena != 7 || asked.Flags != 0 || asked.Op != blk.Extents {
					t.Errorf("the device is asked %+v, want %v", asked, v.asked)
				}
			})
		})
	}
	eventually(t, "slots are back", func() bool { return r.free(0) })
}

// The reply on the wire.
func TestBlockStatus_Bytes(t *testing.T) {
	b := newBench(t, 4, 4096, true)
	b.d.telling(puts(hole(512), data(1024)))
	b.peer.Write(command(nbdwire.CmdBlockStatus, 0, 0x0102030405060708, 12, 1500))
	b.settle()
	want := cat(uint32(0x668e33ef), uint16(1), uint16(5), uint64(0x0102030405060708), uint32(20), uint32(1),
		uint32(500), uint32(3), uint32(1000), uint32(0))
	got := make([]byte, len(want)+1)
	if n, _ := b.peer.Read(got); !bytes.Equal(got[:n], want) {
		t.Errorf("% x, want % x", got[:n], want)
	}
}

// Whatever a host says that is no list, the range is data.
func TestBlockStatus_NothingIsKnown(t *testing.T) {
	const n = 8192
	broken := func(change func(b []byte)) func(*shm.SQE, []byte) blk.Errno {
		return func(e *shm.SQE, b []byte) blk.Errno {
			puts(hole(4096), data(512), hole(3584))(e, b)
			change(b)
			return blk.OK
		}
	}
	r := newRig(t, rigConfig{slots: 1, slotSize: 4096})
	c := r.connect(true)
	for name, tell := range map[string]func(*shm.SQE, []byte) blk.Errno{
		"an old host":         func(*shm.SQE, []byte) blk.Errno { return blk.EOPNOTSUPP },
		"a device that fails": func(*shm.SQE, []byte) blk.Errno { return blk.EIO },
		"a list with an error": func(e *shm.SQE, b []byte) blk.Errno {
			puts(hole(n))(e, b)
			return blk.ETIMEDOUT
		},
		"a list of nothing":      broken(func(b []byte) { b[4] = 0 }),
		"too many extents":       broken(func(b []byte) { b[5] = 1 }),
		"an absurd number":       broken(func(b []byte) { b[7] = 0xff }),
		"an empty extent":        broken(func(b []byte) { clear(b[8:16]) }),
		"half a sector":          broken(func(b []byte) { b[24] = 1 }),
		"more than is asked for": broken(func(b []byte) { b[41] = 16 }),
		"a sum that overflows":   broken(func(b []byte) { b[47] = 0x80 }),
		"no list, and a slot with what a client has written": func(*shm.SQE, []byte) blk.Errno {
			return blk.OK
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, flags := range []uint16{0, nbdwire.CmdFlagReqOne} {
				r.disks[0].telling(puts(hole(n)))
				if got := c.blockStatus(0, 0, n); !slices.Equal(got, []extent{{n, 3}}) {
					t.Fatal(got)
				}
				forged := make([]byte, extents.Size)
				extents.Put(forged, []extents.Extent{hole(n)})
				if code := c.write(0, forged); code != 0 {
					t.Fatal(code)
				}
				r.disks[0].telling(tell)
				if got := c.blockStatus(flags, 100, n-200); !slices.Equal(got, []extent{{n - 200, 0}}) {
					t.Errorf("flags %d: %v", flags, got)
				}
			}
		})
	}
}

func TestBlockStatus_Refusals(t *testing.T) {
	l := testLimits(1 << 20)
	blocks := l
	blocks.LogicalBlockSize = 4096
	for _, v := range []struct {
		name     string
		limits   blk.Limits
		slotSize int
		flags    uint16
		off      uint64
		n        int
	}{
		{"no range", l, 4096, 0, 0, 0},
		{"no range at the end", l, 4096, nbdwire.CmdFlagReqOne, 1 << 20, 0},
		{"across the end", l, 4096, 0, 1<<20 - 1, 2},
		{"beyond the end", l, 4096, 0, 1 << 20, 1},
		{"an offset that wraps", l, 4096, 0, 1<<64 - 1, 2},
		{"an unknown flag", l, 4096, 1 << 2, 0, 512},
		{"a flag of another command", l, 4096, nbdwire.CmdFlagNoHole, 0, 512},
		{"parts of blocks where they are not served", blocks, 4096, 0, 512, 4096},
		{"a slot without room for a list", l, 2048, 0, 0, 512},
	} {
		t.Run(v.name, func(t *testing.T) {
			r := newRig(t, rigConfig{slotSize: v.slotSize, limits: v.limits})
			r.disks[0].with(func() { r.disks[0].keep = true })
			c := r.connect(true)
			if code := c.do(nbdwire.CmdBlockStatus, v.flags, v.off, v.n, nil); code != nbdEINVAL {
				t.Errorf("error %d", code)
			}
			if n := len(r.disks[0].requests()); n > 0 {
				t.Errorf("%d requests reached the device", n)
			}
			if code := c.read(0, make([]byte, 4096)); code != 0 {
				t.Errorf("next read: error %d", code)
			}
		})
	}
}

// Without the context the command is not served.
func TestBlockStatus_WithoutContext(t *testing.T) {
	r := newRig(t, rigConfig{})
	for name, options := range map[string][]byte{
		"simple replies":     nil,
		"never set":          option(8, nil),
		"set of nothing":     cat(option(8, nil), option(10, metaData("disk0"))),
		"set without name":   cat(option(8, nil), option(10, metaData("disk0", "base:"))),
		"set and taken back": cat(option(8, nil), option(10, metaData("disk0", nbdwire.AllocationContext)), option(10, metaData("disk0"))),
	} {
		t.Run(name, func(t *testing.T) {
			conn := greeted(t, "unix", r.addr)
			_, err := conn.Write(cat(options, option(7, goData("disk0")), command(nbdwire.CmdBlockStatus, 0, 5, 0, 512), command(nbdwire.CmdDisc, 0, 0, 0, 0)))
			must(t, "send", err)
			b, err := io.ReadAll(conn)
			must(t, "receive", err)
			want := cat(uint32(nbdwire.MagicSimple), uint32(nbdEINVAL), uint64(5))
			if options != nil {
				want = cat(uint32(nbdwire.MagicChunk), uint16(1), uint16(1<<15+1), uint64(5), uint32(6), uint32(nbdEINVAL), uint16(0))
			}
			if !bytes.HasSuffix(b, want) {
				t.Errorf("% x, want % x at the end", b, want)
			}
		})
	}
}

// A command of 4 GiB asks for 2, which a ring entry can say.
func TestBlockStatus_LongRanges(t *testing.T) {
	r := newRig(t, rigConfig{})
	l := testLimits(64 << 30)
	must(t, "resize", r.f.ResizeDevice(t.Context(), 0, l))
	c := r.connect(true)
	r.disks[0].with(func() { r.disks[0].limits = l })
	r.disks[0].telling(puts(hole(1<<31-512), data(512)))
	for _, v := range []struct {
		off  uint64
		n    uint32
		want []extent
	}{
		{0, 1<<32 - 1, []extent{{1<<31 - 512, 3}, {512, 0}}},
		{32<<30 + 100, 1<<32 - 1, []extent{{1<<31 - 512 - 100, 3}, {512, 0}}},
		{32 << 30, 1 << 31, []extent{{1<<31 - 512, 3}, {512, 0}}},
		{60<<30 + 1, 1<<32 - 1, []extent{{1<<31 - 513, 3}, {512, 0}}},
	} {
		if got := c.blockStatus(0, v.off, int(v.n)); !slices.Equal(got, v.want) {
			t.Errorf("%d bytes at %d: %v, want %v", v.n, v.off, got, v.want)
		}
	}
	r.disks[0].telling(func(*shm.SQE, []byte) blk.Errno { return blk.EIO })
	if got := c.blockStatus(0, 1<<33+1, 1<<32-1); !slices.Equal(got, []extent{{1<<31 - 1, 0}}) && !slices.Equal(got, []extent{{1 << 31, 0}}) {
		t.Errorf("%v", got)
	}
}

// Ranges become multiples of the minimum block size.
func TestBlockStatus_WholeBlocks(t *testing.T) {
	l := testLimits(1 << 20)
	l.LogicalBlockSize = 4096
	r := newRig(t, rigConfig{slotSize: 4096, limits: l})
	r.disks[0].telling(puts(data(512), hole(11776), data(4096)))
	if got := r.connect(true).blockStatus(0, 4096, 16384); !slices.Equal(got, []extent{{4096, 0}, {8192, 3}, {4096, 0}}) {
		t.Error(got)
	}
}

// sectors fills a disk so that every other piece is a hole, and returns the model.
func sectors(d *disk, rnd *rand.Rand) []bool {
	model := make([]bool, d.limits.Size/512)
	d.with(func() {
		for i := 0; i < len(model); {
			isHole := rnd.IntN(2) == 0
			for range 1 + rnd.IntN(6) {
				if i == len(model) {
					break
				}
				if model[i] = isHole; !isHole {
					d.mem[i*512] = 1
				}
				i++
			}
		}
	})
	return model
}

// matches reports the first byte of the list that the model has otherwise, or -1.
func matches(model []bool, off uint64, list []extent) int64 {
	for _, e := range list {
		for end := off + uint64(e.n); off < end; off++ {
			if model[off/512] != (e.flags == 3) {
				return int64(off)
			}
		}
	}
	return -1
}

// Many clients at once, answers in any order, ranges with more extents than a list
// holds, slots that are few.
func TestBlockStatus_AgainstAModel(t *testing.T) {
	for _, slots := range []int{1, 5, 64} {
		r := newRig(t, rigConfig{queues: min(2, slots), slots: slots, slotSize: 4096, seed: 8, limits: testLimits(1 << 20)})
		model := sectors(r.disks[0], rand.New(rand.NewPCG(1, 2)))
		var wg sync.WaitGroup
		for i := range 4 {
			c := r.connect(true)
			for depth := range 4 {
				rnd := rand.New(rand.NewPCG(uint64(i), uint64(depth)))
				wg.Go(func() {
					for range 50 {
						off := rnd.IntN(1 << 20)
						n := 1 + rnd.IntN(1<<20-off)
						flags := uint16(rnd.IntN(2) * nbdwire.CmdFlagReqOne)
						p := c.start(nbdwire.CmdBlockStatus, flags, uint64(off), n, nil)
						if code, err := p.wait(); code != 0 || err != nil || flags != 0 && len(p.list) != 1 {
							t.Errorf("code %d, error %v, %v", code, err, p.list)
							return
						}
						if at := matches(model, uint64(off), p.list); at >= 0 {
							t.Errorf("%d bytes at %d: byte %d is of another kind", n, off, at)
						}
						got := make([]byte, 700)
						if code := c.read(0, got); code != 0 || !bytes.Equal(got, r.disks[0].at(0, 700)) {
							t.Errorf("a read between: code %d", code)
						}
					}
				})
			}
		}
		wg.Wait()
		eventually(t, "slots are back", func() bool { return r.free(0) })
	}
}

// A walk over the device, as clients do it, meets each byte once.
func TestBlockStatus_Walk(t *testing.T) {
	r := newRig(t, rigConfig{limits: testLimits(1 << 20)})
	model := sectors(r.disks[0], rand.New(rand.NewPCG(5, 6)))
	c := r.connect(true)
	calls, full := 0, 0
	for off := uint64(0); off < 1<<20; calls++ {
		list := c.blockStatus(0, off, int(1<<20-off))
		if at := matches(model, off, list); at >= 0 {
			t.Fatalf("byte %d is of another kind", at)
		}
		if len(list) == extents.Max {
			full++
		}
		for _, e := range list {
			off += uint64(e.n)
		}
	}
	if calls < 2 || full == 0 {
		t.Errorf("%d calls, %d full lists", calls, full)
	}
}

// A host that does not answer keeps the slot, and no other command.
func TestBlockStatus_Hangs(t *testing.T) {
	b := newBench(t, 4, 4096, true)
	b.h.hold.Store(true)
	b.peer.Write(command(nbdwire.CmdBlockStatus, 0, 1, 0, 4096))
	b.settle()
	if len(b.c.sh.free) != 3 || b.c.inDevice() != 1 || b.c.allAnswered() {
		t.Fatalf("%d slots are free, %d in the device", len(b.c.sh.free), b.c.inDevice())
	}
	b.peer.Close()
	b.settle()
	if len(b.q.conns) != 1 || len(b.c.sh.free) != 3 {
		t.Error("the slot is given back while the host has it")
	}
	b.h.hold.Store(false)
	b.settle()
	if len(b.q.conns) != 0 || len(b.c.sh.free) != 4 {
		t.Errorf("%d connections, %d free slots", len(b.q.conns), len(b.c.sh.free))
	}
}

// Replies that are not read keep their slots, and give them back with the connection.
func TestBlockStatus_RepliesThatAreNotRead(t *testing.T) {
	r := newRig(t, rigConfig{slots: 8, slotSize: 4096, limits: testLimits(512 << 10)})
	model := sectors(r.disks[0], rand.New(rand.NewPCG(1, 2)))
	slow := dial(t, "unix", r.addr, "disk0", true)
	slow.conn.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
	for i := range 10000 {
		if _, err := slow.conn.Write(command(nbdwire.CmdBlockStatus, 0, uint64(i), 0, 512<<10)); err != nil {
			break
		}
	}
	c := r.connect(true)
	for range 20 {
		if got := c.blockStatus(0, 0, 512<<10); len(got) < 2 || matches(model, 0, got) >= 0 {
			t.Fatal(got)
		}
	}
	slow.conn.Close()
	eventually(t, "slots are back", func() bool { return r.f.Openers(0) == 1 && r.free(0) })
}

func TestBlockStatus_ReadOnly(t *testing.T) {
	l := testLimits(1 << 20)
	l.ReadOnly = true
	r := newRig(t, rigConfig{limits: l})
	if got := r.connect(true).blockStatus(0, 0, 1<<20); !slices.Equal(got, []extent{{1 << 20, 3}}) {
		t.Error(got)
	}
}

// With TLS, and for a client that may only read.
func TestTLS_BlockStatus(t *testing.T) {
	a := newAuthority(t)
	s := a.server(true, true)
	s.Rules = []plugin.UserRule{{Identity: []string{"dns:web"}, Allow: "ro"}}
	_, addr := tlsRig(t, rigConfig{}, s)
	c := running(secured(t, addr, a.member("web"), true))
	if got := c.blockStatus(0, 0, 4<<20); !slices.Equal(got, []extent{{4 << 20, 3}}) {
		t.Error(got)
	}
	conn, err := upgrade(greeted(t, "tcp", addr), a.member("other"))
	must(t, "upgrade", err)
	mustAsk(t, conn, nbdwire.OptStructuredReply, nil, nbdwire.RepAck)
	for _, opt := range []uint32{nbdwire.OptListMetaContext, nbdwire.OptSetMetaContext} {
		mustAsk(t, greeted(t, "tcp", addr), opt, metaData("disk0", nbdwire.AllocationContext), needsTLS)
		mustAsk(t, conn, opt, metaData("disk0", nbdwire.AllocationContext), nbdwire.RepErrUnknown)
		mustAsk(t, conn, opt, metaData("", nbdwire.AllocationContext), nbdwire.RepErrUnknown)
	}
}

// What is selected before TLS is forgotten.
func TestTLS_ContextBeforeTheHandshake(t *testing.T) {
	a := newAuthority(t)
	_, addr := tlsRig(t, rigConfig{}, a.server(false, false))
	plain := greeted(t, "tcp", addr)
	before := &client{t: t, conn: plain}
	mustAsk(t, plain, nbdwire.OptStructuredReply, nil, nbdwire.RepAck)
	if before.setContext("disk0"); !before.context {
		t.Fatal("no context before TLS")
	}
	conn, err := upgrade(plain, a.client())
	must(t, "upgrade", err)
	mustAsk(t, conn, nbdwire.OptSetMetaContext, metaData("disk0", nbdwire.AllocationContext), nbdwire.RepErrInvalid)
	mustAsk(t, conn, nbdwire.OptStructuredReply, nil, nbdwire.RepAck)
	c := &client{t: t, conn: conn, pending: map[uint64]*call{}}
	c.must(conn.Write(option(nbdwire.OptExportName, []byte("disk0"))))
	c.must(io.ReadFull(conn, make([]byte, 10)))
	if code := running(c).do(nbdwire.CmdBlockStatus, 0, 0, 512, nil); code != nbdEINVAL {
		t.Errorf("code %d", code)
	}
}
