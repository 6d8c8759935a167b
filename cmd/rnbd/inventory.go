package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"path"
	"slices"
	"strings"
	"syscall"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/spell"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// device is a device of either side: mapped here, or opened by a client.
type device struct {
	name, path, node string // "rnbd0" or "disk.img", the name on the server, the node or file
	session, mode    string
	state            string
	hostname         string // of the other end
	rx, tx           uint64 // sectors
	limits           *controlpb.Limits
	mapped           *controlpb.ClientDevice    // nil: it is exported
	exported         *controlpb.ServerDevice    // nil: it is mapped
	use              *controlpb.ServerDeviceUse // of exported
}

// session is a session of either side.
type session struct {
	*controlpb.Session
	incoming bool
}

// transportPath is a path of either side.
type transportPath struct {
	*controlpb.Path
	incoming bool
	host     string // at the other end
}

// inventory is the set of the daemons' objects.
type inventory struct {
	devices  []device
	sessions []session
	paths    []transportPath
}

// look asks the daemons for everything, or for everything but the devices.
func (d *daemons) look(ctx context.Context, devices bool) (*inventory, error) {
	inv := &inventory{}
	if d.client != nil {
		if err := inv.addClient(ctx, d.client, devices); err != nil {
			return nil, err
		}
	}
	if d.server != nil {
		if err := inv.addServer(ctx, d.server, devices); err != nil {
			return nil, err
		}
	}
	return inv, nil
}

func (inv *inventory) addClient(ctx context.Context, c controlpb.ClientDaemonClient, devices bool) error {
	l, err := c.ListSessions(ctx, &controlpb.ListRequest{})
	if err != nil {
		return err
	}
	hosts := inv.addSessions(l, false)
	if !devices {
		return nil
	}
	list, err := c.ListDevices(ctx, &controlpb.ListRequest{})
	if err != nil {
		return err
	}
	for _, d := range list.Devices {
		inv.devices = append(inv.devices, mappedDevice(d, hosts[d.Session]))
	}
	return nil
}

func mappedDevice(d *controlpb.ClientDevice, host string) device {
	out := device{
		name: d.Name, path: d.Path, session: d.Session, mode: d.AccessMode, state: d.State, hostname: host,
		rx: d.RxSectors, tx: d.TxSectors, limits: d.Limits, mapped: d,
	}
	if strings.HasPrefix(d.Endpoint, "/") {
		out.node = d.Endpoint
	}
	return out
}

func (inv *inventory) addServer(ctx context.Context, s controlpb.ServerDaemonClient, devices bool) error {
	l, err := s.ListSessions(ctx, &controlpb.ListRequest{})
	if err != nil {
		return err
	}
	hosts := inv.addSessions(l, true)
	if !devices {
		return nil
	}
	list, err := s.ListDevices(ctx, &controlpb.ListRequest{})
	if err != nil {
		return err
	}
	first := len(inv.devices)
	for _, d := range list.Devices {
		for _, u := range d.Users {
			inv.devices = append(inv.devices, device{
				name: path.Base(d.Path), path: d.Name, node: d.Path, session: u.Session, mode: u.AccessMode, state: d.State,
				hostname: hosts[u.Session], rx: u.RxSectors, tx: u.TxSectors, limits: d.Limits, exported: d, use: u,
			})
		}
	}
	slices.SortStableFunc(inv.devices[first:], func(a, b device) int {
		return cmp.Or(strings.Compare(a.node, b.node), strings.Compare(a.session, b.session))
	})
	return nil
}

// addSessions enters sessions and their paths, and returns their hosts.
func (inv *inventory) addSessions(l *controlpb.SessionList, incoming bool) map[string]string {
	hosts := map[string]string{}
	slices.SortFunc(l.Sessions, func(a, b *controlpb.Session) int { return strings.Compare(a.Name, b.Name) })
	for _, s := range l.Sessions {
		hosts[s.Name] = s.Hostname
		inv.sessions = append(inv.sessions, session{s, incoming})
		for _, p := range s.Paths {
			inv.paths = append(inv.paths, transportPath{p, incoming, s.Hostname})
		}
	}
	return hosts
}

func (s session) transportPaths() (out []transportPath) {
	for _, p := range s.Paths {
		out = append(out, transportPath{p, s.incoming, s.Hostname})
	}
	return out
}

func connected(p *controlpb.Path) bool { return p.State == "connected" }

// direction of a session or a path.
func direction(incoming bool) string {
	if incoming {
		return "incoming"
	}
	return "outgoing"
}

// hostOf is an address without its port, as the text it was if it is none.
func hostOf(addr string) string {
	text, isGID := strings.CutPrefix(addr, "gid:")
	switch ap, err := netip.ParseAddrPort(text); {
	case err != nil:
		return addr
	case isGID:
		return "gid:" + ap.Addr().StringExpanded()
	case ap.Addr().Zone() != "":
		return "[" + ap.Addr().String() + "]"
	default:
		return ap.Addr().String()
	}
}

// pick finds the one of all that id names. The ways to name one are tried in
// their order; the first that fits any decides.
func pick[T named](kind, id string, all []T, ways ...func(T) bool) (T, error) {
	var none T
	for _, fits := range ways {
		var found []T
		for _, t := range all {
			if fits(t) {
				found = append(found, t)
			}
		}
		if len(found) == 1 {
			return found[0], nil
		}
		if len(found) > 1 {
			return none, fmt.Errorf("%q is %d %ss, say which: %s%w", id, len(found), kind, labels(found), errAmbiguous)
		}
	}
	var known []string
	for _, t := range all {
		known = append(known, t.key())
	}
	return none, notFound(kind, id, spell.Suggest(id, known))
}

