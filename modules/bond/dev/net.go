package dev

import (
	"log/slog"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/bond/core"
	"github.com/rnbd-go/rnbd/modules/bond/resolve"
)

// Net is a set of devices and bonds with names of their own.
type Net struct {
	// NewUpper makes the upper side of a new bond; nil: bonds have none.
	NewUpper func(name string, c UpperCallbacks) (Upper, error)
	// Log takes changes of state; nil: slog.Default.
	Log *slog.Logger
	// Resolver answers for all bonds of the net.
	Resolver resolve.Resolver

	mu      sync.Mutex // before any bond's
	devices map[string]*netDevice
	bonds   []*Bond
}

// netDevice is a slave, or one to be.
type netDevice struct {
	Slave
	master *Bond // nil: free
}

func (n *Net) logger() *slog.Logger {
	if n.Log != nil {
		return n.Log
	}
	return slog.Default()
}

// validName reports whether an interface may have the name.
func validName(name string) bool {
	return name != "" && len(name) <= core.MaxName && name != "." && name != ".." && !strings.ContainsAny(name, "/: \t\n\v\f\r")
}

// AddDevice makes a device known, so that it can be enslaved. EEXIST says that
// its name is taken.
func (n *Net) AddDevice(s Slave) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	name := s.Name()
	if !validName(name) {
		return core.Errorf(syscall.EINVAL, "%q is no name of an interface", name)
	}
	if n.nameTaken(name) {
		return core.Errorf(syscall.EEXIST, "%s already exists", name)
	}
	if n.devices == nil {
		n.devices = map[string]*netDevice{}
	}
	n.devices[name] = &netDevice{Slave: s}
	return nil
}

// RemoveDevice forgets a device. Its bond releases it first.
func (n *Net) RemoveDevice(name string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	d := n.devices[name]
	if d == nil {
		return core.Errorf(syscall.ENODEV, "interface %s does not exist!", name)
	}
	if d.master != nil {
		if err := d.master.releaseDevice(d); err != nil {
			return err
		}
		d.master = nil
	}
	delete(n.devices, name)
	return nil
}

func (n *Net) nameTaken(name string) bool { return n.devices[name] != nil || n.findBond(name) != nil }

func (n *Net) findBond(name string) *Bond {
	for _, b := range n.bonds {
		if b.name == name {
			return b
		}
	}
	return nil
}

// Bond returns the named bond, nil if there is none.
func (n *Net) Bond(name string) *Bond {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.findBond(name)
}

// Bonds returns all bonds, the oldest first.
func (n *Net) Bonds() []*Bond {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.bonds)
}

// Create makes a bond. It is down and has no slaves.
func (n *Net) Create(name string) (*Bond, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !validName(name) {
		return nil, core.Errorf(syscall.EINVAL, "%q is no name of an interface", name)
	}
	if n.nameTaken(name) {
		return nil, core.Errorf(syscall.EEXIST, "%s already exists", name)
	}
	b, err := newBond(n, name)
	if err != nil {
		return nil, err
	}
	n.bonds = append(n.bonds, b)
	n.Resolver.Add(b)
	return b, nil
}

// Delete releases the slaves of a bond and takes it away.
func (n *Net) Delete(name string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	b := n.findBond(name)
	if b == nil {
		return core.Errorf(syscall.ENODEV, "unable to delete non-existent %s", name)
	}
	for _, d := range n.devices {
		if d.master == b {
			if err := b.releaseDevice(d); err != nil {
				b.log.Warn("slave of a deleted bond is not released cleanly", "slave", d.Name(), "err", err)
			}
			d.master = nil
		}
	}
	n.bonds = slices.DeleteFunc(n.bonds, func(x *Bond) bool { return x == b })
	n.Resolver.Remove(b)
	return b.close()
}

// Close deletes all bonds.
func (n *Net) Close() {
	for _, b := range n.Bonds() {
		if err := n.Delete(b.name); err != nil {
			n.logger().Warn("bond is not deleted cleanly", "bond", b.name, "err", err)
		}
	}
}

// parseCommand splits "+name" and "-name". ok is false for anything else, also for a
// name that no interface can have.
func parseCommand(text string) (sign byte, name string, ok bool) {
	text = strings.TrimSpace(text)
	if text == "" || text[0] != '+' && text[0] != '-' || !validName(text[1:]) {
		return 0, "", false
	}
	return text[0], text[1:], true
}

// Masters executes a text written to bonding_masters: +name creates a bond,
// -name deletes one. A name of more than 15 octets is EPERM; Linux takes its
// first 15.
func (n *Net) Masters(text string) error {
	sign, name, ok := parseCommand(text)
	switch {
	case !ok:
		return core.Errorf(syscall.EPERM, "no command found in bonding_masters - use +ifname or -ifname")
	case sign == '+':
		_, err := n.Create(name)
		return err
	}
	return n.Delete(name)
}

// Enslave executes a text written to a bond's file slaves: +name and -name.
func (n *Net) Enslave(b *Bond, text string) error {
	sign, name, ok := parseCommand(text)
	if !ok {
		return core.Errorf(syscall.EPERM, "no command found in slaves file - use +ifname or -ifname")
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.findBond(b.name) != b {
		return core.Errorf(syscall.ENODEV, "interface %s does not exist!", b.name)
	}
	d := n.devices[name]
	if sign == '-' {
		if d == nil || d.master != b {
			return core.Errorf(syscall.EINVAL, "interface not enslaved")
		}
		d.master = nil
		return b.releaseDevice(d)
	}
	switch {
	case name == b.name:
		return core.Errorf(syscall.EPERM, "Cannot enslave bond to itself.")
	case n.findBond(name) != nil:
		return core.Errorf(syscall.EPERM, "Device type (master device) cannot be enslaved")
	case d == nil:
		return core.Errorf(syscall.ENODEV, "interface %s does not exist!", name)
	case d.master != nil:
		return core.Errorf(syscall.EBUSY, "Device is in use and cannot be enslaved")
	}
	if err := b.enslaveDevice(d); err != nil {
		return err
	}
	d.master = b
	return nil
}
