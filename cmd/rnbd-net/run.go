package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/rnbd-go/rnbd/modules/ipoib/dev"
	"github.com/rnbd-go/rnbd/modules/ipoib/port"
	"github.com/rnbd-go/rnbd/modules/ipoib/registry"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ctltree"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/rocev2"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// runOptions are the flags of run.
type runOptions struct {
	ports   []string
	pkey    string
	qkey    string
	linkMTU int
	mode    string
	device  string

	registry   string
	serve      string // address of a registry of the daemon's own
	partitions []string
	portKeys   []string

	askKey bool // no --pkey was given: the registry says it
	tree   string
	socket string
}

func newRun() *cobra.Command {
	var o runOptions
	c := &cobra.Command{
		Use:   "run --port ADDRESS=PEER,...",
		Short: "make the interfaces, and serve the other commands, until SIGINT or SIGTERM",
		Args:  argCount(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.socket, _ = cmd.Flags().GetString("socket")
			o.askKey = !cmd.Flags().Changed("pkey")
			return o.run(cmd.Context())
		},
	}
	f := c.Flags()
	f.StringArrayVar(&o.ports, "port", nil, "address of a port, and those of the other ports of its link: `ADDRESS=PEER,...`; once for each interface")
	f.StringVar(&o.registry, "registry", "", "registry of the links, `ADDRESS[:PORT]`: it says peers, P_Key, Q_Key and MTU; see registry run")
	f.StringVar(&o.serve, "serve-registry", "", "be the registry too, and listen at `ADDRESS[:PORT]`; --registry is that address then, unless it is given")
	f.StringArrayVar(&o.partitions, "partition", []string{"0xffff"}, "with --serve-registry: "+partitionUsage)
	f.StringArrayVar(&o.portKeys, "port-pkeys", nil, "with --serve-registry: P_Key table of a port: `ADDRESS=P_KEY,...`. A port without is a full member of all partitions")
	f.StringVar(&o.pkey, "pkey", "0xffff", "P_Key of the main interfaces")
	f.StringVar(&o.qkey, "qkey", "0xb1b", "Q_Key of the links")
	f.IntVar(&o.linkMTU, "link-mtu", 0, "MTU of the links in bytes, 4 more than that of the interfaces (default 2048, or what the network carries)")
	f.StringVar(&o.mode, "mode", "datagram", "mode of the main interfaces: datagram, connected")
	f.StringVar(&o.device, "device", "tun", "form of the interfaces: tun (type InfiniBand), tap (Ethernet, for DHCP and the kernel's bonding)")
	f.StringVar(&o.tree, "tree", "", "`folder` for control files, in the layout of /sys")
	return c
}

// portConfig parses ADDRESS=PEER,...
func portConfig(s string) (cfg port.Config, err error) {
	local, peers, _ := strings.Cut(s, "=")
	if cfg.Local, err = netip.ParseAddr(local); err != nil {
		return cfg, usageError{fmt.Errorf("port %q: %w", s, err)}
	}
	for p := range strings.SplitSeq(peers, ",") {
		if p == "" {
			continue
		}
		a, err := netip.ParseAddr(p)
		if err != nil {
			return cfg, usageError{fmt.Errorf("port %q: %w", s, err)}
		}
		cfg.Peers = append(cfg.Peers, a)
	}
	return cfg, nil
}

// portConfigs returns the configurations of all ports.
func (o *runOptions) portConfigs(log *slog.Logger) (out []port.Config, err error) {
	pkey, err1 := strconv.ParseUint(o.pkey, 0, 16)
	qkey, err2 := strconv.ParseUint(o.qkey, 0, 32)
	mode, err3 := dev.ParseMode(o.mode)
	if err := errors.Join(err1, err2, err3); err != nil {
		return nil, usageError{err}
	}
	if o.device != "tun" && o.device != "tap" {
		return nil, usageError{fmt.Errorf("device %q: want tun, of the type InfiniBand, or tap, of the type Ethernet; the kernel knows no other that works", o.device)}
	}
	if len(o.ports) == 0 {
		return nil, usageError{errors.New("no port: name one with --port ADDRESS=PEER,PEER")}
	}
	for _, s := range o.ports {
		cfg, err := portConfig(s)
		if err != nil {
			return nil, err
		}
		cfg.PKey, cfg.QKey, cfg.LinkMTU, cfg.Mode, cfg.Logger = uint16(pkey), uint32(qkey), o.linkMTU, mode, log
		cfg.Ethernet = o.device == "tap"
		out = append(out, cfg)
	}
	return out, nil
}

func (o *runOptions) run(ctx context.Context) (err error) {
	log := daemonLog()
	cfgs, err := o.portConfigs(log)
	if err != nil {
		return err
	}
	reg, err := o.ownRegistry(log)
	if err != nil {
		return err
	}
	if reg != nil {
		defer func() { err = errors.Join(err, reg.Close()) }()
	}
	set, trace := &port.Set{}, &dev.Trace{}
	var clients []*registry.Client
	defer func() {
		err = errors.Join(err, set.Close())
		for _, c := range clients {
			c.Close()
		}
	}()
	for i, cfg := range cfgs {
		d, err := rocev2.Open(rocev2.Config{Name: fmt.Sprintf("rocev2_%d", i), Addrs: []netip.Addr{cfg.Local}, Logger: log})
		if err != nil {
			return err
		}
		defer d.Close()
		cfg.Fabric, cfg.Trace = d.(verbs.DatagramDevice), trace
		if o.registry != "" {
			c, err := useRegistry(ctx, o.registry, o.askKey, &cfg)
			if err != nil {
				return err
			}
			clients = append(clients, c)
		}
		if _, err := set.AddPort(cfg); err != nil {
			return err
		}
	}
	b := newBonds(set, log)
	defer b.close()
	if o.tree != "" {
		kernel, err := openKernelNet()
		if err != nil {
			log.Warn("the control files have no interfaces but those of this daemon", "err", err)
		}
		defer kernel.Close()
		tree, err := ctltree.Mount(o.tree, treeOf(set, b, trace, kernel), ctltree.Options{Name: "rnbd-net", Logger: log})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, tree.Close()) }()
	}
	s, err := startServer(o.socket, set, b, reg)
	if err != nil {
		return err
	}
	log.Info("ready", "socket", o.socket)
	<-ctx.Done()
	return closeAPI(s.http)
}

// ownRegistry starts the registry of --serve-registry, and makes it that of the
// daemon. It is nil without the flag.
func (o *runOptions) ownRegistry(log *slog.Logger) (*registry.Server, error) {
	if o.serve == "" {
		return nil, nil
	}
	cfg, err := registryConfig(o.partitions, o.portKeys)
	if err != nil {
		return nil, usageError{err}
	}
	if o.registry == "" {
		o.registry = o.serve
	}
	return listenRegistry(o.serve, cfg, log)
}
