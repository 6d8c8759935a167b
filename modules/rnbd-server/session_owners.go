package server

import (
	"fmt"
	"slices"
	"sync"
	"syscall"
)

// sessionOwners are the identities that have used names of sessions first. A name belongs to
// its identity until the server ends, or until the identity has used maxNames others.
type sessionOwners struct {
	mu    sync.Mutex
	owner map[string]string   // by name
	names map[string][]string // by identity, the oldest first
}

// maxNames bounds the names of one identity. Clients make names up for sessions that
// their users do not name.
const maxNames = 1024

// claim gives the name of a session to an identity. EACCES: it belongs to another one.
// A client without identity owns no names, and may use those without an owner.
func (o *sessionOwners) claim(name, identity string) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if owner := o.owner[name]; owner != "" || identity == "" {
		if owner != identity {
			return fmt.Errorf("the name belongs to the identity that used it first, %q is another: %w", identity, syscall.EACCES)
		}
		return nil
	}
	if o.owner == nil {
		o.owner, o.names = map[string]string{}, map[string][]string{}
	}
	o.owner[name] = identity
	list := append(o.names[identity], name)
	if len(list) > maxNames {
		delete(o.owner, list[0])
		list = slices.Delete(list, 0, 1)
	}
	o.names[identity] = list
	return nil
}
