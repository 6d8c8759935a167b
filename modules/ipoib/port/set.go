package port

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/ipoib/dev"
	"github.com/rnbd-go/rnbd/modules/ipoib/registry"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Config describes a port.
type Config struct {
	Fabric   verbs.DatagramDevice
	Local    netip.Addr       // address of the port
	Peers    []netip.Addr     // the other ports of its links
	Registry *registry.Client // in the place of Peers, see dev.Config
	PKey     uint16           // of the main interface, the first of the port's table; default 0xffff
	QKey     uint32           // default dev.DefaultQKey
	LinkMTU  int              // see dev.Config
	Mode     dev.Mode         // of the main interface; default datagram
	// Ethernet makes the interfaces Ethernet to the kernel, see dev.Config.
	Ethernet bool
	Trace    *dev.Trace   // default: none
	Logger   *slog.Logger // default slog.Default()
}

// Link is an interface of a Set.
type Link struct {
	*dev.Interface
	Parent string // name of the main interface; empty for a main interface
	byKey  bool   // made by CreateChild
	port   Config
	umcast atomic.Bool
}

// Umcast returns the flag of Linux's file umcast. In Linux it makes the
// interface ignore groups that programs join at the subnet administrator.
// RoCEv2 has none, so the flag is stored and has no effect.
func (l *Link) Umcast() bool { return l.umcast.Load() }

// SetUmcast sets the flag of Umcast.
func (l *Link) SetUmcast(on bool) { l.umcast.Store(on) }

// ByKey reports whether the interface was made by CreateChild.
func (l *Link) ByKey() bool { return l.byKey }

// Set holds the interfaces of a host. All methods may be called by any
// goroutine. An interface is made in the network namespace of the calling
// thread.
type Set struct {
	mu    sync.Mutex
	links []*Link // in the order of their making
}

// AddPort makes the main interface of a port. The names are ib0, ib1 and so
// on, in the order of the calls, as Linux names them: the first that is free.
func (s *Set) AddPort(cfg Config) (*Link, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.openLink("ib%d", "", false, cfg.PKey, cfg)
}

// openLink makes an interface. s.mu is held.
func (s *Set) openLink(name, parent string, byKey bool, pkey uint16, cfg Config) (*Link, error) {
	mode := dev.Datagram // of children, as in Linux
	if parent == "" {
		mode = cfg.Mode
	}
	i, err := dev.Open(dev.Config{Name: name, Fabric: cfg.Fabric, Local: cfg.Local, Peers: cfg.Peers, Registry: cfg.Registry, PKey: pkey, QKey: cfg.QKey, LinkMTU: cfg.LinkMTU, Mode: mode, Ethernet: cfg.Ethernet, Trace: cfg.Trace, Logger: cfg.Logger})
	if err != nil {
		return nil, err
	}
	l := &Link{Interface: i, Parent: parent, byKey: byKey, port: cfg}
	s.links = append(s.links, l)
	return l, nil
}

// Links lists the interfaces in the order of their making.
func (s *Set) Links() []*Link {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.links)
}

// Link returns the interface with a name. The error is unix.ENODEV if there is
// none.
func (s *Set) Link(name string) (*Link, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.findLink(name)
}

func (s *Set) findLink(name string) (*Link, error) {
	for _, l := range s.links {
		if l.Name() == name {
			return l, nil
		}
	}
	return nil, fmt.Errorf("no IPoIB interface %s: %w", name, unix.ENODEV)
}

// main returns the main interface with a name.
func (s *Set) main(name string) (*Link, error) {
	l, err := s.findLink(name)
	if err == nil && l.Parent != "" {
		return nil, fmt.Errorf("%s is a child of %s, and a child has no children: %w", name, l.Parent, unix.EINVAL)
	}
	return l, err
}

// member is the full-member bit of a P_Key.
const member = 0x8000

