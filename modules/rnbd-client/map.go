package client

import (
	"context"
	"crypto/rand"
	"fmt"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// MapRequest asks for a device.
type MapRequest struct {
	Path     string   // on the server
	Session  string   // name of the session; empty: made from host and address
	Paths    []string // to the server; may be empty for a session that is there
	Mode     blk.AccessMode
	Frontend string // name of a front end, see Config.Frontend, which empty means; "none": only NewIO
	Loss     Loss
	Name     string // empty: rnbdN
	Slots    int    // requests in flight; 0: Config.Slots
	Options  map[string]string
	// IOMode is the io plugin of the server that shall open the device, as
	// "fileio"; empty: the server chooses, as it does where it is a kernel.
	IOMode string

	// Port is that of paths which are added to the session by a control file;
	// 0: DefaultPort. PollQueues is shown and, as in the kernel, keeps a
	// session with any to one device; our pumps always poll.
	Port       uint16
	PollQueues int

	identity, location string // of a mapping of the last daemon; empty: a new one
	tuning             tuning // of a session of the last daemon
}

// Map opens the device on the server and gives it to the front end. The
// errors are those of the kernel's map_device: EEXIST, ENXIO, and what the
// server answers.
func (c *Client) Map(ctx context.Context, r MapRequest) (*Device, error) {
	c.mapMu.Lock()
	defer c.mapDone()
	ctx, cancel := context.WithTimeout(ctx, c.cfg.MapTimeout)
	defer cancel()
	if err := ctx.Err(); err != nil { // it was given up while others mapped
		return nil, fmt.Errorf("map %q: %w", r.Path, err)
	}
	d, err := c.prepare(ctx, r)
	if err != nil {
		return nil, fmt.Errorf("map %q: %w", r.Path, err)
	}
	fresh, err := c.join(ctx, d, r)
	if err != nil {
		return nil, fmt.Errorf("map %q: %w", r.Path, err)
	}
	if err := c.mapOn(ctx, d, r); err != nil {
		c.leave(context.WithoutCancel(ctx), d)
		if fresh {
			d.log.Info("session closed again", "session", d.session.name)
		}
		return nil, fmt.Errorf("map %q: %w", r.Path, err)
	}
	c.settle(d.identity)
	c.save()
	d.log.Info("device mapped", "path", d.path, "session", d.session.name, "size", d.Limits().Size, "mode", d.mode.String())
	return d, nil
}

// prepare checks what can be checked without the server.
func (c *Client) prepare(ctx context.Context, r MapRequest) (*Device, error) {
	d := &Device{client: c, path: r.Path, mode: r.Mode, loss: r.Loss, options: r.Options, ioMode: r.IOMode, pollQueues: r.PollQueues, identity: r.identity, location: r.location,
		shares: newShares(len(c.pumps)), latency: make([]stages, len(c.pumps))}
	if d.identity == "" {
		d.identity = rand.Text()
	}
	if err := c.checkWaiting(&r); err != nil {
		return nil, err
	}
	if r.Path == "" || len(r.Path) > 254 {
		return nil, fmt.Errorf("a device path has 1 to 254 characters: %w", syscall.EINVAL)
	}
	if _, err := c.addresses(ctx, r.Paths); err != nil { // also where a session is there
		return nil, err
	}
	index := -1
	for i := range c.devices {
		other := c.devices[i].Load()
		if other == nil && index < 0 && c.retired[uint32(i)] == nil && !c.lingers(uint32(i)) {
			index = i
		}
		if other != nil && other.name == r.Name {
			return nil, fmt.Errorf("the name %q is taken: %w", r.Name, syscall.EEXIST)
		}
	}
	if index < 0 {
		return nil, fmt.Errorf("%d devices are mapped already: %w", MaxDevices, syscall.ENOSPC)
	}
	d.index, d.name = uint32(index), r.Name
	if d.name == "" {
		d.name = "rnbd" + strconv.Itoa(index)
	}
	if strings.ContainsAny(d.name, "/\x00") {
		return nil, fmt.Errorf("device name %q has a slash: %w", d.name, syscall.EINVAL)
	}
	d.log = c.log.With("device", d.name)
	var err error
	d.choices, err = c.choose(r.Frontend)
	return d, err
}

// join finds or opens the session of r and enters d. fresh: it was opened.
func (c *Client) join(ctx context.Context, d *Device, r MapRequest) (fresh bool, err error) {
	name := r.Session
	if name == "" {
		if name, err = c.sessionName(r.Paths); err != nil {
			return false, err
		}
	}
	c.mu.Lock()
	s := c.sessions[name]
	c.mu.Unlock()
	switch {
	case s == nil && len(r.Paths) == 0:
		return false, fmt.Errorf("there is no session %q, and no path to open it: %w", name, syscall.ENXIO)
	case s == nil:
		if s, err = c.openSession(ctx, name, r); err != nil {
			return false, err
		}
		fresh = true
	case r.PollQueues > 0 || s.pollQueues > 0:
		return false, fmt.Errorf("session %q is there, and one with poll queues has no other device: %w", name, syscall.EINVAL)
	default:
		for _, other := range s.list() {
			if other.path == d.path {
				return false, fmt.Errorf("it is mapped as %s in session %q: %w", other.name, name, syscall.EEXIST)
			}
		}
	}
	d.session = s
	c.mu.Lock()
	c.sessions[name] = s
	s.devices = append(s.devices, d)
	s.divide()
	c.mu.Unlock()
	return fresh, nil
}

// sessionName makes a name that the server accepts (no "/" and no ".") from
// this host, this client and the first path: two clients of one host must not
// have the same, the server would refuse the second.
func (c *Client) sessionName(paths []string) (string, error) {
	if len(paths) == 0 {
		return "", fmt.Errorf("neither a session nor a path is named: %w", syscall.EINVAL)
	}
	p, err := parsePath(paths[0])
	if err != nil {
		return "", err
	}
	clean := strings.NewReplacer("/", "-", ".", "-")
	return clean.Replace(c.cfg.Hostname + "-" + c.token + "@" + verbs.AddrPortString(p.dst)), nil
}

// leave takes d out of its session and closes the session with the last.
func (c *Client) leave(ctx context.Context, d *Device) {
	c.mu.Lock()
	s := d.session
	for i, other := range s.devices {
		if other == d {
			s.devices = append(s.devices[:i], s.devices[i+1:]...)
			break
		}
	}
	s.divide()
	last := len(s.devices) == 0
	if last {
		delete(c.sessions, s.name)
	}
	c.mu.Unlock()
	if last {
		if err := s.close(ctx); err != nil {
			s.log.Warn("closing the session failed", "error", err)
		}
		c.ended.note(s.name)
	}
}

// mapOn opens d on its session and shows it to the front end.
func (c *Client) mapOn(ctx context.Context, d *Device, r MapRequest) (err error) {
	if !d.session.transport.Connected() {
		return fmt.Errorf("session %q has no path to the server: %w", d.session.name, syscall.ECONNABORTED)
	}
	d.session.opens.RLock()
	err = d.open(ctx)
	d.session.opens.RUnlock()
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			c.abandon(context.WithoutCancel(ctx), d)
		}
	}()
	slots := r.Slots
	if slots == 0 {
		slots = c.cfg.Slots
	}
	if err := d.makeArena(slots); err != nil {
		return err
	}
	d.mu.Lock()
	err = d.opened()
	d.mu.Unlock()
	if err != nil {
		return fmt.Errorf("open %q: %w", d.path, err)
	}
	c.devices[d.index].Store(d)
	return d.appear(ctx)
}

