package main

import (
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
)

// The negotiation, in the order of the wire: greeting, client flags, options
// until one of them (EXPORT_NAME, GO) starts the transmission. It runs on its
// own goroutine, bounded in time by the connection's deadline and in work by
// maxOptions. It reads exactly the bytes of the negotiation; the bytes of the
// transmission stay in the socket. STARTTLS is in tls.go, metadata contexts are in
// context.go.

// maxOptions bounds the options of one negotiation.
const maxOptions = 1024

var (
	errAborted     = errors.New("client aborted the negotiation")
	errManyOptions = errors.New("too many options")
)

// catalogue is the negotiation's view of the exports.
type catalogue interface {
	// openExport finds an export and counts an opener; the caller closes it.
	openExport(name string) (*export, error)
	// findExport finds an export without opening it.
	findExport(name string) (*export, error)
	exportNames() []string
}

// handshakeResult is the outcome: an opened export.
type handshakeResult struct {
	exp        *export
	structured bool      // reads are answered by structured replies
	allocation bool      // base:allocation is in force
	tls        *tls.Conn // nil: without TLS
	readOnly   bool      // the rules allow the client no more
	user       *nbdUser
	listener   string         // the client came by it
	by         *tlsProtection // by which the client was let in; nil: TLS is off
}

type negotiation struct {
	rw         io.ReadWriter
	exports    catalogue
	secure     *listenerSecurity // nil: TLS is off
	tls        *tls.Conn         // nil: not started
	fixed      bool              // the client speaks fixed newstyle
	noZeroes   bool
	structured bool
	context    *export // SET_META_CONTEXT has selected base:allocation of this one; nil: of none
	exp        *export // opened: the transmission starts
	told       bool    // that TLS is required
	readOnly   bool    // the rules allow no more for the last export that was found
}

// runHandshake runs the handshake. On success the export is open and belongs to
// the caller. With TLS the connection continues in negotiated.tls.
func runHandshake(rw io.ReadWriter, exports catalogue, secure *listenerSecurity) (handshakeResult, error) {
	n := &negotiation{rw: rw, exports: exports, secure: secure}
	if secure != nil && secure.by.rules != nil {
		n.exports = &allowedCatalogue{catalogue: exports, n: n}
	}
	if err := n.runOptions(); err != nil {
		n.closeOpened()
		return handshakeResult{}, err
	}
	out := handshakeResult{exp: n.exp, structured: n.structured, allocation: n.context == n.exp, tls: n.tls, readOnly: n.readOnly}
	if secure != nil {
		out.user, out.by = secure.user, secure.by
	}
	return out, nil
}

// runOptions answers options until one of them has opened an export.
func (n *negotiation) runOptions() error {
	if err := n.sendGreeting(); err != nil {
		return err
	}
	for range maxOptions {
		if err := n.onOption(); err != nil {
			return err
		}
		if n.exp != nil {
			return nil
		}
	}
	return errManyOptions
}

// closeOpened closes an export that was opened for an answer that did not reach the
// client, and ends TLS.
func (n *negotiation) closeOpened() {
	if n.exp != nil {
		n.exp.removeOpener()
		n.exp = nil
	}
	if n.tls != nil {
		_ = n.tls.CloseWrite()
	}
}

func (n *negotiation) sendGreeting() error {
	var b [18]byte
	binary.BigEndian.PutUint64(b[:], nbdwire.MagicServer)
	binary.BigEndian.PutUint64(b[8:], nbdwire.MagicOption)
	binary.BigEndian.PutUint16(b[16:], nbdwire.FlagFixedNewstyle|nbdwire.FlagNoZeroes)
	if _, err := n.rw.Write(b[:]); err != nil {
		return fmt.Errorf("send greeting: %w", err)
	}
	if _, err := io.ReadFull(n.rw, b[:4]); err != nil {
		return fmt.Errorf("read client flags: %w", err)
	}
	flags := binary.BigEndian.Uint32(b[:])
	if flags&^(nbdwire.FlagFixedNewstyle|nbdwire.FlagNoZeroes) != 0 {
		return fmt.Errorf("unknown client flags %#x", flags)
	}
	n.fixed = flags&nbdwire.FlagFixedNewstyle != 0
	n.noZeroes = flags&nbdwire.FlagNoZeroes != 0
	return nil
}