// nodeName is the device's name where its node is given.
func nodeName(id string) string { return strings.TrimPrefix(id, "/dev/") }

// errAmbiguous is in the chain when a name is that of several objects.
var errAmbiguous = usageError{errors.New("")}

const maxNames = 5

func labels[T named](all []T) string {
	var names []string
	for _, t := range all[:min(len(all), maxNames)] {
		names = append(names, t.label())
	}
	if len(all) > maxNames {
		names = append(names, "...")
	}
	return strings.Join(names, ", ")
}

// named is an object that pick finds. key is its shortest name. label
// distinguishes it from others.
type named interface {
	key() string
	label() string
}

func (d device) key() string {
	if d.mapped != nil {
		return d.name
	}
	return d.path
}

func (d device) label() string {
	if d.mapped != nil {
		return d.name
	}
	return d.path + " of session " + d.session
}

func (s session) key() string   { return s.Name }
func (s session) label() string { return s.Name + " (" + direction(s.incoming) + ")" }

func (p transportPath) key() string   { return fmt.Sprintf("%s:%d", p.Session, p.Id) }
func (p transportPath) label() string { return p.key() + " (" + direction(p.incoming) + ")" }

// device finds a device by its name, its node, or its name on the server; if
// session is not empty, one of that session.
func (inv *inventory) device(id, session string) (device, error) {
	all := inv.devices
	if session != "" {
		all = slices.DeleteFunc(slices.Clone(all), func(d device) bool { return d.session != session })
	}
	dev, err := pick("device", id, all,
		func(d device) bool { return d.mapped != nil && (d.name == id || "/dev/"+d.name == id) },
		func(d device) bool { return d.node != "" && d.node == id },
		func(d device) bool { return d.mapped != nil && sameURI(d.mapped.Endpoint, id) },
		func(d device) bool { return d.path == id },
		func(d device) bool { return d.name == id })
	if err != nil && session != "" && isNotFound(err) {
		return dev, fmt.Errorf("session %q: %w", session, err)
	}
	return dev, err
}

// errAllIsOne is the error where "all" is the name of one object of a kind, and
// might mean every one.
func errAllIsOne(kind string) error {
	return hinted{usageError{fmt.Errorf("a %s is called %q, which means every %s: nothing was changed", kind, report.All, kind)},
		fmt.Sprintf("name what is meant; the %s called %q has another name in `rnbd list`", kind, report.All)}
}

// sameURI reports whether two texts are equal, or spell the same URI: in a query a
// slash may be escaped.
func sameURI(a, b string) bool {
	if a == b || !strings.Contains(a, "://") {
		return a == b
	}
	x, errX := url.Parse(a)
	y, errY := url.Parse(b)
	return errX == nil && errY == nil && x.Scheme == y.Scheme && x.Host == y.Host && x.Path == y.Path && x.Query().Encode() == y.Query().Encode()
}

// session finds a session by its name or by the host at its other end.
func (inv *inventory) session(id string) (session, error) {
	return pick("session", id, inv.sessions,
		func(s session) bool { return s.Name == id },
		func(s session) bool { return s.Hostname == id })
}

// path finds a path by [SESSION] PATH, where PATH is its number, its name, an
// address of it, or its HCA with or without the port; SESSION:NUMBER too.
func (inv *inventory) path(args []string) (transportPath, error) {
	id := args[len(args)-1]
	all := inv.paths
	if len(args) > 1 {
		s, err := inv.session(args[0])
		if err != nil {
			return transportPath{}, err
		}
		all = s.transportPaths()
	}
	return pick("path", strings.Join(args, " "), all,
		func(p transportPath) bool { return p.key() == id },
		func(p transportPath) bool { return len(args) > 1 && fmt.Sprint(p.Id) == id },
		func(p transportPath) bool { return p.Name == id },
		func(p transportPath) bool { return p.Dst == id || hostOf(p.Dst) == id },
		func(p transportPath) bool { return p.Src == id || hostOf(p.Src) == id },
		func(p transportPath) bool { return fmt.Sprintf("%s:%d", p.Device, p.HcaPort) == id },
		func(p transportPath) bool { return p.Device == id })
}

// isNotFound reports whether pick found nothing, rather than too much.
func isNotFound(err error) bool { return errors.Is(err, syscall.ENOENT) }

// table reads the chosen fields of objects. If both daemons answered, the
// direction distinguishes their objects.
func table[T any](c *call, n *noun, fields []report.Field[T], both bool, objects []T) (report.Table, error) {
	usual := n.usual(c.set)
	if n.number != "" && !c.Machine() {
		usual = slices.Insert(slices.Clone(usual), 1, n.number)
	}
	if c.Format == report.Wide {
		usual = slices.Concat(usual, n.wide)
	}
	if both {
		end := len(usual)
		if slices.Contains(usual, "endpoint") {
			end = slices.Index(usual, "endpoint")
		}
		usual = slices.Insert(slices.Clone(usual), end, "direction")
	}
	t, err := selected(c, n, fields, usual, objects)
	if err == nil && c.chosen == "" {
		rank(t.Columns, n.spare)
	}
	return t, err
}

// rank has narrow tables leave out the columns of fields, the first one first.
func rank(columns []report.Info, fields []string) {
	for i := range columns {
		if k := slices.Index(fields, columns[i].Name); k >= 0 {
			columns[i].Rank = len(fields) - k
		}
	}
}

func selected[T any](c *call, n *noun, fields []report.Field[T], usual []string, objects []T) (report.Table, error) {
	objects, err := arrange(c, fields, objects)
	if err != nil {
		return report.Table{}, err
	}
	chosen, err := report.Select(fields, usual, c.chosen)
	if err != nil {
		return report.Table{}, usageError{err}
	}
	return report.Build(n.plural, n.name, chosen, objects), nil
}
