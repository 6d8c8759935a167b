package rocev2

import (
	"cmp"
	"net/netip"
)

// Messages of the connection manager: datagrams to queue pair 1 with a
// management datagram of 256 bytes. docs/extend/protocol/rocev2.md, Connection
// manager, has the layouts; offsets below count from the end of the common
// header, as there.

const (
	madLen       = 256
	madHeaderLen = 24
	// cmPacketLen is the UDP payload of every message, ICRC included.
	cmPacketLen = bthLen + dethLen + madLen + icrcLen

	madVersion      = 1
	madClassCM      = 7
	madClassVersion = 2
	madMethodSend   = 3
)

// madAttribute is the kind of a message.
type madAttribute uint16

const (
	attrREQ  madAttribute = 0x10
	attrMRA  madAttribute = 0x11
	attrREJ  madAttribute = 0x12
	attrREP  madAttribute = 0x13
	attrRTU  madAttribute = 0x14
	attrDREQ madAttribute = 0x15
	attrDREP madAttribute = 0x16
)

// rejectReason is the reason of a REJ.
type rejectReason uint16

const (
	reasonNoResources      rejectReason = 3
	reasonTimeout          rejectReason = 4
	reasonUnsupported      rejectReason = 5
	reasonInvalidService   rejectReason = 8
	reasonInvalidTransport rejectReason = 9
	reasonStale            rejectReason = 10
	reasonInvalidGID       rejectReason = 12
	reasonInvalidMTU       rejectReason = 26
	reasonConsumer         rejectReason = 28
)

func (r rejectReason) String() string {
	switch r {
	case reasonNoResources:
		return "no resources"
	case reasonTimeout:
		return "timeout"
	case reasonUnsupported:
		return "unsupported request"
	case reasonInvalidService:
		return "no listener at this port"
	case reasonInvalidTransport:
		return "invalid transport service type"
	case reasonStale:
		return "stale connection"
	case reasonInvalidGID:
		return "invalid address"
	case reasonInvalidMTU:
		return "path MTU is too large for the peer"
	case reasonConsumer:
		return "refused by the consumer"
	}
	return "reason " + formatUint16(uint16(r))
}

func formatUint16(v uint16) string {
	if v >= 10 {
		return formatUint16(v/10) + string(rune('0'+v%10))
	}
	return string(rune('0' + v))
}

// The message that a REJ or a MRA answers.
const (
	aboutREQ   = 0
	aboutREP   = 1
	aboutOther = 2
)

// Offsets and lengths of private data.
const (
	reqPrivate, reqPrivateLen = 140, 92
	repPrivate, repPrivateLen = 36, 196
	rejPrivate, rejPrivateLen = 84, 148
	rejARI                    = 12
)

// mad is a management datagram of madLen bytes.
type mad []byte

func (m mad) attribute() madAttribute { return madAttribute(be.Uint16(m[16:])) }
func (m mad) tid() uint64             { return be.Uint64(m[8:]) }
func (m mad) body() []byte            { return m[madHeaderLen:] }
func (m mad) sender() uint32          { return be.Uint32(m[24:]) }
func (m mad) receiver() uint32        { return be.Uint32(m[28:]) }

// valid reports whether m is a message of the connection manager.
func (m mad) valid() bool {
	return len(m) == madLen && m[0] == madVersion && m[1] == madClassCM && m[2] == madClassVersion && m[3] == madMethodSend
}

// newMAD starts a message. In all kinds but a REQ the ids follow.
func newMAD(kind madAttribute, tid uint64, sender, receiver uint32) mad {
	m := make(mad, madLen)
	m[0], m[1], m[2], m[3] = madVersion, madClassCM, madClassVersion, madMethodSend
	be.PutUint64(m[8:], tid)
	be.PutUint16(m[16:], uint16(kind))
	be.PutUint32(m[24:], sender)
	if kind != attrREQ {
		be.PutUint32(m[28:], receiver)
	}
	return m
}

func get24(b []byte) uint32 { return uint32(b[0])<<16 | uint32(b[1])<<8 | uint32(b[2]) }

func put24(b []byte, v uint32) { b[0], b[1], b[2] = byte(v>>16), byte(v>>8), byte(v) }

