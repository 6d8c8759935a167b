package rtrswire

import (
	"encoding/binary"
	"errors"
	"fmt"
)

var le = binary.LittleEndian

const (
	// Magic opens the private data of RTRS; on the wire bd 1b.
	Magic = 0x1BBD
	// Version is 2.0; only the major byte is compared.
	Version = 0x0200

	// ConnReqLen and ConnRspLen are the bytes of private data.
	ConnReqLen = 56
	ConnRspLen = 56

	// MaxCIDNum is the largest number of connections of a path that a server
	// takes for sane.
	MaxCIDNum = 4096
	// MaxPaths of one session.
	MaxPaths = 128
	// ServiceDepth is the fixed queue depth of connection 0.
	ServiceDepth = 512
)

const firstConn = 1 // bit 0 of byte 44

// UUID names a session or a path; 16 opaque bytes.
type UUID [16]byte

// ConnReq is the private data of a connection request.
type ConnReq []byte

// ConnReqFields are the contents of a ConnReq.
type ConnReqFields struct {
	CID       uint16 // index of this connection in its path
	CIDNum    uint16 // number of connections of the path
	ReconCnt  uint16 // attempts of the path so far, this one included
	SessUUID  UUID   // names the path, in spite of its name; kept over reconnects
	PathsUUID UUID   // names the session: the same on all its paths
	FirstConn bool   // the server may make the session
	// Features of our own clients: FeatureProof or none. A kernel's client leaves
	// their bytes zero, its server ignores them.
	Features Features
}

// Put writes f over the first ConnReqLen bytes of m.
func (m ConnReq) Put(f *ConnReqFields) {
	clear(m[:ConnReqLen])
	le.PutUint16(m[2:], Magic)
	le.PutUint16(m[4:], Version)
	le.PutUint16(m[6:], f.CID)
	le.PutUint16(m[8:], f.CIDNum)
	le.PutUint16(m[10:], f.ReconCnt)
	copy(m[12:28], f.SessUUID[:])
	copy(m[28:44], f.PathsUUID[:])
	if f.FirstConn {
		m[44] = firstConn
	}
	if f.Features != 0 {
		putFeatures(m[46:], f.Features)
	}
}

// Check reports whether m is a request of this protocol with possible indices.
func (m ConnReq) Check() error {
	switch {
	case len(m) < ConnReqLen:
		return fmt.Errorf("connection request of %d bytes, want %d", len(m), ConnReqLen)
	case m.Magic() != Magic:
		return fmt.Errorf("connection request with magic %#04x, want %#04x", m.Magic(), Magic)
	case m.Version()>>8 != Version>>8:
		return fmt.Errorf("connection request with version %#04x, want major %d", m.Version(), Version>>8)
	case m.CIDNum() > MaxCIDNum:
		return fmt.Errorf("connection request for %d connections, at most %d", m.CIDNum(), MaxCIDNum)
	case m.CID() >= m.CIDNum():
		return fmt.Errorf("connection request for cid %d of %d", m.CID(), m.CIDNum())
	}
	return nil
}

func (m ConnReq) Magic() uint16    { return le.Uint16(m[2:]) }
func (m ConnReq) Version() uint16  { return le.Uint16(m[4:]) }
func (m ConnReq) CID() uint16      { return le.Uint16(m[6:]) }
func (m ConnReq) CIDNum() uint16   { return le.Uint16(m[8:]) }
func (m ConnReq) ReconCnt() uint16 { return le.Uint16(m[10:]) }
func (m ConnReq) SessUUID() UUID   { return UUID(m[12:28]) }
func (m ConnReq) PathsUUID() UUID  { return UUID(m[28:44]) }

// FirstConn is bit 0 of byte 44; the other bits mean nothing.
func (m ConnReq) FirstConn() bool { return m[44]&firstConn != 0 }

// Features returns the announced features; 0 if the client is not one of this
// project, or announces none.
func (m ConnReq) Features() Features { return parseFeatures(m[46:]) }

// Fields returns the contents.
func (m ConnReq) Fields() ConnReqFields {
	return ConnReqFields{m.CID(), m.CIDNum(), m.ReconCnt(), m.SessUUID(), m.PathsUUID(), m.FirstConn(), m.Features()}
}

// ConnFlags are the flags of a ConnRsp.
type ConnFlags uint32

// FlagNewRkey: every answer carries the next key of its chunk (the server's
// always_invalidate).
const FlagNewRkey ConnFlags = 0x2

// ConnRsp is the private data of the answer, accepting or refusing.
type ConnRsp []byte

