package verbs

import (
	"context"
	"errors"
	"net/netip"
	"sync/atomic"
)

// Cap is a set of abilities that a device states and RTRS adapts to.
type Cap uint32

const (
	// CapWriteImm: RDMA WRITE WITH IMM reaches the peer with its immediate.
	CapWriteImm Cap = 1 << iota
	// CapSendImm: SEND WITH IMM reaches the peer as one message.
	CapSendImm
	// CapSendInv: SEND WITH INVALIDATE is carried.
	CapSendInv
	// CapKeyRotation: OpLocalInv and OpRegMR change a region's key between
	// I/Os, valid for every queue pair of the protection domain. RTRS servers
	// need it for always_invalidate.
	CapKeyRotation
	// CapRecvInv: a SEND WITH INVALIDATE that arrives takes the right away that
	// it names.
	CapRecvInv
	// CapProtect: Connect can protect connections, see ConnectParams.
	CapProtect
)

// Info describes an opened device. It never changes while the device is open.
type Info struct {
	Fabric  string // "iwarp", "loopback", ...: the name used in path addresses
	Name    string // device name for people, e.g. "iwarp0"
	Port    int    // port number of the device, 1 where there is only one
	Caps    Cap
	MaxQPWR int // largest SendQueue or RecvQueue of a queue pair
	MaxSGE  int // largest number of elements of one send
}

// Device is one opened fabric. All methods may be called by any goroutine.
type Device interface {
	Info() Info
	AllocPD() (PD, error)
	// CreateCQ makes a completion queue with room for depth completions in
	// hardware terms. A software provider may treat depth as a hint, it must
	// not lose completions however many there are.
	CreateCQ(depth int) (CQ, error)
	// CreateQP makes a queue pair with completions in cfg.CQ.
	CreateQP(pd PD, cfg QPConfig) (QP, error)
	// Connect joins qp to the listener at p.Dst and returns the private data
	// of the answer. It blocks until established, refused or ctx is done. A
	// refusal by the peer's consumer is a *RejectError with its private data.
	// After an error qp can only be destroyed.
	Connect(ctx context.Context, qp QP, p ConnectParams) (private []byte, err error)
	// Listen accepts connections at addr. Port 0 picks a free one.
	Listen(addr netip.AddrPort) (Listener, error)
	Close() error
}

// Chooser is a Device that stands for several: the addresses choose one of
// them. It listens for all of them, and its requests are DeviceRequests.
// AllocPD, CreateCQ, CreateQP and Connect of the Chooser itself fail.
type Chooser interface {
	Device
	// DeviceFor returns the device of the address src that reaches dst; a
	// zero src is chosen by the system. It may block until ctx is done. The
	// same device is the same value each time.
	DeviceFor(ctx context.Context, src, dst netip.Addr) (Device, error)
}

// DeviceRequest is a ConnRequest with the device that it came to. Its queue
// pair is made there.
type DeviceRequest interface {
	ConnRequest
	// Device returns nil if the device was removed since.
	Device() Device
}

// ConnectParams are the arguments of Device.Connect. Addresses may be GIDs.
type ConnectParams struct {
	Src     netip.Addr // zero: chosen by the system
	Dst     netip.AddrPort
	Private []byte // at most MaxPrivate bytes, copied
	// Protect asks for an encrypted connection with proved identities of both
	// ends. Fabrics without CapProtect refuse it.
	Protect bool
	// PeerName is the required identity of the server; empty: the default of
	// the device. It counts with Protect only.
	PeerName string
}

// MaxPrivate is the number of bytes of private data every provider carries in
// a request and in an answer.
const MaxPrivate = 56

// Listener is a passive end point.
type Listener interface {
	// Accept blocks until there is a connection request with its private
	// data. It returns ErrClosed after Close. A peer that sends garbage never
	// reaches Accept.
	Accept() (ConnRequest, error)
	Addr() netip.AddrPort
	// Close stops listening; requests already returned stay valid.
	Close() error
}

