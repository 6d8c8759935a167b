package server

import (
	"fmt"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/access"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-server/volume"
)

// Who may open a node: the rules decide, or the identities that a volume is published to.

// errPrivate refuses clients that a volume is not published to.
var errPrivate error = &reasonedError{"the volume is published to other identities, or to none", syscall.EACCES, errRules.(*reasonedError).code}

// granted returns the reason why what is known of a volume forbids c to open it in mode.
func granted(meta *volume.Meta, c access.Client, mode blk.AccessMode) error {
	for _, identity := range c.Identities {
		if allowed, ok := blk.ParseAccessMode(meta.Grants[identity]); ok {
			if mode > allowed {
				return fmt.Errorf("it is published to %q with the access %s: %w", identity, allowed, errPrivate)
			}
			return nil
		}
	}
	return errPrivate
}

// judgeNode returns the reason why the session may not open a node: a snapshot is
// read-only, a private volume is for those that it is published to, and the rules decide
// about everything else.
func (s *Server) judgeNode(sess *session, n *node, name string, mode blk.AccessMode) error {
	switch {
	case n.meta.Snapshot && mode != blk.ReadOnly:
		return fmt.Errorf("it is a snapshot, which is read-only: %w", syscall.EROFS)
	case n.meta.Private:
		return granted(&n.meta, sess.admittedClient(), mode)
	case n.pooled: // before the look-up the rules were not asked
		return s.checkAllowed(sess, name, mode)
	}
	return nil
}

// hideVolume returns err, the error of a look-up. A client that the rules forbid a volume
// does not learn whether it exists.
func (s *Server) hideVolume(sess *session, name string, mode blk.AccessMode, err error) error {
	if p, _ := s.jail.pool(name); p != nil {
		if refused := s.checkAllowed(sess, name, mode); refused != nil {
			return fmt.Errorf("open %q: %w", name, refused)
		}
	}
	return err
}

// judgeMapping is judgeNode for a mapping that the session has.
func (s *Server) judgeMapping(m *mapping) error {
	if !m.private {
		return s.checkAllowed(m.session, m.name, m.mode)
	}
	meta, err := volume.ReadMeta(m.dev.file)
	if err != nil {
		return err
	}
	return granted(&meta, m.session.admittedClient(), m.mode)
}
