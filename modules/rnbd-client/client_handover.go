package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// A client hands over to the next process of the daemon. The part of the one that
// leaves:
//
//	mayLeave       nothing is being mapped or unmapped, and all servers are there
//	roomForUsers   this process can hold the connections of users
//	releaseUsers   front ends give up the connections of users
//	settle         no request of a device without a disk is in flight any more
//	partDisks      front ends that cannot give up connections, and those with disks of
//	               the kernel, end as in a crash
//	settle         no request is in flight any more
//	depart         devices and sessions are closed on their servers
//	closeFabrics   the next process may have their addresses
//
// The first step that fails is the last one. TakeOver, by this client or by that of the
// next process, undoes all of it.

// Handover has the mappings of a client that leaves, for the next process, and the
// connections of its users. They are the holder's until Close.
type Handover struct {
	Devices int // with a server
	Closed  int // connections that could not be handed over
	// Kept are the mappings of the configuration that devices serve for, by the
	// devices' names, in the words of the program around the client.
	Kept map[string]string

	state handoverState
	conns []plugin.Connection
	files map[string]*mountedFile // by the identity of the mapping; those of from stay from's
	from  *Client                 // nil: another process
	early bool                    // the fabrics are open
}

// handoverState is the part of a Handover without descriptors.
type handoverState struct {
	Version   int             `json:"version"`
	Devices   []savedDevice   `json:"devices"`             // open on their servers
	Waiting   []savedDevice   `json:"waiting,omitempty"`   // disks without a server at the moment
	Leftovers []savedLeftover `json:"leftovers,omitempty"` // as in the state file

	Kept map[string]string `json:"kept,omitempty"`
	// Files are mounts of devices. An older process does not know them, and their
	// descriptors make it refuse the hand-over.
	Files []savedFile `json:"files,omitempty"`
}

// handoverVersion is that of handoverState.
const handoverVersion = 1

// State returns the part without descriptors, as JSON in one line, and Connections
// the rest.
func (h *Handover) State() ([]byte, error) {
	h.state.Kept, h.state.Files = h.Kept, saveFiles(h.files)
	return json.Marshal(&h.state)
}

// Connections returns the connections of users, and the descriptors of mounts in the same
// form. They stay h's.
func (h *Handover) Connections() []plugin.Connection {
	return slices.Concat(h.conns, fileConnections(h.files))
}

// Close closes the descriptors of the connections, and those of mounts that belong to h.
func (h *Handover) Close() {
	plugin.CloseConnections(h.conns)
	if h.from == nil {
		closeFiles(h.files)
	}
	h.conns, h.files = nil, nil
}

// ParseHandover is the reverse of State and Connections. It owns conns.
func ParseHandover(state []byte, conns []plugin.Connection) (*Handover, error) {
	h := &Handover{conns: conns}
	err := json.Unmarshal(state, &h.state)
	if err == nil && h.state.Version != handoverVersion {
		err = fmt.Errorf("the running process hands its devices over by version %d, this program knows %d: restart the daemon in place of upgrading it", h.state.Version, handoverVersion)
	}
	if err == nil {
		h.conns, h.files, err = splitFiles(h.state.Files, conns)
	}
	if err != nil {
		h.Close()
		return nil, fmt.Errorf("%w: %w", err, syscall.EPROTO)
	}
	h.Devices, h.Kept = len(h.state.Devices), h.state.Kept
	return h, nil
}

// idleTime is for requests in flight to end: those of users' connections, and then
// those of disks after the end of their front end.
const idleTime = time.Second

// undoHandOver ends a hand-over that has changed nothing.
func (c *Client) undoHandOver() {
	c.mapMu.Lock()
	defer c.mapDone()
	c.away = false
	c.requestSave()
}

// spareFiles are descriptors that a hand-over needs beside those of connections.
const spareFiles = 32

// roomForUsers returns an error if this process cannot open a descriptor for each
// connection of users: those without one would be closed.
func (c *Client) roomForUsers(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	need := spareFiles
	for _, f := range c.frontends {
		if h, _ := f.currentProcess(); h != nil {
			need += f.userCount(ctx, h)
		}
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return fmt.Errorf("descriptors of this process: %w", err)
	}
	if uint64(len(open)+need) > limit.Cur {
		return fmt.Errorf("this process may have %d descriptors and has %d, and the connections of users need %d more: raise its limit (LimitNOFILE=, ulimit -n) and restart it: %w",
			limit.Cur, len(open), need, syscall.EMFILE)
	}
	return nil
}