// ConnRequest is a connection request that waits for an answer. Exactly one
// of Accept and Reject must be called, once.
type ConnRequest interface {
	// Private is the peer's private data, valid until Accept or Reject.
	Private() []byte
	LocalAddr() netip.AddrPort
	RemoteAddr() netip.AddrPort
	// Accept answers with private and binds the connection to qp. When it
	// returns nil the connection is up: the owner of qp's CQ may post. The
	// provider holds back messages that the fabric does not allow yet.
	Accept(qp QP, private []byte) error
	// Reject refuses with private and ends the connection.
	Reject(private []byte) error
}

// PD is a protection domain: keys of one are refused on the others.
type PD interface {
	// RegMR registers buf. buf must stay mapped until MR.Close has returned.
	// The region starts with a valid key. Any goroutine.
	RegMR(buf []byte, access Access) (MR, error)
	Close() error
}

// Access are the rights that a region gives to the peer. Local access is
// always given.
type Access uint8

const (
	AccessRemoteWrite Access = 1 << iota
	AccessRemoteRead
	// AccessRotate: OpLocalInv and OpRegMR will change the key of the region.
	// Needs CapKeyRotation.
	AccessRotate
)

// MR is a registered memory region. All methods may be called by any
// goroutine.
type MR interface {
	LKey() uint32
	// RKey is the key at registration; OpRegMR changes the valid key, but not
	// the result of RKey.
	RKey() uint32
	// Addr is the address the peer uses for the first byte.
	Addr() uint64
	Len() int
	// Close ends the registration. After it returns, the provider neither
	// reads nor writes the memory, whatever work requests, retransmissions or
	// messages of the peer still name it: the caller may unmap it. Its keys
	// are refused from then on, like keys that were never given.
	//
	// Work that is outstanding and names the region either completes without
	// the memory, from a copy that Close made, or fails and ends its
	// connection. A received message never completes with StatusOK if its
	// bytes are not in the memory. No request that names the region may be
	// posted while Close runs.
	//
	// Close waits for no peer. It waits for the owner of a completion queue
	// only while that is inside Poll, Flush or Arm. None of these blocks. So
	// any goroutine may call it, with connections up or down: also the owner
	// itself between two such calls, and others when the owner sleeps or has
	// stopped. It must not be called with a lock held that an owner may wait
	// for inside these calls; providers call nothing of their users there.
	// The error is that of a region closed before, or the system's.
	Close() error
}

// Guarded is an optional interface of MR, for memory that is still read by an operation that
// a peer has given up, while the peer repeats the operation. Devices check before they place;
// software providers place some payload first, where the peer's next message decides what it is.
type Guarded interface {
	// Guard makes the provider verify what a peer writes to the region before any byte of it
	// is placed, while readers is above 0. A write whose first packet was taken before that
	// is not covered. Call it before the peer knows the key. Any goroutine may change readers.
	Guard(readers *atomic.Int32)
}

// NextKey returns the key that follows key when a region is registered again:
// the low byte is incremented, the index in the upper 24 bits stays, as the
// Linux kernel does it.
func NextKey(key uint32) uint32 { return key&^0xff | (key+1)&0xff }

// Opcode is the operation of a work request or a completion.
type Opcode uint8

const (
	OpSend Opcode = iota + 1
	OpSendImm
	OpSendInv
	OpWrite
	OpWriteImm
	OpRead
	// OpLocalInv makes the region of SendWR.RKey unreachable for the peer.
	OpLocalInv
	// OpRegMR makes a region reachable again under the key SendWR.RKey. The
	// upper 24 bits of the key are the region's index. The region must have
	// been invalidated before.
	OpRegMR

	// OpRecv and OpRecvImm are completions of receives: of a SEND, and of a
	// RDMA WRITE WITH IMM.
	OpRecv
	OpRecvImm
	// OpDisconnected is the last completion of a queue pair.
	OpDisconnected
)

// Status of a completion.
type Status uint8

const (
	StatusOK Status = iota
	StatusFlushed
	StatusLocalLength   // a received message was longer than its receive
	StatusLocalProt     // a local element is outside its region
	StatusRemoteAccess  // the peer refused a key or an address
	StatusRemoteInvalid // the peer refused a request
	StatusRetryExceeded // the peer or its receives did not come in time
	StatusFatal         // the connection broke
)

