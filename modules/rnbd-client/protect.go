package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// The TLS of users' sockets. The process of a front end serves it; it has no
// files, so it is handed what is in them.

// tlsLook is the time between two looks at the files of TLS.
const tlsLook = 2 * time.Second

// sendTLS hands h what it needs for TLS, unless h has that. f.giving is held.
func (f *frontend) sendTLS(ctx context.Context, h *frontendProcess) error {
	if f.cfg.TLS == nil || len(f.sockets) == 0 {
		return nil
	}
	t := f.tlsMaterial()
	if h.tls != nil && h.tls.Equal(&t) {
		return nil
	}
	if err := h.SetTLS(ctx, t); err != nil {
		return fmt.Errorf("front end %s: %w", f.cfg.Name, err)
	}
	h.tls = &t
	return nil
}

// tlsMaterial returns what processes of the front end need for TLS now.
func (f *frontend) tlsMaterial() plugin.TLS {
	t := f.cfg.TLS()
	for _, s := range f.sockets {
		if s.trusted {
			t.Plain = append(t.Plain, s.name)
		}
	}
	return t
}

// RenewTLS hands front ends what FrontendConfig.TLS returns now. They judge users that
// are connected by it.
func (c *Client) RenewTLS(ctx context.Context) error {
	var errs []error
	for _, f := range c.frontends {
		errs = append(errs, f.renewTLS(ctx))
	}
	return errors.Join(errs...)
}

func (f *frontend) renewTLS(ctx context.Context) error {
	f.giving.Lock()
	defer f.giving.Unlock()
	h, _ := f.currentProcess()
	if h == nil || !h.given {
		return nil // the next process gets it before the sockets
	}
	return f.renewOn(ctx, h)
}

func (f *frontend) renewOn(ctx context.Context, h *frontendProcess) error {
	err := f.sendTLS(ctx, h)
	if blk.ToErrno(err) == blk.EOPNOTSUPP {
		// It would go on without checks that users need now. The next process gets no
		// socket either, while that is so.
		h.Process.Kill()
	}
	return err
}

// watchTLS renews until the front end ends.
func (f *frontend) watchTLS() {
	tick := time.NewTicker(tlsLook)
	defer tick.Stop()
	for {
		select {
		case <-f.life.Done():
			return
		case <-tick.C:
		}
		ctx, cancel := context.WithTimeout(f.life, callTimeout)
		f.fetchUsers(ctx)
		if err := f.renewTLS(ctx); err != nil && f.life.Err() == nil {
			f.log.Error("TLS is not renewed", "err", err)
		}
		cancel()
	}
}

// fetchUsers takes over the events of users.
func (f *frontend) fetchUsers(ctx context.Context) {
	h, _ := f.currentProcess()
	if f.cfg.Users == nil || h == nil {
		return
	}
	events, lost, err := h.TakeUsers(ctx)
	if err != nil && ctx.Err() == nil {
		f.log.Warn("what users did is not known", "err", err)
	}
	if len(events) > 0 || lost > 0 {
		f.cfg.Users(events, lost)
	}
}

// checkReach refuses a socket that others than this host can reach, unless TLS is
// required there or its network is trusted.
func (f *frontend) checkReach(s *listenSocket) error {
	addr, ok := s.addr.(*net.TCPAddr)
	if !ok || addr.IP.IsLoopback() || s.trusted || f.cfg.TLS != nil && f.cfg.TLS().Required {
		return nil
	}
	return fmt.Errorf("listen on %q: whoever reaches it could read and write the devices; require TLS (--nbd-tls require), "+
		"write %s,trusted if its network is protected in another way, or tcp:127.0.0.1:%d for this host alone: %w",
		s.name, s.name, addr.Port, syscall.EINVAL)
}
