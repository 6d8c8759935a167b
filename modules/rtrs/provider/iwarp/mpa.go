package iwarp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// MPA start-up: one request, one reply, each a 20-byte header and private
// data. With S set the private data begins with the IRD/ORD words of RFC 6581.
// Between two ends of this package an extension block follows, then the data of
// the consumer.

const (
	mpaHeaderLen  = 20
	mpaKeyLen     = 16
	mpaKeyRequest = "MPA ID Req Frame"
	mpaKeyReply   = "MPA ID Rep Frame"

	mpaMarkers  = 0x80
	mpaCRC      = 0x40
	mpaReject   = 0x20
	mpaEnhanced = 0x10

	maxMPAPrivate = 512 // accepted, RFC 5044
	maxUserData   = 244 // sent: siw takes 252 behind the enhanced words, the block takes 8

	enhancedLen  = 4
	maxReadDepth = 0x3ffe // 14 bits; 0x3fff means "not negotiated"
	readDepthBit = 0x3fff

	peerToPeer = 0x8000 // A, in the IRD word
	rtrSend    = 0x4000 // B
	rtrWrite   = 0x8000 // C, in the ORD word
	rtrRead    = 0x4000 // D

	extensionLen     = 8
	extensionMagic   = "RNBD"
	extensionVersion = 1

	featureImmediate byte = 1 << 0 // RFC 7306 Immediate Data
	featureSendImm   byte = 1 << 1 // opcode 0xF
	ourFeatures           = featureImmediate | featureSendImm
)

// errNoExtension is the error if the peer is iWARP without the extension block.
var errNoExtension = errors.New("peer speaks iWARP but not the RTRS extensions")

// mpaFrame is a request or a reply.
type mpaFrame struct {
	flags   byte
	rev     byte
	private []byte
}

func (f *mpaFrame) hasFlag(flag byte) bool { return f.flags&flag != 0 }

// enhanced reports whether the private data starts with IRD and ORD. In
// revision 1 the bit is reserved.
func (f *mpaFrame) enhanced() bool { return f.rev >= 2 && f.hasFlag(mpaEnhanced) }

func (f *mpaFrame) encode(key string) []byte {
	b := make([]byte, mpaHeaderLen, mpaHeaderLen+len(f.private))
	copy(b, key)
	b[16], b[17] = f.flags, f.rev
	binary.BigEndian.PutUint16(b[18:], uint16(len(f.private)))
	return append(b, f.private...)
}

// errMPA is the error for bytes that are not an MPA frame. The connection is
// closed without an answer.
var errMPA = errors.New("not an MPA frame")

// parseMPAHeader checks the first 20 bytes and returns the length of the
// private data that follows.
func parseMPAHeader(b []byte, key string) (f mpaFrame, private int, err error) {
	if len(b) < mpaHeaderLen || string(b[:mpaKeyLen]) != key {
		return f, 0, fmt.Errorf("%w: wrong key", errMPA)
	}
	f.flags, f.rev = b[16], b[17]
	private = int(binary.BigEndian.Uint16(b[18:]))
	if private > maxMPAPrivate {
		return f, 0, fmt.Errorf("%w: %d bytes of private data, at most %d", errMPA, private, maxMPAPrivate)
	}
	if f.rev < 1 || f.rev > 2 {
		return f, 0, fmt.Errorf("%w: revision %d", errMPA, f.rev)
	}
	return f, private, nil
}

// readMPA reads one frame and nothing behind it.
func readMPA(r io.Reader, key string) (mpaFrame, error) {
	var head [mpaHeaderLen]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return mpaFrame{}, err
	}
	f, n, err := parseMPAHeader(head[:], key)
	if err != nil {
		return f, err
	}
	f.private = make([]byte, n)
	_, err = io.ReadFull(r, f.private)
	return f, err
}

// readDepths are the IRD and ORD words.
type readDepths struct {
	ird, ord         int
	p2p              bool // A
	send, write, rtr bool // B, C, D: RTR by Send, Write, Read
}

func parseDepths(b []byte) (d readDepths) {
	w0, w1 := binary.BigEndian.Uint16(b), binary.BigEndian.Uint16(b[2:])
	d.ird, d.ord = int(w0&readDepthBit), int(w1&readDepthBit)
	if d.p2p = w0&peerToPeer != 0; d.p2p {
		d.send, d.write, d.rtr = w0&rtrSend != 0, w1&rtrWrite != 0, w1&rtrRead != 0
	}
	return d
}

func (d readDepths) append(b []byte) []byte {
	w0, w1 := uint16(d.ird), uint16(d.ord)
	w0 |= boolBit(d.p2p, peerToPeer) | boolBit(d.send, rtrSend)
	w1 |= boolBit(d.write, rtrWrite) | boolBit(d.rtr, rtrRead)
	return binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(b, w0), w1)
}

func boolBit(on bool, v uint16) uint16 {
	if on {
		return v
	}
	return 0
}

func appendExtension(b []byte) []byte {
	return append(append(b, extensionMagic...), extensionVersion, ourFeatures, 0, 0)
}

// cutExtension removes the extension block from the front of b. Later versions
// keep the meaning of existing bits, so every version is accepted.
func cutExtension(b []byte) (features byte, rest []byte, ok bool) {
	if len(b) < extensionLen || string(b[:4]) != extensionMagic || b[4] == 0 {
		return 0, b, false
	}
	return b[5], b[extensionLen:], true
}

// connTerms are the agreement of the two ends.
type connTerms struct {
	crc       bool
	ird, ord  int  // READs that this end serves and issues at a time
	features  byte // of both ends
	initiator bool
	opening   bool // initiator: an empty Write comes first, so that the responder may speak
	poke      bool // initiator: empty Writes wake a siw responder that has missed the first FPDU
}