// reqFields are the contents of a REQ that are read or set here.
type reqFields struct {
	id           uint32
	service      uint64
	pkey         uint16 // 0: the default when sent
	guid         uint64
	qpn, psn     uint32 // psn: expected by the sender
	respRes      uint8  // reads the sender serves at once
	initDepth    uint8  // reads the sender issues at once
	transport    uint8  // 0: reliable connection
	mtu          uint8  // code 1..5
	ackTimeout   uint8
	srcGID       [16]byte
	dstGID       [16]byte
	sourcePort   uint16 // of the sender, in the IP header of rdma_cm
	source, dest netip.Addr
	private      []byte
}

// servicePort names a port of the TCP port space of rdma_cm.
const servicePortSpace = 0x0106 << 16

// ofRDMACM reports whether requests for a service have the header of rdma_cm.
func ofRDMACM(service uint64) bool { return service&^0xffff == servicePortSpace }

const (
	cmTimeoutCode = 20 // 4.096 us * 2^20 = 4.3 s, as the kernel's
	cmRetries     = 15
	retryCount    = 7
	// ackTimeoutCode asks a peer to wait 0.54 s for an acknowledgement, as the
	// kernel does: rxe repeats all that is unacknowledged then, and cannot repeat
	// the REG_MR of a server that changes keys (docs/extend/protocol/rocev2.md).
	ackTimeoutCode = 17
	ackDelayCode   = 15
	anyLID         = 0xffff
	hopLimit       = 64
)

func (f *reqFields) encode(tid uint64) mad {
	m := newMAD(attrREQ, tid, f.id, 0)
	b := m.body()
	be.PutUint64(b[8:], f.service)
	be.PutUint64(b[16:], f.guid)
	put24(b[32:], f.qpn)
	b[35], b[39] = f.respRes, f.initDepth
	b[43] = cmTimeoutCode<<3 | f.transport<<1
	put24(b[44:], f.psn)
	b[47] = cmTimeoutCode<<3 | retryCount
	be.PutUint16(b[48:], cmp.Or(f.pkey, defaultPKey))
	b[50] = f.mtu<<4 | retryCount
	b[51] = cmRetries << 4
	be.PutUint16(b[52:], anyLID)
	be.PutUint16(b[54:], anyLID)
	copy(b[56:72], f.srcGID[:])
	copy(b[72:88], f.dstGID[:])
	b[93] = hopLimit
	b[95] = f.ackTimeout << 3
	p := b[reqPrivate:]
	if !ofRDMACM(f.service) {
		copy(p[:reqPrivateLen], f.private)
		return m
	}
	p[1] = ipVersion(f.source) << 4
	be.PutUint16(p[2:], f.sourcePort)
	putAddr(p[4:20], f.source)
	putAddr(p[20:36], f.dest)
	copy(p[ipHeaderLen:reqPrivateLen], f.private)
	return m
}

// ipHeaderLen is the length of the header of rdma_cm before the data of the
// consumer.
const ipHeaderLen = 36

func decodeREQ(m mad) (f reqFields) {
	b := m.body()
	f.id = be.Uint32(b)
	f.service, f.guid = be.Uint64(b[8:]), be.Uint64(b[16:])
	f.qpn, f.psn = get24(b[32:]), get24(b[44:])
	f.respRes, f.initDepth = b[35], b[39]
	f.transport = b[43] >> 1 & 3
	f.mtu, f.ackTimeout = b[50]>>4, b[95]>>3
	copy(f.srcGID[:], b[56:])
	copy(f.dstGID[:], b[72:])
	f.pkey = be.Uint16(b[48:])
	p := b[reqPrivate:]
	if !ofRDMACM(f.service) {
		f.private = p[:reqPrivateLen]
		return f
	}
	if p[0] == 0 {
		f.source, f.dest = getAddr(p[4:20], p[1]>>4), getAddr(p[20:36], p[1]>>4)
	}
	f.sourcePort = be.Uint16(p[2:])
	f.private = p[ipHeaderLen:reqPrivateLen]
	return f
}

func ipVersion(a netip.Addr) byte {
	if a.Is4() {
		return 4
	}
	return 6
}

func putAddr(b []byte, a netip.Addr) {
	if a.Is4() {
		v := a.As4()
		copy(b[12:], v[:])
		return
	}
	v := a.As16()
	copy(b, v[:])
}

