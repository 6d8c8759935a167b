package nbdwire

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
)

// maxOptionReply bounds the data of one reply to an option, in bytes.
const maxOptionReply = 1 << 16

// maxOptionReplies bounds the replies to one option.
const maxOptionReplies = 1 << 16

// Options say what a client asks for.
type Options struct {
	Export string
	// TLS is the configuration of the connection after STARTTLS; nil: the connection has
	// no TLS.
	TLS *tls.Config
	// Structured asks for structured replies. A server without them is fine.
	Structured bool
	// Allocation asks for the metadata context base:allocation, for which Structured must
	// be set. A server without it is fine.
	Allocation bool
}

// Export describes an export as the server announced it. Sizes are in bytes.
type Export struct {
	Size       uint64
	Flags      uint16 // transmission flags
	Structured bool   // replies to reads are structured
	Allocation bool   // BLOCK_STATUS tells about base:allocation
	ContextID  uint32 // of base:allocation

	// The limits of ranges. A server that tells none accepts any range, and payloads of
	// MaxPayload.
	MinBlock, PreferredBlock, MaxPayload uint32
}

// OptionError is the refusal of an option by the server.
type OptionError struct {
	Option, Code uint32
	Message      string
}

func (e *OptionError) Error() string {
	if e.Message == "" {
		return fmt.Sprintf("the server refuses option %d with error %d", e.Option, e.Code&^RepErrors)
	}
	return fmt.Sprintf("the server refuses option %d with error %d: %s", e.Option, e.Code&^RepErrors, e.Message)
}

// Unwrap returns the errno that means the same.
func (e *OptionError) Unwrap() error {
	switch e.Code {
	case RepErrUnknown:
		return syscall.ENOENT
	case RepErrPolicy, RepErrTLSReqd:
		return syscall.EPERM
	case RepErrUnsup:
		return syscall.EOPNOTSUPP
	}
	return syscall.EINVAL
}

// Negotiate opens an export on a new connection to a server. It returns the connection
// for the transmission, which is conn itself without TLS and a *tls.Conn with it. The
// caller bounds the time by a deadline of conn, and closes conn after an error.
func Negotiate(conn net.Conn, o Options) (net.Conn, Export, error) {
	if err := greet(conn); err != nil {
		return nil, Export{}, err
	}
	if o.TLS != nil {
		secure, err := startTLS(conn, o.TLS)
		if err != nil {
			return nil, Export{}, err
		}
		conn = secure
	}
	e, err := open(conn, o)
	return conn, e, err
}

// NegotiatePlain is Negotiate without TLS on any stream; Options.TLS is not used.
func NegotiatePlain(rw io.ReadWriter, o Options) (Export, error) {
	if err := greet(rw); err != nil {
		return Export{}, err
	}
	return open(rw, o)
}

// List returns the names of a server's exports, on a new connection that is of no use
// after it. The connection has TLS if config is not nil.
func List(conn net.Conn, config *tls.Config) ([]string, error) {
	if err := greet(conn); err != nil {
		return nil, err
	}
	if config != nil {
		secure, err := startTLS(conn, config)
		if err != nil {
			return nil, err
		}
		conn = secure
	}
	if _, err := conn.Write(AppendOption(nil, OptList, nil)); err != nil {
		return nil, err
	}
	var names []string
	err := eachReply(conn, OptList, func(kind uint32, data []byte) error {
		if kind != RepServer || len(data) < 4 || uint64(be.Uint32(data)) > uint64(len(data)-4) {
			return fmt.Errorf("reply %d of %d bytes to LIST is malformed: %w", kind, len(data), syscall.EPROTO)
		}
		names = append(names, string(data[4:][:be.Uint32(data)]))
		return nil
	})
	if err != nil {
		return nil, err
	}
	_, _ = conn.Write(AppendOption(nil, OptAbort, nil)) // the server may have closed the connection
	return names, nil
}

// greet reads the greeting and answers it.
func greet(rw io.ReadWriter) error {
	var b [GreetingSize]byte
	if _, err := io.ReadFull(rw, b[:]); err != nil {
		return fmt.Errorf("read greeting: %w", err)
	}
	flags := be.Uint16(b[16:])
	if be.Uint64(b[:]) != MagicServer || be.Uint64(b[8:]) != MagicOption || flags&FlagFixedNewstyle == 0 {
		return fmt.Errorf("greeting % x is not that of a fixed newstyle NBD server: %w", b, syscall.EPROTO)
	}
	_, err := rw.Write(be.AppendUint32(nil, uint32(flags&(FlagFixedNewstyle|FlagNoZeroes))))
	return err
}

func startTLS(conn net.Conn, config *tls.Config) (*tls.Conn, error) {
	if _, err := conn.Write(AppendOption(nil, OptStartTLS, nil)); err != nil {
		return nil, err
	}
	kind, _, err := readReply(conn, OptStartTLS)
	if err == nil && kind != RepAck {
		err = fmt.Errorf("reply %d: %w", kind, syscall.EPROTO)
	}
	if err != nil {
		return nil, fmt.Errorf("the server has no TLS: %w", err)
	}
	secure := tls.Client(conn, config)
	return secure, secure.Handshake()
}