// mpaRequest builds an MPA request.
func (c *Config) mpaRequest(private []byte) mpaFrame {
	f := mpaFrame{flags: mpaEnhanced, rev: 2}
	if c.CRC {
		f.flags |= mpaCRC
	}
	// The responder may have to send first. An empty Write opens the connection
	// in any case. The peer-to-peer model, with a responder that waits for it,
	// is not asked for: Linux 6.12 crashes if its siw has agreed to it and then
	// loses the connection before the RTR frame.
	f.private = readDepths{ird: c.IRD, ord: c.ORD}.append(nil)
	f.private = c.appendPrivate(f.private, private)
	return f
}

func (c *Config) appendPrivate(b, private []byte) []byte {
	if !c.Foreign {
		b = appendExtension(b)
	}
	return append(b, private...)
}

// mpaRefusal is a reply with R set. The connection ends after it.
type mpaRefusal struct {
	reply mpaFrame
	cause error
}

func (r *mpaRefusal) Error() string { return r.cause.Error() }
func (r *mpaRefusal) Unwrap() error { return r.cause }

// buildRefusal builds a reply with R to req. Its enhanced words are 0.
func buildRefusal(req *mpaFrame, cause error) *mpaRefusal {
	f := mpaFrame{flags: mpaReject, rev: req.rev}
	if req.enhanced() && len(req.private) >= enhancedLen {
		f.flags |= mpaEnhanced
		f.private = make([]byte, enhancedLen)
	}
	return &mpaRefusal{f, cause}
}

// checkRequest checks a request at the responder. It returns the terms, the private
// data of the consumer and the read words of the reply. An error may be a
// *refusal.
func (c *Config) checkRequest(req *mpaFrame) (t connTerms, private []byte, d readDepths, err error) {
	t = connTerms{crc: c.CRC || req.hasFlag(mpaCRC), ird: c.IRD}
	private = req.private
	if req.enhanced() {
		if len(private) < enhancedLen {
			return t, nil, d, buildRefusal(req, fmt.Errorf("%w: enhanced request with %d bytes of private data", errMPA, len(private)))
		}
		d = c.answerDepths(parseDepths(private))
		t.ird, t.ord = d.ird, d.ord
		private = private[enhancedLen:]
	}
	if req.hasFlag(mpaMarkers) {
		return t, nil, d, buildRefusal(req, errors.New("peer asks for markers"))
	}
	if !c.Foreign {
		var ok bool
		if t.features, private, ok = cutExtension(private); !ok {
			return t, nil, d, buildRefusal(req, errNoExtension)
		}
		t.features &= ourFeatures
	}
	return t, private, d, nil
}

// answerDepths raises IRD to the peer's ORD, up to maxServedReads, and lowers
// ORD to the peer's IRD.
func (c *Config) answerDepths(peer readDepths) readDepths {
	d := readDepths{ird: c.IRD, ord: min(c.ORD, peer.ird), p2p: peer.p2p}
	if peer.ord > d.ird && c.IRD > 0 {
		d.ird = min(peer.ord, max(c.IRD, maxServedReads))
	}
	if d.p2p {
		d.write = peer.write || !peer.rtr
		d.rtr = peer.rtr && !d.write
	}
	return d
}

// maxServedReads is how far IRD is raised for a peer that asks for more.
const maxServedReads = 128

// mpaReply builds the reply to req.
func (c *Config) mpaReply(req *mpaFrame, t connTerms, d readDepths, reject bool, private []byte) mpaFrame {
	f := mpaFrame{rev: req.rev}
	if t.crc {
		f.flags |= mpaCRC
	}
	if reject {
		f.flags |= mpaReject
	}
	if req.enhanced() {
		f.flags |= mpaEnhanced
		f.private = d.append(f.private)
	}
	f.private = c.appendPrivate(f.private, private)
	return f
}

// termError is a failed negotiation that is answered with a Terminate.
type termError struct {
	code termCode
	crc  bool
}

func (e *termError) Error() string { return "handshake failed: " + e.code.String() }

// checkReply checks the reply to req at the initiator.
func (c *Config) checkReply(req, rep *mpaFrame) (t connTerms, private []byte, err error) {
	t = connTerms{crc: req.hasFlag(mpaCRC) || rep.hasFlag(mpaCRC), ird: c.IRD, initiator: true, opening: true, poke: c.Foreign}
	if rep.rev != req.rev || rep.enhanced() != req.enhanced() && !rep.hasFlag(mpaReject) {
		return t, nil, fmt.Errorf("%w: reply of revision %d, flags %#x", errMPA, rep.rev, rep.flags)
	}
	private = rep.private
	var d readDepths
	if rep.enhanced() && len(private) >= enhancedLen {
		d = parseDepths(private)
		private = private[enhancedLen:]
	} else if !rep.hasFlag(mpaReject) {
		return t, nil, &termError{termMPA, t.crc}
	}
	features, rest, ours := cutExtension(private)
	if ours && !c.Foreign {
		private, t.features = rest, features&ourFeatures
	}
	switch {
	case rep.hasFlag(mpaReject):
		return t, nil, &verbs.RejectError{Private: private}
	case rep.hasFlag(mpaMarkers):
		return t, nil, &termError{termMPA, t.crc}
	case !ours && !c.Foreign:
		return t, nil, errNoExtension
	case d.ord > c.IRD:
		return t, nil, &termError{termIRD, t.crc}
	}
	t.ord = min(c.ORD, d.ird)
	return t, private, nil
}
