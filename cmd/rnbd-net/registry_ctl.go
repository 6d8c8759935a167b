package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/ipoib/registry"
	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

// A registry is shown and changed over a control socket: that of the daemon that
// has it, or of "registry run".

// registryInfo describes a registry.
type registryInfo struct {
	Partitions []partitionInfo `json:"partitions"`
	Ports      []portInfo      `json:"ports"`
}

// partitionInfo describes a partition and the parameters of its link.
type partitionInfo struct {
	PKey     string `json:"pkey"`
	QKey     string `json:"qkey"`
	MTU      int    `json:"mtu"`
	Scope    int    `json:"scope"`
	SL       int    `json:"sl"`
	Rate     int    `json:"rate"`
	HopLimit int    `json:"hop_limit"`
}

// portInfo describes a port of a registry.
type portInfo struct {
	Addr   string   `json:"address"`
	GID    string   `json:"gid,omitempty"` // empty: not registered
	PKeys  []string `json:"pkeys"`
	Groups int      `json:"groups"`
}

// registryChange is a request to change a registry, with one of its fields.
type registryChange struct {
	Add string `json:"add,omitempty"` // a partition, in the form of the flag --partition
	Del string `json:"del,omitempty"` // a P_Key
	// Port has the P_Key table of a port, in the form ADDRESS=P_KEY,...; all in
	// the place of P_Keys removes it.
	Port string `json:"port,omitempty"`
}

// registryRoutes adds the requests about a registry to a control API. get
// returns the registry, nil if there is none.
func registryRoutes(mux *http.ServeMux, get func() *registry.Server) {
	serve := func(f func(s *registry.Server, r *http.Request) (any, error)) http.HandlerFunc {
		return jsonHandler(func(r *http.Request) (any, error) {
			s := get()
			if s == nil {
				return nil, fmt.Errorf("this daemon has no registry; give it --serve-registry: %w", unix.ENODEV)
			}
			return f(s, r)
		})
	}
	mux.HandleFunc("GET /registry", serve(func(s *registry.Server, _ *http.Request) (any, error) { return infoOfRegistry(s), nil }))
	mux.HandleFunc("PATCH /registry", serve(func(s *registry.Server, r *http.Request) (any, error) {
		var q registryChange
		if err := json.NewDecoder(http.MaxBytesReader(nil, r.Body, 64<<10)).Decode(&q); err != nil {
			return nil, fmt.Errorf("request: %w: %w", err, unix.EINVAL)
		}
		return struct{}{}, s.Change(q.applyTo)
	}))
}

func infoOfRegistry(s *registry.Server) registryInfo {
	info := registryInfo{Partitions: []partitionInfo{}, Ports: []portInfo{}}
	for _, p := range s.Config().Partitions {
		info.Partitions = append(info.Partitions, partitionInfo{fmt.Sprintf("0x%04x", p.PKey), fmt.Sprintf("0x%x", p.QKey), p.MTU, int(p.Scope), p.SL, p.Rate, p.HopLimit})
	}
	for _, p := range s.Ports() {
		i := portInfo{Addr: p.Addr.String(), PKeys: []string{}, Groups: p.Groups}
		if p.GID != (wire.GID{}) {
			i.GID = p.GID.String()
		}
		for _, k := range p.PKeys {
			i.PKeys = append(i.PKeys, fmt.Sprintf("0x%04x", k))
		}
		info.Ports = append(info.Ports, i)
	}
	return info
}

// applyTo changes a configuration.
func (q *registryChange) applyTo(c *registry.Config) error {
	switch {
	case q.Add != "":
		p, err := parsePartition(q.Add)
		if err != nil {
			return fmt.Errorf("partition %q: %w: %w", q.Add, err, unix.EINVAL)
		}
		c.Partitions = append(c.Partitions, p)
	case q.Del != "":
		k, err := parsePKey(q.Del)
		if err != nil {
			return fmt.Errorf("%w: %w", err, unix.EINVAL)
		}
		at := slices.IndexFunc(c.Partitions, func(p registry.Partition) bool { return int(p.PKey) == k|0x8000 })
		if at < 0 {
			return fmt.Errorf("there is no partition 0x%04x: %w", k|0x8000, unix.ENOENT)
		}
		if len(c.Partitions) == 1 {
			return fmt.Errorf("partition 0x%04x is the last one, and a registry has one: %w", k|0x8000, unix.EBUSY)
		}
		c.Partitions = slices.Delete(c.Partitions, at, at+1)
	case q.Port != "":
		addr, keys, err := parsePort(q.Port)
		if err != nil {
			return fmt.Errorf("%w: %w", err, unix.EINVAL)
		}
		if c.Ports == nil {
			c.Ports = map[netip.Addr][]uint16{}
		}
		c.Ports[addr] = keys
		if keys == nil {
			delete(c.Ports, addr)
		}
	default:
		return fmt.Errorf("request: nothing to change: %w", unix.EINVAL)
	}
	return nil
}