// open asks for the features of o, then for the export.
func open(rw io.ReadWriter, o Options) (Export, error) {
	e := Export{MinBlock: 1, PreferredBlock: 4096, MaxPayload: MaxPayload}
	var err error
	if o.Structured {
		if e.Structured, err = askStructured(rw); err != nil {
			return e, err
		}
	}
	if o.Allocation && e.Structured {
		if err := askAllocation(rw, o.Export, &e); err != nil {
			return e, err
		}
	}
	data := AppendName(nil, o.Export)
	data = be.AppendUint16(data, 1)
	data = be.AppendUint16(data, InfoBlockSize)
	if _, err := rw.Write(AppendOption(nil, OptGo, data)); err != nil {
		return e, err
	}
	told := false
	err = eachReply(rw, OptGo, func(kind uint32, data []byte) error { return e.take(kind, data, &told) })
	if err == nil && !told {
		err = fmt.Errorf("the server tells no size of the export: %w", syscall.EPROTO)
	}
	return e, err
}

// askStructured reports whether the server sends structured replies.
func askStructured(rw io.ReadWriter) (bool, error) {
	if _, err := rw.Write(AppendOption(nil, OptStructuredReply, nil)); err != nil {
		return false, err
	}
	kind, _, err := readReply(rw, OptStructuredReply)
	if refused(err) {
		return false, nil
	}
	if err == nil && kind != RepAck {
		err = fmt.Errorf("reply %d to STRUCTURED_REPLY: %w", kind, syscall.EPROTO)
	}
	return err == nil, err
}

// askAllocation selects base:allocation, if the server has it.
func askAllocation(rw io.ReadWriter, export string, e *Export) error {
	data := AppendName(nil, export)
	data = AppendName(be.AppendUint32(data, 1), AllocationContext)
	if _, err := rw.Write(AppendOption(nil, OptSetMetaContext, data)); err != nil {
		return err
	}
	err := eachReply(rw, OptSetMetaContext, func(kind uint32, data []byte) error {
		if kind != RepMetaCtx || len(data) < 4 {
			return fmt.Errorf("reply %d of %d bytes to SET_META_CONTEXT is malformed: %w", kind, len(data), syscall.EPROTO)
		}
		if string(data[4:]) == AllocationContext {
			e.Allocation, e.ContextID = true, be.Uint32(data)
		}
		return nil
	})
	if refused(err) {
		return nil
	}
	return err
}

func refused(err error) bool {
	var oe *OptionError
	return errors.As(err, &oe)
}

// take reads one reply to GO that is not the last.
func (e *Export) take(kind uint32, data []byte, told *bool) error {
	if kind != RepInfo || len(data) < 2 {
		return fmt.Errorf("reply %d of %d bytes to GO is malformed: %w", kind, len(data), syscall.EPROTO)
	}
	switch d := data[2:]; be.Uint16(data) {
	case InfoExport:
		if len(d) != 10 {
			return fmt.Errorf("export information of %d bytes: %w", len(d), syscall.EPROTO)
		}
		e.Size, e.Flags, *told = be.Uint64(d), be.Uint16(d[8:]), true
	case InfoBlockSize:
		if len(d) != 12 {
			return fmt.Errorf("block size information of %d bytes: %w", len(d), syscall.EPROTO)
		}
		e.MinBlock, e.PreferredBlock, e.MaxPayload = be.Uint32(d), be.Uint32(d[4:]), be.Uint32(d[8:])
		if e.MinBlock == 0 || e.MinBlock&(e.MinBlock-1) != 0 || e.MaxPayload < e.MinBlock {
			return fmt.Errorf("the server announces blocks of %d bytes and payloads of up to %d: %w", e.MinBlock, e.MaxPayload, syscall.EPROTO)
		}
	}
	return nil
}

// readReply reads one reply to an option. A refusal is an *OptionError.
func readReply(r io.Reader, option uint32) (kind uint32, data []byte, err error) {
	var b [OptionReplySize]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return 0, nil, fmt.Errorf("read reply to option %d: %w", option, err)
	}
	h := OptionReply(b[:])
	if h.Magic() != MagicOptionReply || h.Option() != option || h.Length() > maxOptionReply {
		return 0, nil, fmt.Errorf("reply to option %d is malformed: % x: %w", option, b, syscall.EPROTO)
	}
	data = make([]byte, h.Length())
	if _, err := io.ReadFull(r, data); err != nil {
		return 0, nil, fmt.Errorf("read reply to option %d: %w", option, err)
	}
	if h.Kind()&RepErrors != 0 {
		return h.Kind(), nil, &OptionError{Option: option, Code: h.Kind(), Message: string(data)}
	}
	return h.Kind(), data, nil
}

// eachReply reads replies until the acknowledgement.
func eachReply(r io.Reader, option uint32, take func(kind uint32, data []byte) error) error {
	for range maxOptionReplies {
		kind, data, err := readReply(r, option)
		if err != nil || kind == RepAck {
			return err
		}
		if err := take(kind, data); err != nil {
			return err
		}
	}
	return fmt.Errorf("more than %d replies to option %d: %w", maxOptionReplies, option, syscall.EPROTO)
}
