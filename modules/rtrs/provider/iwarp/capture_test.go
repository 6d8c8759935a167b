package iwarp

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// capture is a classic pcap of Ethernet frames, as TCP streams in the order of
// their first segment.
type capture struct{ streams []*tcpStream }

type tcpStream struct {
	client, server string // address:port; client sent the SYN
	dirs           [2]tcpDirection
}

const (
	toServer = 0
	toClient = 1
)

type tcpDirection struct {
	first    uint32 // sequence number of the first byte
	known    bool
	segments []tcpSegment
}

type tcpSegment struct {
	off  uint32
	data []byte
}

func readCapture(t testing.TB, file string) *capture {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if len(b) < 24 || binary.LittleEndian.Uint32(b) != 0xa1b2c3d4 || binary.LittleEndian.Uint32(b[20:]) != 1 {
		t.Fatalf("%s is no little-endian pcap of Ethernet", file)
	}
	c := &capture{}
	for b = b[24:]; len(b) >= 16; {
		n := binary.LittleEndian.Uint32(b[8:])
		c.ethernet(b[16 : 16+n])
		b = b[16+n:]
	}
	return c
}

func (c *capture) ethernet(b []byte) {
	if len(b) < 54 {
		return
	}
	switch binary.BigEndian.Uint16(b[12:]) {
	case 0x0800:
		ip := b[14:]
		ip = ip[:binary.BigEndian.Uint16(ip[2:])]
		if hl := int(ip[0]&0xf) * 4; ip[9] == 6 {
			c.tcp(ip[12:16], ip[16:20], ip[hl:])
		}
	case 0x86dd:
		ip := b[14:]
		if ip[6] == 6 {
			c.tcp(ip[8:24], ip[24:40], ip[40:40+int(binary.BigEndian.Uint16(ip[4:]))])
		}
	}
}

func (c *capture) tcp(src, dst, b []byte) {
	from := fmt.Sprintf("%x:%d", src, binary.BigEndian.Uint16(b))
	to := fmt.Sprintf("%x:%d", dst, binary.BigEndian.Uint16(b[2:]))
	seq, flags := binary.BigEndian.Uint32(b[4:]), b[13]
	const syn, ack = 0x02, 0x10
	s, dir := c.find(from, to)
	if flags&(syn|ack) == syn && (s == nil || s.dirs[toServer].first != seq+1) {
		s, dir = &tcpStream{client: from, server: to}, toServer
		c.streams = append(c.streams, s)
	}
	if s == nil {
		return
	}
	d := &s.dirs[dir]
	if flags&syn != 0 {
		d.first, d.known = seq+1, true
	}
	if data := b[int(b[12]>>4)*4:]; d.known && len(data) > 0 {
		d.segments = append(d.segments, tcpSegment{seq - d.first, data})
	}
}

// find returns the latest stream between two ends.
func (c *capture) find(from, to string) (*tcpStream, int) {
	for _, s := range slices.Backward(c.streams) {
		switch {
		case s.client == from && s.server == to:
			return s, toServer
		case s.client == to && s.server == from:
			return s, toClient
		}
	}
	return nil, 0
}

// bytes puts the segments in order and drops duplicates.
func (d *tcpDirection) bytes() []byte {
	slices.SortStableFunc(d.segments, func(a, b tcpSegment) int { return int(a.off) - int(b.off) })
	var out []byte
	for _, s := range d.segments {
		if have := uint32(len(out)); s.off <= have && s.off+uint32(len(s.data)) > have {
			out = append(out, s.data[have-s.off:]...)
		}
	}
	return out
}

// conversation is a stream after both frames of the start-up.
type conversation struct {
	req, rep mpaFrame
	crc      bool
	fpdus    [2][]byte
}

func (s *tcpStream) conversation() (c conversation, ok bool) {
	up, down := bytes.NewReader(s.dirs[toServer].bytes()), bytes.NewReader(s.dirs[toClient].bytes())
	var err1, err2 error
	c.req, err1 = readMPA(up, mpaKeyRequest)
	c.rep, err2 = readMPA(down, mpaKeyReply)
	if err1 != nil || err2 != nil {
		return c, false
	}
	c.crc = c.req.hasFlag(mpaCRC) || c.rep.hasFlag(mpaCRC)
	c.fpdus[toServer] = make([]byte, up.Len())
	c.fpdus[toClient] = make([]byte, down.Len())
	up.Read(c.fpdus[toServer])
	down.Read(c.fpdus[toClient])
	return c, true
}

// frames cuts whole frames off the front of a stream.
func frames(b []byte) (out [][]byte) {
	for len(b) >= fpduTagged {
		h := fpduHeader(b)
		n := 2 + h.length() + h.tail()
		if h.payload() < 0 || n > len(b) {
			break
		}
		out = append(out, b[:n])
		b = b[n:]
	}
	return out
}