// parsePort parses ADDRESS=P_KEY,... and ADDRESS=all, without keys.
func parsePort(s string) (addr netip.Addr, keys []uint16, err error) {
	name, list, _ := strings.Cut(s, "=")
	if addr, err = netip.ParseAddr(name); err != nil {
		return addr, nil, fmt.Errorf("port %q: %w", s, err)
	}
	if list == "all" {
		return addr, nil, nil
	}
	for key := range strings.SplitSeq(list, ",") {
		k, err := parsePKey(key)
		if err == nil && k == 0x8000 {
			err = errors.New("P_Key 0x8000 names no partition")
		}
		if err != nil {
			return addr, nil, fmt.Errorf("port %q: %w", s, err)
		}
		if slices.Contains(keys, uint16(k)) {
			return addr, nil, fmt.Errorf("port %q: P_Key 0x%04x is there twice", s, k)
		}
		keys = append(keys, uint16(k))
	}
	return addr, keys, nil
}

// registrySocket returns the control socket of "registry run" for a control
// socket of the daemon: both may run on a host.
func registrySocket(socket string) string {
	return strings.TrimSuffix(socket, ".sock") + "-registry.sock"
}

// askRegistry sends a request to "registry run" or, if none runs here, to the
// daemon.
func askRegistry(cmd *cobra.Command, method string, body any) (io.ReadCloser, error) {
	socket, _ := cmd.Flags().GetString("socket")
	b, err := askAt(cmd, registrySocket(socket), method, "/registry", nil, body)
	if errors.Is(err, errNoDaemon) {
		b, err = askAt(cmd, socket, method, "/registry", nil, body)
	}
	return b, err
}

func newRegistryShow() *cobra.Command {
	return &cobra.Command{Use: "show", Aliases: []string{"list"}, Short: "show partitions and ports", Args: argCount(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			body, err := askRegistry(cmd, http.MethodGet, nil)
			if err != nil {
				return err
			}
			defer body.Close()
			var info registryInfo
			if err := json.NewDecoder(body).Decode(&info); err != nil {
				return err
			}
			return printResult(cmd, info, func(w io.Writer) error {
				var partitions, ports []string
				for _, p := range info.Partitions {
					partitions = append(partitions, fmt.Sprintf("%s\t%s\t%d\t%d\t%d\t%d\t%d", p.PKey, p.QKey, p.MTU, p.Scope, p.SL, p.Rate, p.HopLimit))
				}
				for _, p := range info.Ports {
					ports = append(ports, fmt.Sprintf("%s\t%s\t%d\t%s", p.Addr, strings.Join(p.PKeys, ","), p.Groups, p.GID))
				}
				err := printColumns(w, "P_Key\tQ_Key\tMTU\tScope\tSL\tRate\tHops", partitions)
				if err == nil && len(ports) > 0 {
					fmt.Fprintln(w)
					err = printColumns(w, "Port\tP_Keys\tGroups\tGID", ports)
				}
				return err
			})
		}}
}

// registryCommand returns a command that changes a registry.
func registryCommand(use, short, example string, n int, change func(a []string) registryChange) *cobra.Command {
	return &cobra.Command{Use: use, Short: short, Args: argCount(n, n), Example: example,
		RunE: func(cmd *cobra.Command, a []string) error {
			body, err := askRegistry(cmd, http.MethodPatch, change(a))
			if err != nil {
				return err
			}
			return body.Close()
		}}
}

func registryChanges() []*cobra.Command {
	return []*cobra.Command{
		registryCommand("add P_KEY[,mtu=N]...", "add a partition, in the form of the flag --partition of run", "  rnbd-net registry add 0x8001,mtu=4096", 1,
			func(a []string) registryChange { return registryChange{Add: a[0]} }),
		registryCommand("del P_KEY", "remove a partition: its interfaces lose their carrier until it is back", "", 1,
			func(a []string) registryChange { return registryChange{Del: a[0]} }),
		registryCommand("set ADDRESS P_KEY,...|all", "set the P_Key table of a port; all makes it a full member of all partitions",
			"  rnbd-net registry set 10.0.0.3 0xffff,0x0001", 2,
			func(a []string) registryChange { return registryChange{Port: a[0] + "=" + a[1]} }),
	}
}