// SGE is one piece of local memory. Buf must lie in the region of LKey. The
// memory belongs to the provider from the post to the completion.
type SGE struct {
	Buf  []byte
	LKey uint32
}

// SendWR is a work request for the send queue. Before PostSend returns, the
// provider copies everything but the memory named by SGEs.
type SendWR struct {
	ID         uint64 // returned in the completion
	Op         Opcode
	Signaled   bool
	SGEs       []SGE  // at most Info.MaxSGE; empty: zero length
	RemoteAddr uint64 // OpWrite*, OpRead; ignored for zero-length writes
	RKey       uint32 // OpWrite*, OpRead; key to invalidate or register for OpSendInv, OpLocalInv, OpRegMR
	Imm        uint32 // OpSendImm, OpWriteImm: the value, in host order
}

// RecvWR is a receive of at most one element; an empty Buf takes messages
// without payload only.
type RecvWR struct {
	ID   uint64
	Buf  []byte
	LKey uint32
}

// WC is a completion.
type WC struct {
	ID     uint64 // of the work request; undefined for OpDisconnected
	QP     uint64 // QPConfig.Context of the queue pair
	Op     Opcode // of the request, or OpRecv, OpRecvImm, OpDisconnected
	Status Status
	HasImm bool
	HasInv bool // the message invalidated InvKey
	// ByteLen is the number of bytes of the message. OpRecv with StatusOK: they
	// are in the receive's Buf; its length is at least ByteLen. OpRecvImm: they
	// are where the peer wrote them, the Buf is untouched and is no bound; the
	// peer chooses, within the region it wrote to. Undefined in a failure.
	ByteLen    uint32
	Imm        uint32 // host order
	InvKey     uint32
	VendorCode uint32 // provider's own detail of a failure, for logs
}

// QPConfig sizes a queue pair.
type QPConfig struct {
	CQ        CQ
	Context   uint64 // returned in WC.QP
	SendQueue int    // outstanding sends
	RecvQueue int    // outstanding receives
	MaxSGE    int
}

// QP is one reliable connection.
type QP interface {
	// PostSend queues wrs in order and returns how many were taken; n <
	// len(wrs) comes with an error that concerns wrs[n] (ErrQueueFull,
	// ErrNotConnected, ErrUnsupported, ...). Sends leave at the next Poll or
	// Flush of the completion queue. Owner only.
	PostSend(wrs []SendWR) (n int, err error)
	// PostRecv queues receives. Owner only, but before Connect or Accept the
	// creator may call it.
	PostRecv(wrs []RecvWR) (n int, err error)
	// Disconnect starts the end of the connection and returns at once. Any
	// goroutine, any number of times.
	Disconnect()
	// Destroy frees the queue pair: after OpDisconnected, or when it was never
	// connected. Any goroutine.
	Destroy()
	LocalAddr() netip.AddrPort
	RemoteAddr() netip.AddrPort
}

// CQ is a completion queue with the progress engine of its queue pairs.
type CQ interface {
	// Poll makes progress, fills wcs and returns how many it filled. It never
	// blocks. Zero means there was nothing to do. Owner only.
	Poll(wcs []WC) int
	// Flush transmits posted requests, without receiving. Owner only.
	Flush()
	// FD is a descriptor that becomes readable when Poll may have something
	// to do after Arm returned true. It belongs to the queue. Edge or level:
	// the caller must call Poll after it was readable, nothing else.
	FD() int
	// Arm asks for FD to become readable at the next event. It returns false
	// when there is something to do already: poll instead of sleeping. It
	// flushes first. Owner only.
	Arm() bool
	// Close frees the queue after all its queue pairs were destroyed.
	Close() error
}

// Errors of the providers. They are wrapped with a description.
var (
	ErrClosed       = errors.New("closed")
	ErrQueueFull    = errors.New("queue is full")
	ErrNotConnected = errors.New("queue pair is not connected")
	ErrUnsupported  = errors.New("not supported by this fabric")
	ErrAccess       = errors.New("local memory is outside its region")
)

// RejectError is a refusal by the peer's consumer.
type RejectError struct {
	Private []byte // as sent by the peer, may be empty
}

func (e *RejectError) Error() string { return "connection rejected by the peer" }