// abandon takes back what mapOn has begun. A front end may have sent requests
// already: their memory is not given back under them.
func (c *Client) abandon(ctx context.Context, d *Device) {
	epoch := d.end()
	err := d.drain(ctx, forcedClose)
	c.devices[d.index].Store(nil)
	d.sendClose(ctx, epoch, d.id.Load())
	if err != nil {
		c.retire(d, err)
		return
	}
	c.release(d)
}

// end makes d Unmapped: its requests fail, and no OPEN opens it any more. It
// returns the epoch in which the server has it open.
func (d *Device) end() (epoch uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.stopPatience()
	d.setState(Unmapped)
	d.setGate(gateFail)
	return d.openedIn
}

// Device finds a mapped device by its name or its node, or by its path on the server if
// only one has it.
func (c *Client) Device(name string) (*Device, error) {
	var found []*Device
	for _, d := range c.Devices() {
		if d.name == name || d.hasNode(name) {
			return d, nil
		}
		if d.path == name {
			found = append(found, d)
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return nil, fmt.Errorf("there is no device %q: %w", name, syscall.ENOENT)
	}
	return nil, fmt.Errorf("%d devices have the path %q, name one of them: %w", len(found), name, syscall.EINVAL)
}

// Unmap takes a device away: EBUSY while a user has it open, unless forced,
// EALREADY while another does the same.
func (c *Client) Unmap(ctx context.Context, name string, force bool) error {
	d, err := c.Device(name)
	if err == nil && d.State() == Unmapped {
		return fmt.Errorf("unmap %s: it is being unmapped: %w", d.name, syscall.EALREADY)
	}
	c.mapMu.Lock()
	defer c.mapDone()
	if d, err = c.Device(name); err != nil {
		if found, derr := c.drop(name, force); found {
			err = derr
		}
		if err == nil {
			return nil
		}
		return fmt.Errorf("unmap %q: %w", name, err)
	}
	if force {
		d.failRequests() // else the front end would wait for them
	}
	if fe := d.fe.Load(); fe != nil {
		if err := fe.remove(ctx, d, force); err != nil {
			return fmt.Errorf("unmap %s: %w", d.name, err)
		}
	}
	c.unmap(ctx, d)
	return nil
}

// failRequests lets all requests of d fail from now on.
func (d *Device) failRequests() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.stopPatience()
	d.needsRemap = true
	d.setGate(gateFail)
}