// onOption reads one option and answers it.
func (n *negotiation) onOption() error {
	var h [nbdwire.OptionSize]byte
	if _, err := io.ReadFull(n.rw, h[:]); err != nil {
		return fmt.Errorf("read option: %w", err)
	}
	if m := binary.BigEndian.Uint64(h[:]); m != nbdwire.MagicOption {
		return fmt.Errorf("wrong option magic %#x", m)
	}
	opt, length := binary.BigEndian.Uint32(h[8:]), binary.BigEndian.Uint32(h[12:])
	if length > maxOption {
		return fmt.Errorf("option %d has %d bytes of data, at most %d are accepted", opt, length, maxOption)
	}
	if opt != nbdwire.OptExportName && !n.fixed {
		return fmt.Errorf("option %d from a client that does not speak fixed newstyle", opt)
	}
	data := make([]byte, length)
	if _, err := io.ReadFull(n.rw, data); err != nil {
		return fmt.Errorf("read data of option %d: %w", opt, err)
	}
	return n.answerOption(opt, data)
}

func (n *negotiation) answerOption(opt uint32, data []byte) error {
	if n.secure.tlsRequired() && n.tls == nil && opt != nbdwire.OptStartTLS && opt != nbdwire.OptAbort {
		return n.refuseOption(opt)
	}
	switch opt {
	case nbdwire.OptStartTLS:
		return n.onStartTLS(data)
	case nbdwire.OptExportName:
		return n.onExportName(string(data))
	case nbdwire.OptAbort:
		if err := n.sendReply(opt, nbdwire.RepAck, nil); err != nil {
			return err
		}
		return errAborted
	case nbdwire.OptList:
		return n.onList(data)
	case nbdwire.OptInfo, nbdwire.OptGo:
		return n.onGo(opt, data)
	case nbdwire.OptStructuredReply:
		return n.onStructuredReply(data)
	case nbdwire.OptListMetaContext, nbdwire.OptSetMetaContext:
		return n.onMetaContext(opt, data)
	}
	return n.sendReply(opt, nbdwire.RepErrUnsup, nil)
}

// onExportName starts the transmission; it has no way to answer an error but
// to close the connection.
func (n *negotiation) onExportName(name string) error {
	if len(name) > nbdwire.MaxName {
		return fmt.Errorf("export name of %d bytes", len(name))
	}
	exp, err := n.exports.openExport(name)
	if err != nil {
		return err
	}
	n.exp = exp
	b := make([]byte, 10, 134)
	size, flags := n.exportGeometry(exp)
	binary.BigEndian.PutUint64(b, size)
	binary.BigEndian.PutUint16(b[8:], flags)
	if !n.noZeroes {
		b = b[:134]
	}
	if _, err := n.rw.Write(b); err != nil {
		return fmt.Errorf("answer EXPORT_NAME: %w", err)
	}
	return nil
}

// exportGeometry returns size and transmission flags of an export for this client.
func (n *negotiation) exportGeometry(exp *export) (size uint64, flags uint16) {
	size, flags = exp.geometry()
	if n.readOnly {
		flags |= nbdwire.ReadOnly
	}
	return size, flags
}

func (n *negotiation) onList(data []byte) error {
	if len(data) != 0 {
		return n.sendReply(nbdwire.OptList, nbdwire.RepErrInvalid, nil)
	}
	var out []byte
	for _, name := range n.exports.exportNames() {
		b := binary.BigEndian.AppendUint32(nil, uint32(len(name)))
		out = appendReply(out, nbdwire.OptList, nbdwire.RepServer, append(b, name...))
	}
	return n.sendInfo(nbdwire.OptList, appendReply(out, nbdwire.OptList, nbdwire.RepAck, nil))
}

func (n *negotiation) onStructuredReply(data []byte) error {
	if len(data) != 0 {
		return n.sendReply(nbdwire.OptStructuredReply, nbdwire.RepErrInvalid, nil)
	}
	n.structured = true
	return n.sendReply(nbdwire.OptStructuredReply, nbdwire.RepAck, nil)
}

