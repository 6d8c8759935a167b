package registry

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

// Port is the TCP port of a registry, unless another one is configured.
const Port = 4792

// Limits.
const (
	MaxPorts   = 1024      // of a registry, so members of a group
	MaxGroups  = 1024      // of a port
	maxRequest = 4 << 10   // length of a request, in bytes
	maxAnswer  = 512 << 10 // length of an answer, in bytes
)

// Lease is the time of a membership that is not renewed.
const Lease = 30 * time.Second

// Operations of a request.
const (
	opHello = "hello" // registers the port
	opJoin  = "join"
	opLeave = "leave"
	opRenew = "renew"
)

// Request is a line from a client to a server.
type Request struct {
	ID       uint64   `json:"id"`
	Op       string   `json:"op"`
	GID      wire.GID `json:"gid,omitzero"`  // hello
	MGID     wire.GID `json:"mgid,omitzero"` // join, leave
	SendOnly bool     `json:"send_only,omitempty"`
}

// Answer is a line from a server to a client. With the ID 0 it is not asked for:
// the members of a group have changed or, without an MGID, the P_Key table of the
// port or the parameters of a partition.
type Answer struct {
	ID      uint64        `json:"id,omitempty"`
	Epoch   uint64        `json:"epoch"` // of the server: another one after a restart
	Errno   syscall.Errno `json:"errno,omitempty"`
	Error   string        `json:"error,omitempty"`
	Lease   int64         `json:"lease_ms,omitempty"` // hello
	PKeys   []uint16      `json:"pkeys,omitempty"`    // hello, event: the port's table
	Group   *Group        `json:"group,omitempty"`    // join
	MGID    wire.GID      `json:"mgid,omitzero"`      // join, event
	Members []Member      `json:"members,omitempty"`  // join, event: those that receive
}

// Group are the parameters of a group, those of the broadcast group of its
// partition.
type Group struct {
	PKey     uint16 `json:"pkey"`
	QKey     uint32 `json:"qkey"`
	MTU      int    `json:"mtu"` // of the link, in bytes
	SL       int    `json:"sl"`
	Rate     int    `json:"rate"` // in Gbit/s
	HopLimit int    `json:"hop_limit"`
}

// Member is a port with the address that reaches it.
type Member struct {
	GID  wire.GID   `json:"gid"`
	Addr netip.Addr `json:"addr"`
}

// errLie is the error of an answer that no honest server gives.
var errLie = errors.New("the answer of the registry is not valid")

// decodeRequest parses a request. The error is syscall.EINVAL.
func decodeRequest(line []byte) (q Request, err error) {
	if err := decodeStrict(line, &q); err != nil {
		return q, fmt.Errorf("request: %w: %w", err, syscall.EINVAL)
	}
	ok := q.ID != 0
	switch q.Op {
	case opHello:
		ok = ok && validPort(q.GID) && q.MGID == (wire.GID{})
	case opJoin, opLeave:
		_, ipoib := wire.PKeyOf(q.MGID)
		ok = ok && ipoib && q.GID == (wire.GID{})
	case opRenew:
	default:
		ok = false
	}
	if !ok {
		return q, fmt.Errorf("request %q: want hello, join, leave or renew, with an id and its GIDs: %w", q.Op, syscall.EINVAL)
	}
	return q, nil
}

// decodeAnswer parses an answer for a client at local. Its error is errLie if the
// answer says what cannot be.
func decodeAnswer(line []byte, local netip.Addr) (a Answer, err error) {
	if err := decodeStrict(line, &a); err != nil {
		return a, fmt.Errorf("%w: %w", errLie, err)
	}
	switch {
	case a.Errno > 4095 || len(a.Error) > 1000:
		return a, fmt.Errorf("%w: errno %d", errLie, a.Errno)
	case a.Lease != 0 && (a.Lease < 1000 || a.Lease > 3600_000):
		return a, fmt.Errorf("%w: lease of %d ms", errLie, a.Lease)
	case len(a.Members) > MaxPorts || len(a.PKeys) > MaxPorts:
		return a, fmt.Errorf("%w: %d members, %d P_Keys", errLie, len(a.Members), len(a.PKeys))
	}
	if g := a.Group; g != nil && (g.PKey&0x7fff == 0 || g.QKey>>31 != 0 || g.MTU < 256 || g.MTU > 0xffff || g.SL < 0 || g.SL > 15 || g.HopLimit < 0 || g.HopLimit > 255 || g.Rate < 0) {
		return a, fmt.Errorf("%w: group %+v", errLie, *g)
	}
	if _, ok := wire.PKeyOf(a.MGID); !ok && (len(a.Members) > 0 || a.MGID != (wire.GID{})) {
		return a, fmt.Errorf("%w: MGID %s", errLie, a.MGID)
	}
	gids, addrs := map[wire.GID]bool{}, map[netip.Addr]bool{}
	for _, m := range a.Members {
		if !validPort(m.GID) || !usableAddr(m.Addr) || m.Addr.Is4() != local.Is4() || gids[m.GID] || addrs[m.Addr] {
			return a, fmt.Errorf("%w: member %s at %s", errLie, m.GID, m.Addr)
		}
		gids[m.GID], addrs[m.Addr] = true, true
	}
	return a, nil
}

// decodeStrict decodes one JSON object and nothing else.
func decodeStrict(line []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(line))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if _, err := d.Token(); err != io.EOF {
		return errors.New("more than one value in a line")
	}
	return nil
}

func validPort(g wire.GID) bool { return !g.IsMulticast() && g != wire.GID{} }

// usableAddr reports whether a port can be at a.
func usableAddr(a netip.Addr) bool {
	return a.IsValid() && !a.IsUnspecified() && !a.IsMulticast() && a.Zone() == "" && !a.Is4In6() && a != netip.AddrFrom4([4]byte{255, 255, 255, 255})
}

// encodeLine returns v as a line.
func encodeLine(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic("registry: " + err.Error()) // all messages have a form in JSON
	}
	return append(b, '\n')
}
