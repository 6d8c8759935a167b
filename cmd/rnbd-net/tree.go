package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/ipoib/cm"
	"github.com/rnbd-go/rnbd/modules/ipoib/dev"
	"github.com/rnbd-go/rnbd/modules/ipoib/ether"
	"github.com/rnbd-go/rnbd/modules/ipoib/mcast"
	"github.com/rnbd-go/rnbd/modules/ipoib/path"
	"github.com/rnbd-go/rnbd/modules/ipoib/port"
	"github.com/rnbd-go/rnbd/modules/ipoib/tun"
	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ctltree"
)

// treeOf returns the control files of the interfaces, by their paths below
// /sys. What the kernel has besides is in class/net, too.
func treeOf(set *port.Set, b *bondSet, trace *dev.Trace, kernel *kernelNet) map[string]ctltree.Node {
	return map[string]ctltree.Node{
		"module/ib_ipoib/parameters": moduleParameters(trace),
		"class/net": ctltree.Listing{
			Names: func() []string {
				out := append(namesWithSuffix(set, ""), "bonding_masters")
				for _, x := range b.net.Bonds() {
					out = append(out, x.Name())
				}
				for _, name := range kernel.names() {
					if !slices.Contains(out, name) {
						out = append(out, name)
					}
				}
				return out
			},
			Node: func(name string) ctltree.Node {
				if l, err := set.Link(name); err == nil {
					return kernel.with(name, linkFiles(set, b, l))
				}
				if n := b.treeNodes("net/" + name); n != nil {
					return kernel.with(name, n)
				}
				return kernel.link(name)
			},
		},
		"proc/net/bonding": ctltree.Listing{
			Names: func() []string { return b.tree.List("proc/net/bonding") },
			Node:  func(name string) ctltree.Node { return b.treeNodes("proc/net/bonding/" + name) },
		},
		"kernel/debug/ipoib": ctltree.Listing{
			Names: func() []string { return append(namesWithSuffix(set, "_mcg"), namesWithSuffix(set, "_path")...) },
			Node:  func(file string) ctltree.Node { return debugFile(set, file) },
		},
	}
}

// moduleParameters returns the files of the module's parameters. data_debug_level is
// there in builds with the trace of the data path only, as in Linux.
func moduleParameters(trace *dev.Trace) ctltree.Fixed {
	files := ctltree.Fixed{
		"debug_level": levelFile(&trace.Level), "mcast_debug_level": levelFile(&trace.Mcast),
		"send_queue_size": constantFile(dev.SendQueue), "recv_queue_size": constantFile(dev.RecvQueue), "max_nonsrq_conn_qp": constantFile(cm.MaxPassive),
	}
	if dev.DataTrace {
		files["data_debug_level"] = levelFile(&trace.Data)
	}
	return files
}

// constantFile returns a file with a constant.
func constantFile(v any) *ctltree.File { return ctltree.Text(func() string { return fmt.Sprint(v) }) }

// debugFile returns a file about the groups or paths of an interface.
func debugFile(set *port.Set, file string) ctltree.Node {
	at := strings.LastIndexByte(file, '_')
	if at < 0 {
		return nil
	}
	l, err := set.Link(file[:at])
	if err != nil {
		return nil
	}
	switch file[at:] {
	case "_mcg":
		return &ctltree.File{Show: func() (string, error) {
			var b strings.Builder
			err := mcast.Write(&b, l.Groups(), jiffiesSince)
			return b.String(), err
		}}
	case "_path":
		return &ctltree.File{Show: func() (string, error) {
			var b strings.Builder
			err := path.Write(&b, l.Paths())
			return b.String(), err
		}}
	}
	return nil
}

// levelFile returns a file with a number that can be changed.
func levelFile(level *atomic.Int32) *ctltree.File {
	return &ctltree.File{
		Show: func() (string, error) { return fmt.Sprintf("%d\n", level.Load()), nil },
		Store: func(_ context.Context, data []byte) error {
			v, err := strconv.ParseInt(ctltree.Word(data), 0, 32)
			if err != nil {
				return unix.EINVAL
			}
			level.Store(int32(v))
			return nil
		},
	}
}

func namesWithSuffix(set *port.Set, suffix string) (out []string) {
	for _, l := range set.Links() {
		out = append(out, l.Name()+suffix)
	}
	return out
}