// getAddr returns an invalid address if version is neither 4 nor 6.
func getAddr(b []byte, version byte) netip.Addr {
	switch version {
	case 4:
		return netip.AddrFrom4([4]byte(b[12:16]))
	case 6:
		return netip.AddrFrom16([16]byte(b[:16]))
	}
	return netip.Addr{}
}

// repFields are the contents of a REP that are read or set here.
type repFields struct {
	guid      uint64
	qpn, psn  uint32
	respRes   uint8
	initDepth uint8
	private   []byte
}

func (f *repFields) encode(tid uint64, sender, receiver uint32) mad {
	m := newMAD(attrREP, tid, sender, receiver)
	b := m.body()
	put24(b[12:], f.qpn)
	put24(b[20:], f.psn)
	b[24], b[25] = f.respRes, f.initDepth
	b[26] = ackDelayCode << 3
	b[27] = retryCount << 5
	be.PutUint64(b[28:], f.guid)
	copy(b[repPrivate:repPrivate+repPrivateLen], f.private)
	return m
}

func decodeREP(m mad) (f repFields) {
	b := m.body()
	f.qpn, f.psn = get24(b[12:]), get24(b[20:])
	f.respRes, f.initDepth = b[24], b[25]
	f.guid = be.Uint64(b[28:])
	f.private = b[repPrivate : repPrivate+repPrivateLen]
	return f
}

// rejFields are the contents of a REJ.
type rejFields struct {
	about   byte
	reason  rejectReason
	ari     []byte
	private []byte
}

func (f *rejFields) encode(tid uint64, sender, receiver uint32) mad {
	m := newMAD(attrREJ, tid, sender, receiver)
	b := m.body()
	b[8] = f.about << 6
	b[9] = byte(len(f.ari)) << 1
	be.PutUint16(b[10:], uint16(f.reason))
	copy(b[rejARI:rejPrivate], f.ari)
	copy(b[rejPrivate:rejPrivate+rejPrivateLen], f.private)
	return m
}

func decodeREJ(m mad) (f rejFields) {
	b := m.body()
	f.about, f.reason = m.rejectedMessage(), rejectReason(be.Uint16(b[10:]))
	f.ari = b[rejARI : rejARI+min(int(b[9]>>1), rejPrivate-rejARI)]
	f.private = b[rejPrivate : rejPrivate+rejPrivateLen]
	return f
}

// newMRA returns a message that asks for more time to answer a REQ:
// 4.096 us * 2^timeout.
func newMRA(tid uint64, sender, receiver uint32, timeout byte) mad {
	m := newMAD(attrMRA, tid, sender, receiver)
	m.body()[8], m.body()[9] = aboutREQ<<6, timeout<<3
	return m
}

// rejectedMessage returns the message that a REJ or an MRA is about.
func (m mad) rejectedMessage() byte { return m.body()[8] >> 6 }

func (m mad) mraTimeout() byte { return m.body()[9] >> 3 }

func newDREQ(tid uint64, sender, receiver, qpn uint32) mad {
	m := newMAD(attrDREQ, tid, sender, receiver)
	put24(m.body()[8:], qpn)
	return m
}

// dreqQPN returns the queue pair of the receiver that a DREQ is about.
func (m mad) dreqQPN() uint32 { return get24(m.body()[8:]) }

// putDatagram writes the headers of a message to queue pair 1 in front of m.
func putDatagram(b []byte, m mad, psn uint32) {
	putBTH(b, opDatagram, 0, cmQPN, psn, false)
	be.PutUint32(b[bthLen:], cmQKey)
	be.PutUint32(b[bthLen+4:], cmQPN)
	copy(b[bthLen+dethLen:], m)
}

// parseDatagram returns the message in a packet that was sent to queue pair 1,
// or nil and the reason to drop it. The caller checks the ICRC.
func parseDatagram(b []byte) (mad, dropReason) {
	h := bth(b)
	switch {
	case len(b) != cmPacketLen:
		return nil, dropLength
	case h.version() != 0 || h.opcode() != opDatagram || h.pad() != 0:
		return nil, dropHeader
	case h.pkey()|1<<15 != defaultPKey:
		return nil, dropPKey
	case h.qpn() != cmQPN:
		return nil, dropQPN
	case be.Uint32(b[bthLen:]) != cmQKey:
		return nil, dropKey
	}
	m := mad(b[bthLen+dethLen:][:madLen])
	if !m.valid() {
		return nil, dropMAD
	}
	return m, dropNone
}
