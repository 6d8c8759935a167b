package server

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-server/volume"
)

// What pools ask of the clients that have their volumes open: the server implements
// volume.Users.

var _ volume.Users = (*Server)(nil)

// Hold implements volume.Users.
func (s *Server) Hold(ctx context.Context, id volume.ID) (uses volume.Uses, release func(), err error) {
	node := nodeID{dev: id.Dev, ino: id.Ino}
	turn, err := s.nodes.Lock(ctx, node)
	if err != nil {
		return uses, nil, fmt.Errorf("an OPEN or CLOSE of it does not end: %w: %w", err, syscall.EBUSY)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, d := range s.devices {
		if key.id != node {
			continue
		}
		if key.readOnly {
			uses.Readers += d.users
		} else {
			uses.Writers += d.users
		}
	}
	return uses, turn.Unlock, nil
}

// Pause implements volume.Users.
func (s *Server) Pause(ctx context.Context, id volume.ID) (resume func() error, err error) {
	s.mu.Lock()
	d := s.devices[deviceKey{id: nodeID{dev: id.Dev, ino: id.Ino}}]
	s.mu.Unlock()
	if d == nil {
		return func() error { return nil }, nil
	}
	if err := d.plugin.pause(ctx, d); err != nil {
		return nil, err
	}
	return func() error { return d.plugin.resume(d) }, nil
}

// Resized implements volume.Users.
func (s *Server) Resized(ctx context.Context, id volume.ID) error {
	var errs []error
	for _, d := range s.openDevices() {
		if d.key.id == (nodeID{dev: id.Dev, ino: id.Ino}) {
			d.sizeMu.Lock()
			errs = append(errs, s.resizeDevice(ctx, d))
			d.sizeMu.Unlock()
		}
	}
	return errors.Join(errs...)
}