// replay feeds one direction of a conversation to a queue pair in the state
// of its receiver: receives, the regions in grants, the requested reads.
func replay(t *testing.T, c *conversation, dir, chunk, room int, grants []grant) *offline {
	t.Helper()
	tm := connTerms{crc: c.crc, ird: 16, ord: 64}
	o := newOffline(t, tm)
	for _, g := range grants {
		plant(o, g)
	}
	o.recv(64, room)
	for _, f := range frames(c.fpdus[1-dir]) {
		if h := fpduHeader(f); h.op() == opReadRequest && !h.tagged() && h.payload() == readRequestLen {
			expectRead(o, f[fpduUntagged:])
		}
	}
	// The answers to reads are not sent here. A peer that got them must not
	// be blamed.
	for b := c.fpdus[dir]; len(b) > 0 && o.q.End.State == softverbs.EndNone; b = b[min(chunk, len(b)):] {
		o.feed(b[:min(chunk, len(b))], chunk)
		o.q.serveHead = o.q.serveTail
	}
	return o
}

type grant struct {
	stag   uint32
	to     uint64
	n      int
	access verbs.Access
}

// plant registers a region under an STag of the capture's.
func plant(o *offline, g grant) {
	o.pd.Plant(make([]byte, g.n), g.to, g.stag, g.access)
}

func expectRead(o *offline, r readRequest) {
	wr := verbs.SendWR{Op: verbs.OpRead, Signaled: true}
	if r.size() > 0 {
		buf, lr := o.region(int(r.size()), 0)
		wr.SGEs = []verbs.SGE{{Buf: buf, LKey: lr.LKey()}}
	}
	o.send(wr)
	entry := o.q.built
	o.q.built++
	o.q.reads[o.q.readTail%uint64(len(o.q.reads))] = readEntry{entry: entry, stag: r.sinkSTag(), to: r.sinkTO(), length: r.size()}
	o.q.readTail++
}

// granted finds the regions that a direction names in its Writes and Read
// Requests, whole.
func granted(b []byte) (out []grant) {
	add := func(stag uint32, to uint64, n int) {
		for i := range out {
			if g := &out[i]; g.stag == stag {
				end := max(g.to+uint64(g.n), to+uint64(n))
				g.to = min(g.to, to)
				g.n = int(end - g.to)
				return
			}
		}
		out = append(out, grant{stag, to, n, verbs.AccessRemoteWrite | verbs.AccessRemoteRead})
	}
	for _, f := range frames(b) {
		switch h := fpduHeader(f); {
		case h.tagged() && h.op() == opWrite && h.payload() > 0:
			add(h.stag(), h.to(), h.payload())
		case h.op() == opReadRequest && h.payload() == readRequestLen:
			if r := readRequest(f[fpduUntagged:]); r.size() > 0 {
				add(r.sourceSTag(), r.sourceTO(), int(r.size()))
			}
		case h.op() == opSendInv && h.slot() != 0:
			add(h.slot(), 0, 1)
		}
	}
	return out
}

func capturePath(name string) string { return filepath.Join("testdata", name) }

// The pings of siw to siw: everything is accepted, in any chunking, and every
// message is delivered once.
func TestCaptures_PingsOfSIW(t *testing.T) {
	for name, want := range map[string]int{
		"01-rping-default.pcap":       2,
		"02-rping-crc.pcap":           2,
		"03-rping-p2p-rtr-write.pcap": 2,
		"04-rping-p2p-rtr-read.pcap":  2,
		"08-crc-junk-pad.pcap":        2,
	} {
		c := readCapture(t, capturePath(name))
		talks := 0
		for i, s := range c.streams {
			conv, ok := s.conversation()
			if !ok {
				continue
			}
			talks++
			for dir := range 2 {
				for _, chunk := range []int{1, 100, 1 << 20} {
					replayWhole(t, fmt.Sprintf("%s stream %d direction %d chunk %d", name, i, dir, chunk), &conv, dir, chunk)
				}
			}
		}
		if talks != want {
			t.Errorf("%s: %d connections, want %d", name, talks, want)
		}
	}
}

// replayWhole checks that all frames of a direction were consumed, that every
// Send was delivered with its bytes and every Write and Response was placed.
func replayWhole(t *testing.T, name string, conv *conversation, dir, chunk int) {
	t.Helper()
	o := replay(t, conv, dir, chunk, 512, granted(conv.fpdus[dir]))
	if o.code() != 0 || o.q.rx.midMessage() {
		t.Errorf("%s: terminated %s, inside a message: %v", name, o.code(), o.q.rx.midMessage())
		return
	}
	sends := 0
	for _, f := range frames(conv.fpdus[dir]) {
		h := fpduHeader(f)
		payload := f[h.size():][:h.payload()]
		switch h.op() {
		case opSend:
			if sends >= len(o.wcs) || int(o.wcs[sends].ByteLen) != len(payload) || !bytes.Equal(o.q.RQ.At(uint64(sends)).Buf[:len(payload)], payload) {
				t.Errorf("%s: Send %d was not delivered as sent", name, sends)
				return
			}
			sends++
		case opWrite:
			if len(payload) > 0 && o.q.dev.keys.Lookup(h.stag()).Span(h.to(), uint64(len(payload))) == nil {
				t.Errorf("%s: Write to %#x is out of its region", name, h.to())
			}
		}
	}
	if len(o.wcs) != sends || o.q.readHead != o.q.readTail {
		t.Errorf("%s: %d completions for %d Sends, %d reads open", name, len(o.wcs), sends, o.q.readTail-o.q.readHead)
	}
}