// mayLeave returns the reservations of all devices, and keeps them as they are from then on:
// nothing else is mapped or unmapped, and nothing is written to the state file.
func (c *Client) mayLeave(h *Handover) (places []*reservation, err error) {
	c.saving.Lock()
	defer c.saving.Unlock()
	c.mapMu.Lock()
	defer c.mapMu.Unlock()
	switch {
	case c.away:
		return nil, errAway
	case len(c.retired) > 0:
		return nil, fmt.Errorf("requests of an unmapped device have not ended: %w", syscall.EBUSY)
	}
	for _, f := range c.frontends {
		for _, a := range f.allAttachments() {
			if a.keepsIndex() {
				return nil, fmt.Errorf("device %s is being taken away: %w", a.spec.Name, syscall.EBUSY)
			}
		}
	}
	c.followSessions()
	waiting := slices.Clone(c.waiting)
	for _, p := range c.places {
		s, err := p.leavingRecord()
		switch {
		case err == nil:
			h.state.Devices = append(h.state.Devices, s)
		case errors.Is(err, errNoServer) && (isNode(s.Location) || p.d.fe.Load().cfg.MountDir != ""):
			waiting = append(waiting, s)
		default:
			return nil, err
		}
		places = append(places, p)
	}
	h.state.Waiting, h.state.Leftovers, h.Devices = waiting, c.leftoverRecords(), len(h.state.Devices)
	c.away = true
	for _, p := range places {
		p.beginWork(context.Background(), unmapping)
	}
	return places, nil
}

var errNoServer = fmt.Errorf("has no server now, and could not be opened again at once: %w", syscall.EBUSY)

// leavingRecord returns the record of a device for the next process. The caller holds mapMu.
func (p *reservation) leavingRecord() (savedDevice, error) {
	d := p.d
	if p.work != 0 || d.fe.Load() == nil {
		return savedDevice{}, fmt.Errorf("device %s is being mapped or unmapped: %w", d.name, syscall.EBUSY)
	}
	s := d.savedState()
	if d.State() != Open {
		return s, fmt.Errorf("device %s %w", d.name, errNoServer)
	}
	return s, nil
}

// releaseUsers has the front ends give up connections. A device that is used by them is
// not touched any more. After an error those that were given up are in h.
func (c *Client) releaseUsers(ctx context.Context, h *Handover) error {
	for _, f := range c.frontends {
		if err := f.releaseUsers(ctx, h); err != nil {
			return err
		}
	}
	return nil
}

func (f *frontend) releaseUsers(ctx context.Context, h *Handover) error {
	f.giving.Lock()
	defer f.giving.Unlock()
	f.hold = true // the next process of the front end does not get the sockets
	if len(f.sockets) == 0 && len(f.allAttachments()) == 0 {
		return nil
	}
	host, err := f.requireProcess()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	conns, closed, err := host.ReleaseConnections(ctx, idleTime)
	if blk.ToErrno(err) == blk.EOPNOTSUPP {
		f.parting.Store(true)
		if f.cfg.MountDir == "" { // users of mounts wait
			h.Closed += f.userCount(ctx, host)
		}
		return nil
	}
	if err != nil {
		return err
	}
	host.given = false
	h.conns, h.Closed = append(h.conns, conns...), h.Closed+closed
	return nil
}

// userCount returns the number of users of the devices that are no disks.
func (f *frontend) userCount(ctx context.Context, h *frontendProcess) (n int) {
	for _, a := range f.allAttachments() {
		st, err := h.DeviceStatus(ctx, a.index)
		if err == nil && !isNode(st.Location) {
			n += st.Openers
		}
	}
	return n
}