// linkFiles returns the files of one interface. A link that was made by name
// has no files of partitions, as in Linux.
func linkFiles(set *port.Set, b *bondSet, l *port.Link) ctltree.Fixed {
	files := ctltree.Fixed{
		"type": constantFile(tun.TypeInfiniBand), "addr_len": constantFile(wire.AddressLen),
		"address": constantFile(l.Address()), "broadcast": constantFile(l.Broadcast()), "mtu": constantFile(l.MTU()),
		"statistics": statisticsFiles(l.Interface),
	}
	if mac, ok := l.MAC(); ok {
		files["type"], files["addr_len"] = constantFile(tun.TypeEthernet), constantFile(len(mac))
		files["address"], files["broadcast"] = constantFile(mac), constantFile(ether.Broadcast)
	}
	files["ipoib"] = featureFiles(l.Interface)
	if n := b.treeNodes("net/" + l.Name() + "/bonding_slave"); n != nil {
		files["bonding_slave"] = n
	}
	if l.Parent != "" && !l.ByKey() {
		return files
	}
	files["pkey"] = constantFile(fmt.Sprintf("0x%04x", l.PKey()))
	files["mode"] = &ctltree.File{Show: func() (string, error) { return l.Mode().String() + "\n", nil }, Store: func(_ context.Context, data []byte) error {
		word := ctltree.Word(data)
		return b.applySettings(l, linkSettings{Mode: &word})
	}}
	files["umcast"] = &ctltree.File{Show: func() (string, error) { return map[bool]string{false: "0\n", true: "1\n"}[l.Umcast()], nil }, Store: func(_ context.Context, data []byte) error {
		v, err := strconv.ParseInt(ctltree.Word(data), 0, 32)
		if err != nil {
			return unix.EINVAL
		}
		l.SetUmcast(v > 0)
		return nil
	}}
	if l.Parent != "" {
		files["parent"] = constantFile(l.Parent)
		return files
	}
	files["create_child"] = pkeyFile(func(pkey int) error { _, err := set.CreateChild(l.Name(), pkey); return err })
	files["delete_child"] = pkeyFile(func(pkey int) error {
		for _, c := range set.Links() {
			if c.Parent == l.Name() && c.ByKey() && int(c.PKey()) == pkey|0x8000 {
				if err := b.removeSlave(c.Name()); err != nil {
					return err
				}
			}
		}
		return set.DeleteChild(l.Name(), pkey)
	})
	return files
}

// pkeyFile returns a file for writing a P_Key to.
func pkeyFile(f func(pkey int) error) *ctltree.File {
	return &ctltree.File{Store: func(_ context.Context, data []byte) error {
		v, err := strconv.ParseInt(ctltree.Word(data), 0, 32)
		if err != nil {
			return unix.EINVAL
		}
		return f(int(v))
	}}
}

func statisticsFiles(i *dev.Interface) ctltree.Fixed {
	file := func(get func(s dev.Stats) uint64) *ctltree.File {
		return ctltree.Text(func() string { return fmt.Sprint(get(i.Stats())) })
	}
	return ctltree.Fixed{
		"rx_packets":        file(func(s dev.Stats) uint64 { return s.RxPackets }),
		"rx_bytes":          file(func(s dev.Stats) uint64 { return s.RxBytes }),
		"rx_dropped":        file(func(s dev.Stats) uint64 { return s.RxDropped + s.RxUnknownType }),
		"multicast":         file(func(s dev.Stats) uint64 { return s.Multicast }),
		"tx_packets":        file(func(s dev.Stats) uint64 { return s.TxPackets }),
		"tx_bytes":          file(func(s dev.Stats) uint64 { return s.TxBytes }),
		"tx_dropped":        file(func(s dev.Stats) uint64 { return s.TxDropped }),
		"tx_errors":         file(func(s dev.Stats) uint64 { return s.TxErrors }),
		"pmtu_sent":         file(func(s dev.Stats) uint64 { return s.PMTUSent }),
		"rx_joined":         file(func(s dev.Stats) uint64 { return s.RxJoined }),
		"rx_wakeups":        file(func(s dev.Stats) uint64 { return s.RxWakeups }),
		"rx_qkey_violation": file(func(s dev.Stats) uint64 { return s.Fabric.QKey }),
		"rx_unknown_type":   file(func(s dev.Stats) uint64 { return s.RxUnknownType }),
		"rx_malformed":      file(func(s dev.Stats) uint64 { return s.Neigh.Malformed }),
		"rx_spoofed":        file(func(s dev.Stats) uint64 { return s.Neigh.Spoofed }),
		"rx_conflicts":      file(func(s dev.Stats) uint64 { return s.Neigh.Conflicts }),
		"cm_bad_requests":   file(func(s dev.Stats) uint64 { return s.Conns.BadRequests }),
		"cm_crowded":        file(func(s dev.Stats) uint64 { return s.Conns.Crowded }),
		"rx_pkey_violation": file(func(s dev.Stats) uint64 { return s.Fabric.PKey }),
	}
}
