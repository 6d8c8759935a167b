package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/bond/carrier"
	"github.com/rnbd-go/rnbd/modules/bond/ctl"
	bond "github.com/rnbd-go/rnbd/modules/bond/dev"
	"github.com/rnbd-go/rnbd/modules/bond/frame"
	"github.com/rnbd-go/rnbd/modules/bond/tun"
	"github.com/rnbd-go/rnbd/modules/ipoib/dev"
	"github.com/rnbd-go/rnbd/modules/ipoib/port"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ctltree"
)

// bondSlave implements bond.Slave for an interface. It gives all received frames to
// the bond, so it has no filter. Its carrier is that of the interface of the
// port, too.
type bondSlave struct {
	*dev.Interface
	below *carrier.Link // nil: unknown
}

var _ interface {
	bond.Slave
	bond.PrefixUser
} = bondSlave{}

func (s bondSlave) Attrs() bond.Attrs {
	local, all := s.Address(), s.Broadcast()
	return bond.Attrs{Type: frame.InfiniBand, Address: bytes.Clone(local[:]), Broadcast: bytes.Clone(all[:]), HeaderLen: 24, MTU: s.MTU()}
}

func (s bondSlave) Speed() (int, bool)            { return 0, false }
func (s bondSlave) SetsAddress() bool             { return false }
func (s bondSlave) SetAddress([]byte) error       { return unix.EOPNOTSUPP }
func (s bondSlave) SetFilter(bond.RxFilter) error { return nil }
func (s bondSlave) Send(f []byte) error           { return s.SendFrame(f) }

func (s bondSlave) Carrier() bool {
	return s.Interface.Carrier() && (s.below == nil || s.below.On())
}

func (s bondSlave) Attach(c bond.Callbacks) {
	if s.below != nil {
		s.below.Notify(c.Changed)
	}
	s.Interface.Attach(dev.Above{Receive: c.Received})
}

func (s bondSlave) Detach() {
	if s.below != nil {
		s.below.Notify(nil)
	}
	s.Interface.Detach()
}

// portOf returns the address of an interface's port.
func portOf(i *dev.Interface) netip.Addr { return netip.AddrFrom16(i.Address().GID()).Unmap() }

// bondSet are the bonds over the interfaces of a set.
type bondSet struct {
	set  *port.Set
	net  *bond.Net
	tree ctl.Tree
	log  *slog.Logger

	mu    sync.Mutex
	below map[string]*carrier.Link // by name of an interface that net knows; nil: unknown
}

func newBonds(set *port.Set, log *slog.Logger) *bondSet {
	n := &bond.Net{Log: log, NewUpper: func(name string, c bond.UpperCallbacks) (bond.Upper, error) { return tun.Open(name, "", c) }}
	return &bondSet{set: set, net: n, tree: ctl.Tree{Net: n, Version: "rnbd-net"}, log: log, below: map[string]*carrier.Link{}}
}

// close removes all bonds.
func (b *bondSet) close() {
	b.net.Close()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range b.below {
		if c != nil {
			c.Close()
		}
	}
}

// addDevices lets the bonds know the interfaces that exist.
func (b *bondSet) addDevices() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, l := range b.set.Links() {
		if _, known := b.below[l.Name()]; known {
			continue
		}
		c, err := carrier.Open(portOf(l.Interface))
		if err != nil {
			b.log.Warn("the carrier below an interface is unknown", "name", l.Name(), "err", err)
		}
		b.below[l.Name()] = c
		if err := b.net.AddDevice(bondSlave{l.Interface, c}); err != nil {
			b.log.Warn("interface cannot be a slave", "name", l.Name(), "err", err)
		}
	}
}

// controlFile returns a control file of the bonds, nil if there is none. A write uses
// the interfaces that exist at that time.
func (b *bondSet) controlFile(path string) *ctl.File {
	f := b.tree.File(path)
	if f == nil || f.Write == nil {
		return f
	}
	return &ctl.File{Read: f.Read, Write: func(text string) error {
		b.addDevices()
		return f.Write(text)
	}}
}

// masterOf returns the name of the bond that an interface is a slave of.
func (b *bondSet) masterOf(link string) string {
	for _, x := range b.net.Bonds() {
		for _, s := range x.Status().Slaves {
			if s.Name == link {
				return x.Name()
			}
		}
	}
	return ""
}

// removeSlave removes an interface from the bonds before it is removed itself. The
// error is EBUSY if it is a slave.
func (b *bondSet) removeSlave(link string) error {
	if m := b.masterOf(link); m != "" {
		return fmt.Errorf("remove %s: it is a slave of %s; release it first: %w", link, m, unix.EBUSY)
	}
	b.net.RemoveDevice(link) // ENODEV: it never was one
	b.mu.Lock()
	defer b.mu.Unlock()
	if c := b.below[link]; c != nil {
		c.Close()
	}
	delete(b.below, link)
	return nil
}

// applySettings changes an interface. The mode and MTU of a slave are those of its
// bond: the error is EBUSY.
func (b *bondSet) applySettings(l *port.Link, s linkSettings) error {
	if m := b.masterOf(l.Name()); m != "" && (s.Mode != nil || s.MTU != nil) {
		return fmt.Errorf("change mode or MTU of %s: it is a slave of %s; release it first: %w", l.Name(), m, unix.EBUSY)
	}
	if s.Mode != nil {
		m, err := dev.ParseMode(*s.Mode)
		if err == nil {
			err = l.SetMode(m)
		}
		if err != nil {
			return err
		}
	}
	if s.MTU != nil {
		if err := l.SetMTU(*s.MTU); err != nil {
			return err
		}
	}
	if s.Umcast != nil {
		l.SetUmcast(*s.Umcast)
	}
	return nil
}