// Our decoder judges the messages that siw refused as siw did, except where
// docs/extend/protocol/iwarp.md names a difference.
func TestI009_Captures_WeTerminateAsSIWDoes(t *testing.T) {
	for _, name := range []string{"05-cm-privdata-reject-terminate.pcap", "07-go-prototype-vs-siw.pcap"} {
		judged := 0
		for i, s := range readCapture(t, capturePath(name)).streams {
			conv, ok := s.conversation()
			if !ok {
				continue
			}
			for dir := range 2 {
				want, said := siwSaid(conv.fpdus[1-dir])
				if !said || dir == toClient {
					continue
				}
				judged++
				grants := withheld(conv.fpdus[dir], want)
				o := replay(t, &conv, dir, 1000, 64<<10, grants)
				if want = ourView(want); o.code() != want {
					t.Errorf("%s stream %d: we terminate %s, siw %s", name, i, o.code(), want)
				}
			}
		}
		if judged < 6 {
			t.Errorf("%s: only %d Terminates found", name, judged)
		}
	}
}

func siwSaid(b []byte) (termCode, bool) {
	for _, f := range frames(b) {
		if h := fpduHeader(f); h.op() == opTerminate {
			return parseTerminate(f[fpduUntagged:][:h.payload()])
		}
	}
	return 0, false
}

// withheld are the regions of b with the last one as siw's answer says it was.
func withheld(b []byte, c termCode) []grant {
	grants := granted(b)
	if len(grants) == 0 {
		return nil
	}
	last := &grants[len(grants)-1]
	switch c {
	case termSTag, termReadSTag, termInvSTag:
		if fs := frames(b); c == termSTag && fpduHeader(fs[0]).op() == opReadRequest {
			last.access = verbs.AccessRemoteRead // siw served a read of it, then refused a Write
			break
		}
		return grants[:len(grants)-1]
	case termBounds, termReadBounds:
		last.n--
	}
	return grants
}

// ourView is our answer where it differs from siw's: none, because we have the
// receive that siw lacked, or had too short; or because siw ended the
// connection over a Write of its own.
func ourView(siw termCode) termCode {
	if siw == termNoBuffer || siw == termLocal {
		return 0
	}
	return siw
}

// Our initiator and responder agree with siw's negotiation.
func TestI002_Captures_StartUp(t *testing.T) {
	files, _ := filepath.Glob(capturePath("*.pcap"))
	if len(files) != 9 {
		t.Fatalf("%d captures, want 9", len(files))
	}
	seen, rejects := 0, 0
	for _, file := range files {
		for i, s := range readCapture(t, file).streams {
			conv, ok := s.conversation()
			if !ok {
				continue
			}
			seen++
			cfg := Config{Foreign: true, IRD: 128, ORD: 128}.withDefaults()
			tm, private, d, err := cfg.checkRequest(&conv.req)
			if conv.rep.hasFlag(mpaReject) {
				rejects++
				continue // by siw's consumer, or for a reason of its own
			}
			if err != nil {
				t.Errorf("%s stream %d: we refuse what siw accepts: %v", file, i, err)
				continue
			}
			rep := cfg.mpaReply(&conv.req, tm, d, false, nil)
			if rep.hasFlag(mpaCRC) != conv.rep.hasFlag(mpaCRC) || rep.rev != conv.rep.rev || rep.enhanced() != conv.rep.enhanced() {
				t.Errorf("%s stream %d: we answer flags %#x, siw %#x", file, i, rep.flags, conv.rep.flags)
			}
			if rep.enhanced() {
				ours, theirs := parseDepths(rep.private), parseDepths(conv.rep.private)
				if ours.p2p != theirs.p2p || ours.write != theirs.write || ours.rtr != theirs.rtr {
					t.Errorf("%s stream %d: we answer RTR %+v, siw %+v", file, i, ours, theirs)
				}
				if len(private) != len(conv.req.private)-enhancedLen {
					t.Errorf("%s stream %d: %d bytes of private data", file, i, len(private))
				}
			}
		}
	}
	if seen < 40 || rejects < 3 {
		t.Errorf("%d start-ups, %d rejects: captures are not read", seen, rejects)
	}
}