func checkPKey(pkey int) error {
	if pkey <= 0 || pkey > 0xffff || pkey == member {
		return fmt.Errorf("P_Key %#x: want 0x1 to 0xffff, without 0x8000: %w", pkey, unix.EINVAL)
	}
	return nil
}

// CreateChild makes the child of parent for the partition pkey. Its name has
// pkey as given; its P_Key has the full-member bit. Errors: unix.EINVAL if pkey
// is no P_Key, unix.ENOTUNIQ if the parent or a child made by CreateChild has
// it, unix.ENODEV if there is no such parent.
func (s *Set) CreateChild(parent string, pkey int) (*Link, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l, err := s.createChild(parent, pkey)
	if err != nil {
		return nil, fmt.Errorf("create child of %s: %w", parent, err)
	}
	return l, nil
}

func (s *Set) createChild(parent string, pkey int) (*Link, error) {
	p, err := s.main(parent)
	if err != nil {
		return nil, err
	}
	if err := checkPKey(pkey); err != nil {
		return nil, err
	}
	full := uint16(pkey) | member
	if p.PKey() == full || s.childOf(parent, full) != nil {
		return nil, fmt.Errorf("P_Key 0x%04x is in use: %w", full, unix.ENOTUNIQ)
	}
	return s.openLink(dev.ChildName(parent, uint16(pkey)), parent, true, full, p.port)
}

// childOf returns the child that CreateChild has made for a P_Key.
func (s *Set) childOf(parent string, full uint16) *Link {
	for _, l := range s.links {
		if l.Parent == parent && l.byKey && l.PKey() == full {
			return l
		}
	}
	return nil
}

// DeleteChild removes the child that CreateChild has made for pkey, with or
// without the full-member bit. The error is unix.ENODEV if there is none.
func (s *Set) DeleteChild(parent string, pkey int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, err := s.main(parent)
	if err == nil {
		err = checkPKey(pkey)
	}
	if err != nil {
		return fmt.Errorf("delete child of %s: %w", parent, err)
	}
	l := s.childOf(parent, uint16(pkey)|member)
	if l == nil {
		return fmt.Errorf("delete child of %s: none has the P_Key 0x%04x: %w", parent, pkey|member, unix.ENODEV)
	}
	return s.removeLink(l)
}

// AddLink makes a child of parent with a name. If pkey is 0 it gets the P_Key
// of the parent. Several children may have the same P_Key.
func (s *Set) AddLink(parent, name string, pkey int) (*Link, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l, err := s.addLink(parent, name, pkey)
	if err != nil {
		return nil, fmt.Errorf("add link %s: %w", name, err)
	}
	return l, nil
}

func (s *Set) addLink(parent, name string, pkey int) (*Link, error) {
	p, err := s.main(parent)
	if err != nil {
		return nil, err
	}
	if strings.Contains(name, "%") {
		return nil, fmt.Errorf("a name has no %%: %w", unix.EINVAL)
	}
	if pkey == 0 {
		pkey = int(p.PKey())
	}
	if err := checkPKey(pkey); err != nil {
		return nil, err
	}
	return s.openLink(name, parent, false, uint16(pkey)|member, p.port)
}

// DelLink removes a child made by CreateChild or AddLink. The error for a main
// interface is unix.EOPNOTSUPP: it stays as long as its port.
func (s *Set) DelLink(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	l, err := s.findLink(name)
	if err != nil {
		return fmt.Errorf("delete link: %w", err)
	}
	if l.Parent == "" {
		return fmt.Errorf("delete link %s: it is the main interface of its port: %w", name, unix.EOPNOTSUPP)
	}
	return s.removeLink(l)
}

func (s *Set) removeLink(l *Link) error {
	s.links = slices.DeleteFunc(s.links, func(o *Link) bool { return o == l })
	return l.Close()
}

// Close removes all interfaces, children first.
func (s *Set) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var err error
	for _, l := range slices.Backward(s.links) {
		err = errors.Join(err, l.Close())
	}
	s.links = nil
	return err
}
