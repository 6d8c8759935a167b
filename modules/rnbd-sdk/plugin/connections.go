package plugin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/pluginpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sockpair"
)

// Connection is the connection of a user, on its way from one process of a front end
// to the next one. Neither reads it or writes it meanwhile.
type Connection struct {
	Device string // its name
	State  []byte // in a format that the front end's processes agree on
	// FDs are 1 to 4 descriptors; the first one is the socket. Whoever has the
	// Connection owns them.
	FDs []int
}

// Close closes the descriptors. The user's connection lives on if another process
// has it.
func (c *Connection) Close() {
	closeFDs(c.FDs)
	c.FDs = nil
}

// CloseConnections closes all of them.
func CloseConnections(all []Connection) {
	for i := range all {
		all[i].Close()
	}
}

// Transferrer is a Frontend whose connections can go on in another process.
type Transferrer interface {
	// ReleaseConnections closes the listeners, lets requests in flight end, and gives
	// the connections up. closed is the number of those that cannot be given up and
	// were closed. If requests do not end before ctx does, all is served as before,
	// and the error says so.
	ReleaseConnections(ctx context.Context) (released []Connection, closed int, err error)
	// AdoptConnections takes connections over and leaves them alone until
	// ServeConnections. The descriptors belong to the front end. After an error it
	// has closed all of them.
	AdoptConnections(ctx context.Context, all []Connection) error
	ServeConnections(ctx context.Context) error
}

const (
	// MaxConnections bounds the connections of one hand-over.
	MaxConnections = 1 << 16
	// maxConnection bounds the message of one, in bytes.
	maxConnection = 64 << 10
)

var errConnectionMessage = fmt.Errorf("malformed message of a connection: %w", unix.EPROTO)

// SendConnections writes all to a SOCK_SEQPACKET socket, a message each. The
// descriptors stay the caller's. It ends with ctx.
func SendConnections(ctx context.Context, to *net.UnixConn, all []Connection) error {
	defer context.AfterFunc(ctx, func() { to.SetWriteDeadline(time.Now()) })()
	for i := range all {
		msg, err := proto.Marshal(&pluginpb.Connection{Device: all[i].Device, State: all[i].State})
		if err != nil {
			return err
		}
		if len(msg) > maxConnection || len(all[i].FDs) == 0 || len(all[i].FDs) > maxFDs {
			return fmt.Errorf("connection of device %q, %d bytes, %d descriptors: %w", all[i].Device, len(msg), len(all[i].FDs), unix.EMSGSIZE)
		}
		if _, _, err := to.WriteMsgUnix(msg, unix.UnixRights(all[i].FDs...), nil); err != nil {
			return fmt.Errorf("pass a connection: %w", causeOr(ctx, err))
		}
	}
	return nil
}

// ReceiveConnections reads messages of SendConnections until the end of file. It
// ends with ctx.
func ReceiveConnections(ctx context.Context, from *net.UnixConn) (all []Connection, err error) {
	defer context.AfterFunc(ctx, func() { from.SetReadDeadline(time.Now()) })()
	defer func() {
		if err != nil {
			CloseConnections(all)
			all = nil
		}
	}()
	buf, oob := make([]byte, maxConnection+1), make([]byte, unix.CmsgSpace(maxFDs*4))
	for {
		n, oobn, flags, _, err := from.ReadMsgUnix(buf, oob)
		if err != nil && !errors.Is(err, io.EOF) {
			return all, fmt.Errorf("take connections: %w", causeOr(ctx, err))
		}
		if n <= 0 && oobn == 0 {
			return all, nil
		}
		c, err := parseConnection(buf[:n], oob[:oobn], flags)
		if err != nil {
			return all, err
		}
		if all = append(all, c); len(all) > MaxConnections {
			return all, fmt.Errorf("more than %d connections: %w", MaxConnections, unix.EPROTO)
		}
	}
}

// causeOr returns why ctx has ended, else err.
func causeOr(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// parseConnection checks a message. After an error its descriptors are closed.
func parseConnection(msg, oob []byte, flags int) (Connection, error) {
	fds, err := rights(oob)
	for _, fd := range fds {
		unix.CloseOnExec(fd)
	}
	var m pluginpb.Connection
	if err == nil && (flags&(unix.MSG_CTRUNC|unix.MSG_TRUNC) != 0 || len(msg) > maxConnection || len(fds) == 0 || len(fds) > maxFDs) {
		err = fmt.Errorf("%d bytes, %d descriptors, flags %#x", len(msg), len(fds), flags)
	}
	if err == nil {
		err = proto.Unmarshal(msg, &m)
	}
	if err != nil {
		closeFDs(fds)
		return Connection{}, fmt.Errorf("%w: %w", errConnectionMessage, err)
	}
	return Connection{Device: m.GetDevice(), State: m.GetState(), FDs: fds}, nil
}

// ReleaseConnections has the plugin give up the connections of its users, and its
// listeners. The error wraps EOPNOTSUPP if the plugin cannot; after any error the
// plugin serves as before, if it lives.
func (p *Process) ReleaseConnections(ctx context.Context, patience time.Duration) (released []Connection, closed int, err error) {
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, 0, err
	}
	defer ours.Close()
	token, err := p.sendFile(theirs)
	theirs.Close()
	if err != nil {
		return nil, 0, p.failed("release connections", err)
	}
	type result struct {
		all []Connection
		err error
	}
	got := make(chan result, 1)
	reading, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		all, err := ReceiveConnections(reading, ours)
		got <- result{all, err}
	}()
	resp, err := p.front.ReleaseConnections(ctx, &pluginpb.ReleaseConnectionsRequest{Token: token, PatienceMs: uint32(patience.Milliseconds())})
	if err != nil {
		stop() // nothing comes
	}
	r := <-got
	if err == nil && r.err == nil && uint64(resp.GetReleased()) != uint64(len(r.all)) {
		r.err = fmt.Errorf("%d connections came, %d were announced: %w", len(r.all), resp.GetReleased(), unix.EPROTO)
	}
	if err == nil {
		err = r.err
	}
	if err != nil {
		CloseConnections(r.all)
		return nil, 0, p.failed("release connections", err)
	}
	return r.all, int(resp.GetClosed()), nil
}