// partDisks ends the processes of front ends that have disks of the kernel, since it
// waits for the next ones, or that cannot give up the connections of their users.
func (c *Client) partDisks(ctx context.Context) {
	var parting sync.WaitGroup
	for _, f := range c.frontends {
		if f.parting.Load() {
			parting.Go(func() { f.killAndDrain(ctx) })
		}
	}
	parting.Wait()
}

// killAndDrain kills the process, and waits until its devices have none. The supervisor
// starts another one. That gets none of them.
func (f *frontend) killAndDrain(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, removeTime)
	defer cancel()
	if h, _ := f.currentProcess(); h != nil {
		h.Process.Kill()
		select {
		case <-h.parted:
		case <-ctx.Done():
		}
	}
	for _, a := range f.allAttachments() {
		a.setWant(wantLeft)
		a.awaitGone(ctx)
	}
}

// awaitIdle waits until no device has a request in flight.
func (c *Client) awaitIdle(ctx context.Context, places []*reservation) error {
	ctx, cancel := context.WithTimeout(ctx, idleTime)
	defer cancel()
	for {
		i := slices.IndexFunc(places, func(p *reservation) bool { return p.d.inFlight() > 0 })
		if i < 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("requests of device %s do not end within %s: %w", places[i].d.name, idleTime, syscall.EBUSY)
		case <-time.After(200 * time.Microsecond):
		}
	}
}

// noteClean records which devices have no acknowledged write that needs a flush. No
// request is in flight; a device that has one is left out.
func (h *handoverState) noteClean(places []*reservation) {
	clean := map[string]bool{}
	for _, p := range places {
		if d := p.d; d.inFlight() == 0 {
			d.mu.Lock()
			clean[d.identity] = !d.isDirty()
			d.mu.Unlock()
		}
	}
	for _, list := range [][]savedDevice{h.Devices, h.Waiting} {
		for i := range list {
			list[i].Clean = clean[list[i].Identity]
		}
	}
}

// closeDevices takes the devices from their front ends and closes them on their servers, and
// the sessions with them.
func (c *Client) closeDevices(ctx context.Context, places []*reservation) error {
	errs := make([]error, len(places))
	var departing sync.WaitGroup
	for i, p := range places {
		departing.Go(func() {
			if errs[i] = p.d.fe.Load().removeDevice(ctx, p.d, false); errs[i] != nil {
				c.endHandOver(p)
				return
			}
			p.d.leaves.Store(true)
			c.finishUnmap(ctx, p)
		})
	}
	departing.Wait()
	return errors.Join(errs...)
}

// endHandOver ends the hand-over of devices that stay mapped, of those that are there.
func (c *Client) endHandOver(places ...*reservation) {
	c.mapMu.Lock()
	defer c.mapMu.Unlock()
	for _, p := range places {
		if p.work != 0 {
			p.endWork()
		}
	}
}

// HandedOver ends the hand-over: another process serves. Names of sockets, mounts
// and the state file belong to it.
func (c *Client) HandedOver() {
	for id := range c.files.all() {
		c.files.take(id).channel.Close()
	}
	for _, f := range c.frontends {
		for i := range f.sockets {
			f.sockets[i].path = ""
		}
	}
}

// UserSocket is a socket where users connect.
type UserSocket struct {
	Arg     string // in FrontendConfig.Listen, see ListenArg; empty: another process made it
	Trusted bool
	file    *os.File
}

// UserSockets returns the sockets of all front ends.
func (c *Client) UserSockets() (all []UserSocket) {
	for _, f := range c.frontends {
		for i := range f.sockets {
			s := &f.sockets[i]
			all = append(all, UserSocket{Arg: s.arg, Trusted: s.trusted, file: s.file})
		}
	}
	return all
}

// Duplicate returns a duplicate. The caller owns it.
func (u *UserSocket) Duplicate() (f *os.File, err error) {
	raw, err := u.file.SyscallConn()
	if err != nil {
		return nil, err
	}
	cerr := raw.Control(func(fd uintptr) {
		var copied int
		if copied, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0); err == nil {
			f = os.NewFile(uintptr(copied), u.file.Name())
		}
	})
	return f, errors.Join(cerr, err)
}

// ListenArg returns an element of FrontendConfig.Listen without the mark behind the
// address.
func ListenArg(listen string) string { return strings.TrimSuffix(listen, trusted) }
