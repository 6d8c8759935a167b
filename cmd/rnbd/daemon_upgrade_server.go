package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/handover"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-server"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// serverServeTime is for the next process to serve. It is shorter than the patience
// of clients that were told, so that they do not notice that the running process takes
// over again.
const serverServeTime = 5 * time.Second

func (*serving) serveTime() time.Duration { return serverServeTime }

// Upgrade hands over to another process of the server.
func (d *serverDaemon) Upgrade(_ context.Context, r *controlpb.UpgradeRequest) (*controlpb.UpgradeReply, error) {
	return d.upgrading.upgrade(r, d.serving)
}

// serving is the service of a server: its clients, and the sockets where they
// connect.
type serving struct {
	server  *server.Server
	options *serverOptions
	fabrics map[string]verbs.Device
	reopen  func(fabric string) (verbs.Device, error)
	errors  *os.File // of flushes, for the next process; nil: there is no upgrade under way
}

// socketErrors is a file in memory with the errors of flushes that clients were not told of.
const socketErrors = "flush-errors"

// socketKeeper is a device whose listening sockets can be handed over. Others
// listen again, which their clients notice if that takes longer than a repetition
// of their requests to connect.
type socketKeeper interface {
	Socket(netip.AddrPort) (*os.File, error)
	Inherit(*os.File) (netip.AddrPort, error)
}

func (s *serving) sockets() (all []handover.Socket, err error) {
	for i, arg := range s.options.Listen {
		fabric, _ := cutFabric(arg)
		k, ok := s.fabrics[fabric].(socketKeeper)
		if !ok {
			continue
		}
		f, err := k.Socket(s.server.Addr(i))
		if err != nil {
			return all, err
		}
		all = append(all, handover.Socket{Name: listenName(arg), File: f})
	}
	fd, err := unix.MemfdCreate(socketErrors, unix.MFD_CLOEXEC)
	if err != nil {
		return all, os.NewSyscallError("memfd_create", err)
	}
	s.errors = os.NewFile(uintptr(fd), socketErrors)
	return append(all, handover.Socket{Name: socketErrors, File: s.errors}), nil
}

func (s *serving) leave(ctx context.Context) (devices int, left bool, err error) {
	devices, left, err = s.server.HandOver(ctx)
	if err == nil {
		err = s.closeAddresses()
	}
	return devices, left, err
}

// closeAddresses frees the addresses of fabrics whose sockets are not handed over.
func (s *serving) closeAddresses() error {
	var errs []error
	for fabric, dev := range s.fabrics {
		if _, keeps := dev.(socketKeeper); !keeps && s.listensOn(fabric) {
			errs = append(errs, dev.Close())
		}
	}
	return errors.Join(errs...)
}

func (s *serving) listensOn(fabric string) bool {
	return slices.ContainsFunc(s.options.Listen, func(arg string) bool {
		f, _ := cutFabric(arg)
		return f == fabric
	})
}

// pass leaves the errors of flushes to the next process. Clients bring their devices along.
func (s *serving) pass(*handover.Process) error {
	text, err := json.Marshal(s.server.FlushErrors())
	if err == nil {
		_, err = s.errors.WriteAt(text, 0)
	}
	return err
}

// inheritErrors gives s the errors of flushes that the last process has left. A process of an
// earlier version leaves none.
func inheritErrors(pre *handover.Predecessor, s *server.Server) error {
	f := pre.Take(socketErrors)
	if f == nil {
		return nil
	}
	defer f.Close()
	text, err := io.ReadAll(io.NewSectionReader(f, 0, 1<<20))
	if err != nil || len(text) == 0 {
		return err
	}
	var all []server.FlushError
	if err := json.Unmarshal(text, &all); err != nil {
		return fmt.Errorf("errors of flushes: %w", err)
	}
	s.InheritFlushErrors(all)
	return nil
}

func (s *serving) commit(*handover.Process, *controlpb.UpgradeReply) error { return nil }

func (s *serving) end() {}

func (s *serving) resume(sockets []handover.Socket) error {
	for fabric, dev := range s.fabrics {
		if _, keeps := dev.(socketKeeper); !keeps && s.listensOn(fabric) {
			if err := dev.Close(); err != nil {
				return err
			}
			again, err := s.reopen(fabric)
			if err != nil {
				return fmt.Errorf("fabric %s: %w", fabric, err)
			}
			s.fabrics[fabric] = again
		}
	}
	listen, err := s.options.listeners(s.fabrics, socketOf(sockets))
	if err != nil {
		return err
	}
	return s.server.Serve(listen)
}

// listeners turns the arguments of --listen into the library's. Listeners take the
// sockets that inherited returns for their names.
func (o *serverOptions) listeners(devices map[string]verbs.Device, inherited func(name string) *os.File) (all []server.Listen, err error) {
	for _, arg := range o.Listen {
		l, err := o.parseListener(arg)
		if err != nil {
			return nil, err
		}
		dev, ok := devices[l.fabric]
		if !ok {
			return nil, usageError{fmt.Errorf("--listen %s: this build has the fabrics %s", arg, strings.Join(fabricNames(), ", "))}
		}
		ap, err := netip.ParseAddrPort(l.addr)
		if err != nil {
			return nil, usageError{fmt.Errorf("--listen %s: %w; write [FABRIC://]ADDRESS:PORT", arg, err)}
		}
		if k, ok := dev.(socketKeeper); ok {
			if f := inherited(listenName(arg)); f != nil {
				if ap, err = k.Inherit(f); err != nil {
					return nil, fmt.Errorf("--listen %s: %w", arg, err)
				}
			}
		}
		all = append(all, server.Listen{Device: dev, Addr: ap, Auth: l.auth})
	}
	return all, nil
}