// AdoptConnections gives the plugin connections that another process has given up.
// They stay the caller's, too. After an error the plugin has none.
func (p *Process) AdoptConnections(ctx context.Context, all []Connection) error {
	const what = "adopt connections"
	ours, theirs, err := socketPair()
	if err != nil {
		return err
	}
	defer ours.Close()
	token, err := p.sendFile(theirs)
	theirs.Close()
	if err != nil {
		return p.failed(what, err)
	}
	sending, stop := context.WithCancel(ctx)
	defer stop()
	sent := make(chan error, 1)
	go func() {
		err := SendConnections(sending, ours, all)
		ours.CloseWrite()
		sent <- err
	}()
	_, err = p.front.AdoptConnections(ctx, &pluginpb.AdoptConnectionsRequest{Token: token, Connections: uint32(len(all))})
	stop() // the plugin has read all, or reads no more
	if serr := <-sent; err == nil && serr != nil {
		err = serr
	}
	return p.failed(what, err)
}

// ServeConnections has the plugin serve the connections that it has adopted.
func (p *Process) ServeConnections(ctx context.Context) error {
	_, err := p.front.ServeConnections(ctx, &pluginpb.ServeConnectionsRequest{})
	return p.failed("serve connections", err)
}

// The plugin's end.

func (s *frontServer) transferrer() (Transferrer, error) {
	t, ok := s.f.(Transferrer)
	if !ok {
		return nil, fmt.Errorf("connections of the plugin end with its process: %w", blk.EOPNOTSUPP)
	}
	return t, nil
}

// connections takes the socket of a token.
func (s *frontServer) connections(ctx context.Context, token uint64) (*net.UnixConn, error) {
	fds, err := s.fds.take(ctx, token, 1)
	if err != nil {
		return nil, err
	}
	return sockpair.Conn(os.NewFile(uintptr(fds[0]), "connections"))
}

func (s *frontServer) ReleaseConnections(ctx context.Context, r *pluginpb.ReleaseConnectionsRequest) (*pluginpb.ReleaseConnectionsResponse, error) {
	resp, err := s.release(ctx, r)
	if err != nil {
		return nil, fmt.Errorf("release connections: %w", err)
	}
	return resp, nil
}

func (s *frontServer) release(ctx context.Context, r *pluginpb.ReleaseConnectionsRequest) (*pluginpb.ReleaseConnectionsResponse, error) {
	to, err := s.connections(ctx, r.GetToken())
	if err != nil {
		return nil, err
	}
	defer to.Close()
	t, err := s.transferrer()
	if err != nil {
		return nil, err
	}
	patient, cancel := context.WithTimeout(ctx, time.Duration(r.GetPatienceMs())*time.Millisecond)
	defer cancel()
	all, closed, err := t.ReleaseConnections(patient)
	if err != nil {
		return nil, err
	}
	defer CloseConnections(all)
	if err := SendConnections(ctx, to, all); err != nil {
		return nil, err
	}
	return &pluginpb.ReleaseConnectionsResponse{Released: uint32(len(all)), Closed: uint32(closed)}, nil
}

func (s *frontServer) AdoptConnections(ctx context.Context, r *pluginpb.AdoptConnectionsRequest) (*pluginpb.AdoptConnectionsResponse, error) {
	if err := s.adopt(ctx, r); err != nil {
		return nil, fmt.Errorf("adopt connections: %w", err)
	}
	return &pluginpb.AdoptConnectionsResponse{}, nil
}

func (s *frontServer) adopt(ctx context.Context, r *pluginpb.AdoptConnectionsRequest) error {
	from, err := s.connections(ctx, r.GetToken())
	if err != nil {
		return err
	}
	defer from.Close()
	t, err := s.transferrer()
	if err != nil {
		return err
	}
	all, err := ReceiveConnections(ctx, from)
	if err != nil {
		return err
	}
	if uint64(len(all)) != uint64(r.GetConnections()) {
		CloseConnections(all)
		return fmt.Errorf("%d connections came, %d were announced: %w", len(all), r.GetConnections(), unix.EPROTO)
	}
	return t.AdoptConnections(ctx, all)
}

func (s *frontServer) ServeConnections(ctx context.Context, _ *pluginpb.ServeConnectionsRequest) (*pluginpb.ServeConnectionsResponse, error) {
	t, err := s.transferrer()
	if err == nil {
		err = t.ServeConnections(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("serve connections: %w", err)
	}
	return &pluginpb.ServeConnectionsResponse{}, nil
}