// treeNodes returns the control files of a folder.
func (b *bondSet) treeNodes(path string) ctltree.Node {
	if f := b.controlFile(path); f != nil {
		n := &ctltree.File{Show: f.Read}
		if f.Write != nil {
			n.Store = func(_ context.Context, data []byte) error { return f.Write(string(data)) }
		}
		return n
	}
	if b.tree.List(path) == nil {
		return nil
	}
	return ctltree.Listing{
		Names: func() []string { return b.tree.List(path) },
		Node:  func(name string) ctltree.Node { return b.treeNodes(path + "/" + name) },
	}
}

// bondInfo describes a bond in answers.
type bondInfo struct {
	Name   string   `json:"name"`
	Active string   `json:"active_slave,omitempty"`
	Slaves []string `json:"slaves"`
	MII    string   `json:"mii_status"`
	Text   string   `json:"text"` // as in /proc/net/bonding
}

// bondWrite is a request to write a text to a control file.
type bondWrite struct {
	File string `json:"file"`
	Text string `json:"text"`
}

func (s *apiServer) listBonds(r *http.Request) (any, error) {
	name := r.URL.Query().Get("name")
	out := []bondInfo{}
	for _, b := range s.bonds.net.Bonds() {
		if name != "" && b.Name() != name {
			continue
		}
		st := b.Status()
		info := bondInfo{Name: st.Name, Active: st.Active, Slaves: []string{}, MII: b.Show("mii_status"), Text: ctl.Proc(st, s.bonds.tree.Version)}
		for _, sl := range st.Slaves {
			info.Slaves = append(info.Slaves, sl.Name)
		}
		out = append(out, info)
	}
	if name != "" && len(out) == 0 {
		return nil, fmt.Errorf("bond %s: %w", name, unix.ENODEV)
	}
	return out, nil
}

func (s *apiServer) writeBond(r *http.Request) (any, error) {
	var q bondWrite
	if err := json.NewDecoder(http.MaxBytesReader(nil, r.Body, 3*ctl.MaxWrite)).Decode(&q); err != nil {
		return nil, fmt.Errorf("request: %w: %w", err, unix.EINVAL)
	}
	f := s.bonds.controlFile(q.File)
	if f == nil || f.Write == nil {
		return nil, fmt.Errorf("%s: there is no such bond, or it has no such option: %w", q.File, unix.ENOENT)
	}
	return struct{}{}, f.Write(q.Text)
}

func newBond() *cobra.Command {
	c := &cobra.Command{Use: "bond", Short: "active-backup bonds of interfaces", Args: argCount(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		Example: `  rnbd-net bond add bond0
  rnbd-net bond set bond0 arp_interval 100
  rnbd-net bond set bond0 arp_ip_target +192.168.50.2
  rnbd-net bond enslave bond0 ib0
  rnbd-net bond enslave bond0 ib1
  ip link set bond0 up && ip addr add 192.168.50.1/24 dev bond0
  rnbd-net bond show bond0`}
	c.AddCommand(newBondShow(),
		bondCommand("add NAME", "make a bond", 1, func(a []string) bondWrite { return bondWrite{"net/bonding_masters", "+" + a[0]} }),
		bondCommand("del NAME", "remove a bond", 1, func(a []string) bondWrite { return bondWrite{"net/bonding_masters", "-" + a[0]} }),
		bondCommand("enslave NAME LINK", "add a slave, which must be down", 2, func(a []string) bondWrite { return bondWrite{optionPath(a[0], "slaves"), "+" + a[1]} }),
		bondCommand("release NAME LINK", "give a slave back", 2, func(a []string) bondWrite { return bondWrite{optionPath(a[0], "slaves"), "-" + a[1]} }),
		bondCommand("set NAME OPTION VALUE", "set an option, by the name of its file in Linux", 3, func(a []string) bondWrite { return bondWrite{optionPath(a[0], a[1]), a[2]} }))
	return c
}

func optionPath(name, o string) string { return "net/" + name + "/bonding/" + o }

// bondCommand returns a command that writes a control file.
func bondCommand(use, short string, n int, write func(a []string) bondWrite) *cobra.Command {
	return &cobra.Command{Use: use, Short: short, Args: argCount(n, n),
		RunE: func(cmd *cobra.Command, a []string) error {
			body, err := callDaemon(cmd, http.MethodPost, "/bonds", nil, write(a))
			if err != nil {
				return err
			}
			return body.Close()
		}}
}

func newBondShow() *cobra.Command {
	return &cobra.Command{Use: "show [NAME]", Aliases: []string{"list"}, Short: "show bonds; one of them as /proc/net/bonding does", Args: argCount(0, 1),
		RunE: func(cmd *cobra.Command, a []string) error {
			list, err := fetchList[bondInfo](cmd, "/bonds", a)
			if err != nil {
				return err
			}
			return printResult(cmd, list, func(w io.Writer) error {
				if len(a) > 0 {
					_, err := io.WriteString(w, list[0].Text)
					return err
				}
				var rows []string
				for _, b := range list {
					rows = append(rows, fmt.Sprintf("%s\t%s\t%s\t%s", b.Name, b.MII, b.Active, strings.Join(b.Slaves, " ")))
				}
				return printColumns(w, "Bond\tMII\tActive\tSlaves", rows)
			})
		}}
}
