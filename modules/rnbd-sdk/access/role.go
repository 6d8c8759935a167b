package access

import (
	"errors"
	"net/netip"
	"slices"
)

// Roles of rules about remote administration, each with the rights of those before it.
const (
	RoleRead    = "read"    // list and show
	RoleVolumes = "volumes" // create volumes, and change those that the identity has created
	RoleAdmin   = "admin"   // everything that an administrator of the host may do with the daemon
)

// Administrator is what a rule allows an identity.
type Administrator struct {
	Role       string
	QuotaBytes int64 // sum of the sizes of its volumes; 0: no limit
}

// Administrator returns what the rules allow an identity that has connected from addr. The
// first rule with a role that fits decides. False: none fits.
func (r *Rules) Administrator(identity string, addr netip.Addr) (Administrator, bool) {
	if r == nil || identity == "" {
		return Administrator{}, false
	}
	for i := range r.list {
		d := &r.list[i]
		if d.administrator.Role == "" || !fitsOne(d.identity, identity) {
			continue
		}
		if len(d.address) == 0 || d.fitsPaths([]Path{{Addr: addr}}) {
			return d.administrator, true
		}
	}
	return Administrator{}, false
}

// checkRole checks the fields of a rule about remote administration, and of rules that are
// not.
func (w *Rule) checkRole() error {
	if w.Role == "" {
		if w.QuotaBytes != 0 {
			return fieldError{"quota-bytes", "", errors.New("it is of no use without the role volumes")}
		}
		return nil
	}
	switch {
	case !slices.Contains([]string{RoleRead, RoleVolumes, RoleAdmin}, w.Role):
		return fieldError{"role", w.Role, errors.New("write read, volumes or admin")}
	case len(w.Identity) == 0:
		return fieldError{"role", w.Role, errors.New("a rule with a role needs an identity")}
	case w.Allow != "" || len(w.Device) > 0 || len(w.Session) > 0 || len(w.Fabric) > 0 || w.Limits != Limits{}:
		return fieldError{"role", w.Role, errors.New("a rule with a role has identity and address beside it: what clients may open is for other rules")}
	case w.QuotaBytes < 0 || w.QuotaBytes > 0 && w.Role != RoleVolumes:
		return fieldError{"quota-bytes", "", errors.New("it is a number of bytes for the role volumes")}
	}
	return nil
}
