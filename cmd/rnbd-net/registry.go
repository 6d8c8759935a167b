package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/rnbd-go/rnbd/modules/ipoib/port"
	"github.com/rnbd-go/rnbd/modules/ipoib/registry"
)

// registryWait is the time for which a daemon waits for the registry when it
// starts.
const registryWait = 10 * time.Second

// useRegistry makes the client of a port. With askKey the main interface is in the
// first partition of the port's table.
func useRegistry(ctx context.Context, at string, askKey bool, cfg *port.Config) (*registry.Client, error) {
	server, err := netip.ParseAddrPort(withPort(at))
	if err != nil {
		return nil, usageError{fmt.Errorf("registry %q: want ADDRESS or ADDRESS:PORT: %w", at, err)}
	}
	c := registry.NewClient(registry.ClientConfig{Server: server, Local: cfg.Local, Logger: cfg.Logger})
	cfg.Registry = c
	if !askKey {
		return c, nil
	}
	ctx, cancel := context.WithTimeout(ctx, registryWait)
	defer cancel()
	pkeys, err := c.PKeys(ctx)
	if err == nil && len(pkeys) == 0 {
		err = fmt.Errorf("the registry gives the port %s no P_Key", cfg.Local)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("registry %s: %w; with --pkey the interface is made without it", at, err), c.Close())
	}
	cfg.PKey = pkeys[0]
	return c, nil
}

const partitionUsage = "a partition and the parameters of its link: `P_KEY[,qkey=N][,mtu=N][,scope=N][,sl=N][,rate=N][,hop-limit=N]`"

func newRegistry() *cobra.Command {
	c := &cobra.Command{Use: "registry", Short: "the registry of links, in the place of a subnet manager", Args: argCount(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	var listen string
	var partitions, ports []string
	run := &cobra.Command{
		Use:   "run [--listen ADDRESS:PORT] [--partition P_KEY,...] [--port ADDRESS=P_KEY,...]",
		Short: "serve the registry until SIGINT or SIGTERM",
		Long: `registry run knows the partitions, the ports and the members of the multicast
groups of links. Daemons that were started with --registry join groups there, and
need no list of peers. A daemon can have the registry itself: run --serve-registry.
It has no authentication: give it an address that none
but the hosts of the links can reach.`,
		Example: `  rnbd-net registry run --listen 10.0.0.1:4792 --partition 0xffff,mtu=4096 \
    --partition 0x8001 --port 10.0.0.3=0xffff,0x0001`,
		Args: argCount(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := registryConfig(partitions, ports)
			if err != nil {
				return usageError{err}
			}
			socket, _ := cmd.Flags().GetString("socket")
			return runRegistry(cmd.Context(), listen, registrySocket(socket), cfg)
		}}
	f := run.Flags()
	f.StringVar(&listen, "listen", net.JoinHostPort("127.0.0.1", strconv.Itoa(registry.Port)), "`address` to listen at")
	f.StringArrayVar(&partitions, "partition", []string{"0xffff"}, partitionUsage)
	f.StringArrayVar(&ports, "port", nil, "P_Key table of a port, the main interface's first: `ADDRESS=P_KEY,...`. A port without is a full member of all partitions")
	c.AddCommand(run, newRegistryShow())
	c.AddCommand(registryChanges()...)
	return c
}

// registryConfig parses the flags of registry run.
func registryConfig(partitions, ports []string) (cfg registry.Config, err error) {
	for _, s := range partitions {
		p, err := parsePartition(s)
		if err != nil {
			return cfg, fmt.Errorf("partition %q: %w", s, err)
		}
		cfg.Partitions = append(cfg.Partitions, p)
	}
	cfg.Ports = map[netip.Addr][]uint16{}
	for _, s := range ports {
		addr, keys, err := parsePort(s)
		if err != nil {
			return cfg, err
		}
		if keys != nil {
			cfg.Ports[addr] = keys
		}
	}
	_, err = registry.NewTable(cfg) // checks it
	return cfg, err
}

func parsePartition(s string) (p registry.Partition, err error) {
	key, rest, _ := strings.Cut(s, ",")
	k, err := parsePKey(key)
	if err != nil {
		return p, err
	}
	p.PKey = uint16(k)
	for o := range strings.SplitSeq(rest, ",") {
		if o == "" {
			continue
		}
		name, value, _ := strings.Cut(o, "=")
		n, err := strconv.ParseUint(value, 0, 31)
		if err != nil {
			return p, fmt.Errorf("%s: want NAME=NUMBER", o)
		}
		switch name {
		case "qkey":
			p.QKey = uint32(n)
		case "mtu":
			p.MTU = int(n)
		case "scope":
			if n > 15 {
				return p, fmt.Errorf("scope %d: want 1 to 15", n)
			}
			p.Scope = byte(n)
		case "sl":
			p.SL = int(n)
		case "rate":
			p.Rate = int(n)
		case "hop-limit":
			p.HopLimit = int(n)
		default:
			return p, fmt.Errorf("%s: want qkey, mtu, scope, sl, rate or hop-limit", name)
		}
	}
	return p, nil
}

// runRegistry serves a registry, and its control socket, until ctx is done.
func runRegistry(ctx context.Context, listen, socket string, cfg registry.Config) (err error) {
	log := daemonLog()
	s, err := listenRegistry(listen, cfg, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	mux := http.NewServeMux()
	registryRoutes(mux, func() *registry.Server { return s })
	control, err := serveAPI(socket, mux)
	if err != nil {
		return err
	}
	log.Info("registry is ready", "address", s.Addr(), "socket", socket)
	<-ctx.Done()
	return closeAPI(control)
}

// listenRegistry starts a registry.
func listenRegistry(listen string, cfg registry.Config, log *slog.Logger) (*registry.Server, error) {
	l, err := net.Listen("tcp", withPort(listen))
	if err != nil {
		return nil, fmt.Errorf("registry: %w", err)
	}
	s, err := registry.Serve(l, cfg, log)
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return s, nil
}

// withPort adds the port of a registry to an address without one.
func withPort(at string) string {
	if _, _, err := net.SplitHostPort(at); err != nil {
		return net.JoinHostPort(at, strconv.Itoa(registry.Port))
	}
	return at
}
