package iwarp

import (
	"encoding/hex"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// offline is a queue pair without a socket: the test carries the bytes. It
// decodes and encodes as a connected one does, in the same code.
type offline struct {
	t   testing.TB
	pd  *softverbs.Domain
	q   *qp
	wcs []verbs.WC
}

func bothTerms() connTerms {
	return connTerms{crc: true, ird: 4, ord: 4, features: ourFeatures, initiator: true}
}

func newOffline(t testing.TB, tm connTerms) *offline {
	t.Helper()
	d, err := Open(quiet(DefaultConfig()))
	if err != nil {
		t.Fatal(err)
	}
	return newOfflineOn(t, d.(*Device), tm)
}

func newOfflineOn(t testing.TB, d *Device, tm connTerms) *offline {
	t.Helper()
	dom := softverbs.NewDomain(&d.keys)
	c := &compQueue{dev: d, stats: &queueCounters{}}
	d.stats.Open(c.stats)
	c.Init()
	v, err := d.CreateQP(dom, verbs.QPConfig{CQ: c, Context: 1, SendQueue: 64, RecvQueue: 64, MaxSGE: 4})
	if err != nil {
		t.Fatal(err)
	}
	q := v.(*qp)
	q.initHalves(-1, tm)
	q.Set(softverbs.Up)
	q.Attached = true
	return &offline{t: t, pd: dom, q: q}
}

func (o *offline) region(n int, access verbs.Access) ([]byte, *softverbs.Region) {
	o.t.Helper()
	buf := make([]byte, n)
	m, err := o.pd.RegMR(buf, access)
	if err != nil {
		o.t.Fatal(err)
	}
	return buf, m.(*softverbs.Region)
}

// recv posts n receives of size bytes.
func (o *offline) recv(n, size int) {
	o.t.Helper()
	for i := range n {
		wr := verbs.RecvWR{ID: uint64(i)}
		if size > 0 {
			buf, r := o.region(size, 0)
			wr.Buf, wr.LKey = buf, r.LKey()
		}
		if _, err := o.q.PostRecv([]verbs.RecvWR{wr}); err != nil {
			o.t.Fatal(err)
		}
	}
}

func (o *offline) send(wrs ...verbs.SendWR) {
	o.t.Helper()
	if _, err := o.q.PostSend(wrs); err != nil {
		o.t.Fatal(err)
	}
}

// feed decodes b in pieces of at most chunk bytes. It returns the number of
// bytes the decoder accepted.
func (o *offline) feed(b []byte, chunk int) int {
	x := &o.q.rx
	fed := 0
	for fed < len(b) {
		x.w = copy(x.stage, x.stage[x.r:x.w])
		x.r = 0
		n := copy(x.stage[x.w:], b[fed:min(len(b), fed+chunk)])
		if n == 0 {
			return fed
		}
		x.w += n
		fed += n
		if v := o.parse(); v != rxMore {
			return fed
		}
	}
	return fed
}

func (o *offline) parse() parseVerdict {
	var wcs [2]verbs.WC
	for {
		n, v := o.q.parse(wcs[:])
		o.wcs = append(o.wcs, wcs[:n]...)
		if v != rxFull {
			return v
		}
	}
}

// take returns the bytes that the queue pair sends.
func (o *offline) take() []byte {
	t := &o.q.tx
	var out []byte
	for {
		t.at, t.n, t.headUsed, t.headVec = 0, 0, 0, false
		if o.q.buildList(); t.n == 0 {
			return out
		}
		for i := range t.n {
			out = append(out, t.v.entryBytes(i)...)
		}
		t.accepted = t.queued
		t.at = t.n
		if t.termBuilt {
			return out
		}
	}
}

// code is the Terminate the queue pair ended with, 0 while it is up.
func (o *offline) code() termCode { return termCode(o.q.End.Code) }

// unhex decodes hex with blanks in it.
func unhex(s string) []byte {
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		panic(err)
	}
	return b
}

// segment builds a sealed FPDU.
type segment struct {
	op      opcode
	more    bool // not the last
	stag    uint32
	to      uint64
	qn      *uint32 // another queue than the opcode's
	msn, mo uint32
	payload []byte
	edit    func(b []byte) // before the CRC
	after   func(b []byte) // behind the CRC
}

func (s segment) bytes(crc bool) []byte {
	b := make([]byte, fpduUntagged+len(s.payload)+3+crcLen)
	if s.op.tagged() {
		putTagged(b, s.op, !s.more, len(s.payload), s.stag, s.to)
	} else {
		putUntagged(b, s.op, !s.more, len(s.payload), s.stag, s.msn, s.mo)
		if s.qn != nil {
			b[11] = byte(*s.qn)
		}
	}
	copy(b[fpduHeader(b).size():], s.payload)
	if s.edit != nil {
		s.edit(b)
	}
	out := sealFPDU(b, crc)
	if s.after != nil {
		s.after(out)
	}
	return out
}

// splitFPDUs cuts a stream into frames.
func splitFPDUs(t testing.TB, b []byte) [][]byte {
	t.Helper()
	var out [][]byte
	for len(b) > 0 {
		n := 0
		if len(b) >= fpduTagged {
			h := fpduHeader(b)
			n = 2 + h.length() + h.tail()
		}
		if n == 0 || n > len(b) {
			t.Fatalf("%d bytes are no whole frame", len(b))
		}
		out = append(out, b[:n])
		b = b[n:]
	}
	return out
}