// forcedClose bounds what each step of an unmap waits for a server that is
// silent: the front end's last requests, ours, and CLOSE. Together they end
// within 5 s.
const forcedClose = 1200 * time.Millisecond

// unmap is the rest of an unmap, after the front end has let go of d. Caller
// holds mapMu.
func (c *Client) unmap(ctx context.Context, d *Device) {
	ctx = context.WithoutCancel(ctx)
	epoch := d.end()
	_ = d.drain(ctx, forcedClose)
	d.sendClose(ctx, epoch, d.id.Load())
	c.devices[d.index].Store(nil)
	c.save()
	c.leave(ctx, d) // a session that ends here ends its requests
	if err := d.held(); err != nil {
		c.retire(d, err)
		return
	}
	c.release(d)
	d.log.Info("device unmapped")
}

// release gives the memory of a device back that has no requests any more.
func (c *Client) release(d *Device) {
	d.vanish()
	d.freeArena()
}

// retire leaves the rest of an unmap to the end of the device's requests: a
// server may still write to its memory until it has answered, or its path is
// lost. Until then the device's number is not given to another. Holds mapMu.
func (c *Client) retire(d *Device, cause error) {
	d.log.Warn("device unmapped, its memory is kept until its requests have ended", "error", cause)
	c.retired[d.index] = d
	c.retiring.Add(1)
	go func() {
		defer c.retiring.Done()
		for d.drain(context.Background(), time.Minute) != nil {
		}
		if fe := d.fe.Load(); fe != nil {
			_ = fe.remove(context.Background(), d, true) // it has waited for the requests too
		}
		c.release(d)
		c.mapMu.Lock()
		delete(c.retired, d.index)
		c.mapDone()
		d.log.Info("requests of the unmapped device have ended")
	}()
}

// held tells what may still use the memory of d.
func (d *Device) held() error {
	if n := d.inflight(); n > 0 {
		return fmt.Errorf("%d requests have not ended: %w", n, syscall.ETIMEDOUT)
	}
	if fe := d.fe.Load(); fe != nil && fe.shows(d) {
		return fmt.Errorf("a new process of front end %s is being shown it: %w", fe.cfg.Name, syscall.ETIMEDOUT)
	}
	return nil
}

// drain waits until nothing uses the memory of d, at most for limit.
func (d *Device) drain(ctx context.Context, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		err := d.held()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(5 * time.Millisecond):
		}
	}
}
