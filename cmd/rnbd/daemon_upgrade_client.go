package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/handover"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/mappings"
	"github.com/rnbd-go/rnbd/modules/rnbd-client"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sockpair"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Upgrade hands over to another process of the client.
func (d *clientDaemon) Upgrade(_ context.Context, r *controlpb.UpgradeRequest) (*controlpb.UpgradeReply, error) {
	return d.upgrading.upgrade(r, &clientService{client: d.client, keeper: d.keeper})
}

// Names of sockets of a client, beside the control socket.
const (
	// socketConnections is where the connections of users are passed.
	socketConnections = "connections"
	// socketUsers stands before the argument of --nbd-listen.
	socketUsers = "nbd-listen "
	// Both are sockets of the service manager.
	socketUsersKept    = "nbd-kept"
	socketUsersTrusted = "nbd-kept-trusted"
)

// clientService is the service of a client during an upgrade: its devices, and their
// users' connections.
type clientService struct {
	client *client.Client
	keeper *mappings.Keeper
	pair   *net.UnixConn // the next process has the other end
	legacy *client.Handover
}

func (s *clientService) sockets() (all []handover.Socket, err error) {
	for _, u := range s.client.UserSockets() {
		name := socketUsers + u.Arg
		switch {
		case u.Arg == "" && u.Trusted:
			name = socketUsersTrusted
		case u.Arg == "":
			name = socketUsersKept
		}
		f, err := u.Duplicate()
		if err != nil {
			return all, err
		}
		all = append(all, handover.Socket{Name: name, File: f})
	}
	pair, theirs, err := sockpair.New(unix.SOCK_SEQPACKET, socketConnections)
	if err != nil {
		return all, err
	}
	s.pair = pair
	return append(all, handover.Socket{Name: socketConnections, File: theirs}), nil
}

func (s *clientService) leave(ctx context.Context) (devices int, left bool, err error) {
	s.legacy, err = s.client.HandOver(ctx)
	if s.legacy == nil {
		return 0, false, err
	}
	s.legacy.Kept = s.keeper.Kept()
	return s.legacy.Devices, true, err
}

// passTime bounds the way of the connections to the next process, of which each one takes
// a message.
const passTime = 10 * time.Second

func (s *clientService) pass(next *handover.Process) error {
	state, err := s.legacy.State()
	if err != nil {
		return err
	}
	if err := next.State(string(state)); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), passTime)
	defer cancel()
	defer s.pair.Close()
	return next.Why(plugin.SendConnections(ctx, s.pair, s.legacy.Connections()))
}

func (s *clientService) commit(next *handover.Process, r *controlpb.UpgradeReply) error {
	if err := next.Yours(); err != nil {
		return err
	}
	r.Closed = int32(s.legacy.Closed)
	s.client.HandedOver()
	return nil
}

func (s *clientService) resume([]handover.Socket) error {
	ctx, cancel := context.WithTimeout(context.Background(), clientServeTime(s.legacy.Devices))
	defer cancel()
	err := s.client.TakeOver(ctx, s.legacy)
	s.client.ServeUsers(context.WithoutCancel(ctx))
	if err != nil {
		return partly{fmt.Errorf("not all is served again: %w", err)}
	}
	return nil
}

func (s *clientService) end() {
	if s.pair != nil {
		s.pair.Close()
	}
	if s.legacy != nil {
		s.legacy.Close()
	}
}

// reopening returns the functions that open fabrics again, for those with addresses of
// which a process has all.
func reopening(c fabricConfig, open map[string]verbs.Device) map[string]func() (verbs.Device, error) {
	again := map[string]func() (verbs.Device, error){}
	for name, dev := range open {
		if _, shares := dev.(socketKeeper); !shares {
			c := c
			c.Logger = c.Logs.Logger(name)
			again[name] = func() (verbs.Device, error) { return fabrics[name](c) }
		}
	}
	return again
}

// inheritUsers takes over the sockets of users.
func inheritUsers(cfg *client.Config, pre *handover.Predecessor, o *clientOptions) {
	if pre == nil {
		return
	}
	cfg.Standby, cfg.PluginPatience = true, 0 // the process before goes on with the front ends that it has
	for i := range cfg.Frontends {
		fe := &cfg.Frontends[i]
		if fe.Name != "nbd" {
			continue
		}
		fe.Inherited = map[string]*os.File{}
		for _, l := range fe.Listen {
			arg := client.ListenArg(l)
			if f := pre.Take(socketUsers + arg); f != nil {
				fe.Inherited[arg] = f
			}
		}
	}
	takeSockets(cfg, pre.TakeAll(socketUsersKept), pre.TakeAll(socketUsersTrusted), len(o.NBDListen) > 0)
}

// clientServeTime is for a process to serve so many devices after another one has left
// them. Their users wait meanwhile. A host that is not busy needs 3 ms for each.
func clientServeTime(devices int) time.Duration {
	return 10*time.Second + time.Duration(devices)*50*time.Millisecond
}

// serveMargin is how much earlier than clientServeTime the next process gives up, so that
// it can say why.
const serveMargin = time.Second

func (s *clientService) serveTime() time.Duration { return clientServeTime(s.legacy.Devices) }

// takeOver is the counterpart of a clientService in the next process. It returns when
// the last process has ended. kept are the devices of the configuration's mappings.
func (o *clientOptions) takeOver(r *daemonRun, c *client.Client) (kept map[string]string, err error) {
	if r.pre == nil {
		return nil, nil
	}
	ctx := r.cmd.Context()
	h, err := receive(ctx, r.pre)
	if err != nil {
		return nil, fmt.Errorf("take over: %w", err)
	}
	defer h.Close()
	err = takeDevices(ctx, c, h)
	if err == nil {
		r.pre.Drop()
		err = r.pre.Serving()
	}
	if err == nil {
		err = r.pre.AwaitYours(ctx)
	}
	if err != nil {
		// The last process takes all back, and ends this one. It must not end its
		// part of that in order: disks would be taken away.
		err = fmt.Errorf("take over: %w", err)
		r.pre.Failed(err)
		_ = r.pre.AwaitEnd(ctx)
		return nil, err
	}
	c.ServeUsers(ctx)
	r.log.Info("this process serves in place of the last one", "devices", h.Devices, "connections", len(h.Connections()))
	h.Close()
	return h.Kept, r.pre.AwaitEnd(ctx)
}

// receive waits until the last process has left its devices, and returns them.
func receive(ctx context.Context, pre *handover.Predecessor) (*client.Handover, error) {
	f := pre.Take(socketConnections)
	if f == nil {
		return nil, errors.New("the running process hands no connections over: restart the daemon in place of upgrading it")
	}
	pair, err := sockpair.Conn(f)
	if err != nil {
		return nil, err
	}
	defer pair.Close()
	if err := pre.Ready(versionString()); err != nil {
		return nil, err
	}
	state, err := pre.AwaitState(ctx)
	if err != nil {
		return nil, err
	}
	conns, err := plugin.ReceiveConnections(ctx, pair)
	if err != nil {
		return nil, err
	}
	h, err := client.ParseHandover([]byte(state), conns)
	if err != nil {
		return nil, err
	}
	if _, err := pre.AwaitGo(ctx); err != nil {
		h.Close()
		return nil, err
	}
	return h, nil
}

func takeDevices(ctx context.Context, c *client.Client, h *client.Handover) error {
	ctx, cancel := context.WithTimeout(ctx, clientServeTime(h.Devices)-serveMargin)
	defer cancel()
	return c.TakeOver(ctx, h)
}