// ConnRspFields are the contents of a ConnRsp.
type ConnRspFields struct {
	Errno      int16 // 0, or a negative errno in a refusal
	QueueDepth uint16
	MaxIOSize  uint32 // bytes
	MaxHdrSize uint32 // bytes; a chunk has MaxIOSize + MaxHdrSize
	Flags      ConnFlags
	Features   Features // of our own servers, zero from a kernel
	// Incarnation identifies the session at the server. A session that is made
	// again, by this server or its successor, has another one. Zero without
	// FeatureIncarnation.
	Incarnation UUID
}

// Features are extensions that a server of this project announces in bytes
// 20..27 of its answer. A kernel's server leaves these zero, its client
// ignores them. A client announces FeatureProof in bytes 46..53 of its request,
// and FeatureReason in its INFO_REQ to a server that has announced it.
type Features uint16

const (
	// FeatureFence: the server answers FENCE requests.
	FeatureFence Features = 1 << iota
	// FeatureIncarnation: bytes 28..43 are the incarnation.
	FeatureIncarnation
	// FeatureBeats: the server answers HB_MSG on every connection.
	FeatureBeats
	// FeatureProof of a client: it can prove its identity. Of a server: the
	// client must do so before its INFO_REQ; in a refusal: only such clients are
	// accepted.
	FeatureProof
	// FeatureReason of a client: it takes a REASON in the place of the INFO_RSP. Of a
	// server: it sends one to such clients; in a refusal: there is a reason.
	FeatureReason
)

const (
	extMagic   = 0x58424E52 // "RNBX" on the wire
	extVersion = 1
)

// ErrNotRTRS is wrapped by Check of a response that is none.
var ErrNotRTRS = errors.New("not an RTRS response")

// Put writes f over the first ConnRspLen bytes of m.
func (m ConnRsp) Put(f *ConnRspFields) {
	clear(m[:ConnRspLen])
	le.PutUint16(m[0:], Magic)
	le.PutUint16(m[2:], Version)
	le.PutUint16(m[4:], uint16(f.Errno))
	le.PutUint16(m[6:], f.QueueDepth)
	le.PutUint32(m[8:], f.MaxIOSize)
	le.PutUint32(m[12:], f.MaxHdrSize)
	le.PutUint32(m[16:], uint32(f.Flags))
	if f.Features != 0 {
		putFeatures(m[20:], f.Features)
	}
	if f.Features&FeatureIncarnation != 0 {
		copy(m[28:44], f.Incarnation[:])
	}
}

// Check reports whether m is a response of this protocol. It does not look at
// Errno.
func (m ConnRsp) Check() error {
	switch {
	case len(m) < ConnRspLen:
		return fmt.Errorf("%w: %d bytes, want %d", ErrNotRTRS, len(m), ConnRspLen)
	case m.Magic() != Magic:
		return fmt.Errorf("%w: magic %#04x, want %#04x", ErrNotRTRS, m.Magic(), Magic)
	case m.Version()>>8 != Version>>8:
		return fmt.Errorf("%w: version %#04x, want major %d", ErrNotRTRS, m.Version(), Version>>8)
	}
	return nil
}

func (m ConnRsp) Magic() uint16      { return le.Uint16(m[0:]) }
func (m ConnRsp) Version() uint16    { return le.Uint16(m[2:]) }
func (m ConnRsp) Errno() int16       { return int16(le.Uint16(m[4:])) }
func (m ConnRsp) QueueDepth() uint16 { return le.Uint16(m[6:]) }
func (m ConnRsp) MaxIOSize() uint32  { return le.Uint32(m[8:]) }
func (m ConnRsp) MaxHdrSize() uint32 { return le.Uint32(m[12:]) }
func (m ConnRsp) Flags() ConnFlags   { return ConnFlags(le.Uint32(m[16:])) }

// Features returns the announced features; 0 if the server is not one of this
// project.
func (m ConnRsp) Features() Features { return parseFeatures(m[20:]) }

// putFeatures writes an announcement over the first 8 bytes of b.
func putFeatures(b []byte, f Features) {
	le.PutUint32(b, extMagic)
	le.PutUint16(b[4:], extVersion)
	le.PutUint16(b[6:], uint16(f))
}

// parseFeatures reads an announcement, 0 if there is none.
func parseFeatures(b []byte) Features {
	if le.Uint32(b) != extMagic || le.Uint16(b[4:]) < extVersion {
		return 0
	}
	return Features(le.Uint16(b[6:]))
}

// Incarnation returns the announced incarnation, or zero.
func (m ConnRsp) Incarnation() UUID {
	if m.Features()&FeatureIncarnation == 0 {
		return UUID{}
	}
	return UUID(m[28:44])
}

// Fields returns the contents.
func (m ConnRsp) Fields() ConnRspFields {
	return ConnRspFields{m.Errno(), m.QueueDepth(), m.MaxIOSize(), m.MaxHdrSize(), m.Flags(), m.Features(), m.Incarnation()}
}