// onGo answers INFO and GO. Only GO starts the transmission.
func (n *negotiation) onGo(opt uint32, data []byte) error {
	name, infos, ok := parseGo(data)
	if !ok {
		return n.sendReply(opt, nbdwire.RepErrInvalid, nil)
	}
	if len(name) > nbdwire.MaxName {
		return n.sendReply(opt, nbdwire.RepErrTooBig, nil)
	}
	exp, err := n.chooseExport(opt, name)
	if err != nil {
		return n.sendReply(opt, nbdwire.RepErrUnknown, []byte(err.Error()))
	}
	size, flags := n.exportGeometry(exp)
	return n.sendInfo(opt, appendExport(nil, opt, exp, size, flags, infos))
}

// chooseExport finds the export, and opens it when the transmission is to start.
func (n *negotiation) chooseExport(opt uint32, name string) (*export, error) {
	if opt == nbdwire.OptInfo {
		return n.exports.findExport(name)
	}
	exp, err := n.exports.openExport(name)
	n.exp = exp
	return exp, err
}

// parseGo takes the data of INFO and GO apart: the name and the requested
// information items, two bytes each.
func parseGo(data []byte) (name string, infos []byte, ok bool) {
	if len(data) < 6 {
		return "", nil, false
	}
	n := binary.BigEndian.Uint32(data)
	data = data[4:]
	if uint64(n)+2 > uint64(len(data)) {
		return "", nil, false
	}
	name, data = string(data[:n]), data[n:]
	count := int(binary.BigEndian.Uint16(data))
	if len(data) != 2+2*count {
		return "", nil, false
	}
	return name, data[2:], true
}

// appendExport appends the answers to INFO or GO. Block sizes are told
// whether asked for or not, a name only when asked for.
func appendExport(out []byte, opt uint32, exp *export, size uint64, flags uint16, infos []byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, nbdwire.InfoExport)
	b = binary.BigEndian.AppendUint64(b, size)
	b = binary.BigEndian.AppendUint16(b, flags)
	out = appendReply(out, opt, nbdwire.RepInfo, b)

	for ; len(infos) > 0; infos = infos[2:] {
		if binary.BigEndian.Uint16(infos) == nbdwire.InfoName {
			b = binary.BigEndian.AppendUint16(nil, nbdwire.InfoName)
			out = appendReply(out, opt, nbdwire.RepInfo, append(b, exp.name...))
			break
		}
	}
	b = binary.BigEndian.AppendUint16(nil, nbdwire.InfoBlockSize)
	b = binary.BigEndian.AppendUint32(b, exp.minBlock())
	b = binary.BigEndian.AppendUint32(b, max(preferredSize, exp.minBlock()))
	b = binary.BigEndian.AppendUint32(b, nbdwire.MaxPayload)
	out = appendReply(out, opt, nbdwire.RepInfo, b)
	return appendReply(out, opt, nbdwire.RepAck, nil)
}

func appendReply(out []byte, opt, kind uint32, data []byte) []byte {
	out = binary.BigEndian.AppendUint64(out, nbdwire.MagicOptionReply)
	out = binary.BigEndian.AppendUint32(out, opt)
	out = binary.BigEndian.AppendUint32(out, kind)
	out = binary.BigEndian.AppendUint32(out, uint32(len(data)))
	return append(out, data...)
}

func (n *negotiation) sendReply(opt, kind uint32, data []byte) error {
	return n.sendInfo(opt, appendReply(nil, opt, kind, data))
}

func (n *negotiation) sendInfo(opt uint32, b []byte) error {
	if _, err := n.rw.Write(b); err != nil {
		return fmt.Errorf("answer option %d: %w", opt, err)
	}
	return nil
}

// transmissionFlags returns the transmission flags of an export with limits l.
// All connections reach one device and nothing is cached on the way, so a flush
// on one connection covers the completed writes of all: CAN_MULTI_CONN is set.
func transmissionFlags(l *blk.Limits) uint16 {
	flags := uint16(nbdwire.HasFlags | nbdwire.SendFlush | nbdwire.SendFUA | nbdwire.CanMultiConn)
	if l.ReadOnly {
		flags |= nbdwire.ReadOnly
	}
	if l.Rotational {
		flags |= nbdwire.Rotational
	}
	if l.MaxDiscard != 0 {
		flags |= nbdwire.SendTrim
	}
	if l.MaxWriteZeroes != 0 {
		flags |= nbdwire.SendWriteZeroes
	}
	return flags
}
