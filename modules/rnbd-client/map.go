package client

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-client/internal/mapline"
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

	// AnyPath opens a session with the first path that works; the others connect
	// when they can. Else all have to work.
	AnyPath bool

	identity, location string // of a mapping of the last daemon; empty: a new one
	known              *known // of that mapping
	tuning             tuning // of a session of the last daemon
}

// Map opens the device on the server and gives it to the front end. The
// errors are those of the kernel's map_device: EEXIST, ENXIO, and what the
// server answers.
func (c *Client) Map(ctx context.Context, r MapRequest) (*Device, error) {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.MapTimeout)
	defer cancel()
	d, err := c.mapAt(ctx, r)
	if err != nil {
		return nil, fmt.Errorf("map %q: %w", r.Path, err)
	}
	d.log.Info("device mapped", "path", d.path, "session", d.session.name, "size", d.Limits().Size, "mode", d.mode.String())
	return d, nil
}

func (c *Client) mapAt(ctx context.Context, r MapRequest) (*Device, error) {
	d, err := c.prepare(ctx, r)
	if err != nil {
		return nil, err
	}
	session := r.Session
	if session == "" {
		if session, err = c.sessionName(r.Paths); err != nil {
			return nil, err
		}
	}
	ctx, p, err := c.take(ctx, d, session, &r)
	if err != nil {
		return nil, err
	}
	d.log = c.log.With("device", d.name)
	fresh, err := c.join(ctx, d, session, r)
	if err != nil {
		c.vacate(p)
		return nil, err
	}
	if err := c.mapOn(ctx, d, r); err != nil {
		if cause := context.Cause(ctx); errors.Is(cause, errForced) {
			err = cause
		}
		c.leave(context.WithoutCancel(ctx), d)
		c.vacate(p)
		if fresh {
			d.log.Info("session closed again", "session", session)
		}
		return nil, err
	}
	c.settled(p)
	return d, nil
}

// prepare checks what can be checked without the server.
func (c *Client) prepare(ctx context.Context, r MapRequest) (*Device, error) {
	d := &Device{client: c, log: c.log, name: r.Name, path: r.Path, mode: r.Mode, loss: r.Loss, options: r.Options, ioMode: r.IOMode, pollQueues: r.PollQueues,
		identity: r.identity, location: r.location, known: r.known,
		shares: newShares(len(c.pumps)), latency: make([]stages, len(c.pumps))}
	if d.identity == "" {
		d.identity = rand.Text()
	}
	c.mapMu.Lock()
	err := c.checkWaiting(&r)
	c.mapMu.Unlock()
	if err != nil {
		return nil, err
	}
	if r.Path == "" || len(r.Path) > 254 {
		return nil, fmt.Errorf("a device path has 1 to 254 characters: %w", syscall.EINVAL)
	}
	if _, err := c.addresses(ctx, r.Paths); err != nil { // also where a session is there
		return nil, err
	}
	if strings.ContainsAny(d.name, "/\x00") {
		return nil, fmt.Errorf("device name %q has a slash: %w", d.name, syscall.EINVAL)
	}
	d.choices, err = c.choose(r.Frontend)
	return d, err
}

// join finds or opens the session of that name and enters d. fresh: it was opened.
// Maps wait for the one that opens their session, or closes the last of that name.
func (c *Client) join(ctx context.Context, d *Device, name string, r MapRequest) (fresh bool, err error) {
	changed, err := c.joinOpen(d, name, r)
	for ; changed != nil; changed, err = c.joinOpen(d, name, r) {
		select {
		case <-changed:
		case <-ctx.Done():
			return false, fmt.Errorf("session %q is being opened or closed: %w", name, context.Cause(ctx))
		}
	}
	if err != nil || d.session != nil {
		return false, err
	}
	s, err := c.openSession(ctx, name, r)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil {
		d.session, s.devices = s, []*Device{d}
		s.divide()
		c.sessions[name] = s
	}
	c.endChange(name)
	return err == nil, err
}

// joinOpen enters d in the session of that name. Without one it marks the name: the
// caller opens it and ends the mark by endChange. If the name is marked already, it
// returns what is closed at the end of that.
func (c *Client) joinOpen(d *Device, name string, r MapRequest) (changed <-chan struct{}, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s, changing := c.sessions[name], c.changing[name]
	switch {
	case changing != nil:
		return changing, nil
	case s == nil && len(r.Paths) == 0:
		return nil, fmt.Errorf("there is no session %q, and no path to open it: %w", name, syscall.ENXIO)
	case s == nil:
		c.changing[name] = make(chan struct{})
		return nil, nil
	case r.PollQueues > 0 || s.pollQueues > 0:
		return nil, fmt.Errorf("session %q is there, and one with poll queues has no other device: %w", name, syscall.EINVAL)
	}
	d.session, s.devices = s, append(s.devices, d)
	s.divide()
	return nil, nil
}

// endChange ends the mark of a name that joinOpen or leave has set. Caller holds mu.
func (c *Client) endChange(name string) {
	close(c.changing[name])
	delete(c.changing, name)
}

// sessionName makes a name that the server accepts (no "/" and no ".") from
// this host, this client and the first path: two clients of one host must not
// have the same, the server would refuse the second.
func (c *Client) sessionName(paths []string) (string, error) {
	if len(paths) == 0 {
		return "", fmt.Errorf("neither a session nor a path is named: %w", syscall.EINVAL)
	}
	p, err := mapline.ParsePath(paths[0])
	if err != nil {
		return "", err
	}
	clean := strings.NewReplacer("/", "-", ".", "-")
	return clean.Replace(c.cfg.Hostname + "-" + c.token + "@" + verbs.AddrPortString(p.Dst)), nil
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
		c.changing[s.name] = make(chan struct{})
	}
	c.mu.Unlock()
	if !last {
		return
	}
	if err := s.close(ctx); err != nil {
		s.log.Warn("closing the session failed", "err", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended.note(s.name)
	c.endChange(s.name)
}

// mapOn opens d on its session and shows it to the front end.
func (c *Client) mapOn(ctx context.Context, d *Device, r MapRequest) (err error) {
	if !d.session.transport.Connected() {
		return fmt.Errorf("session %q has no path to the server: %w", d.session.name, syscall.ECONNABORTED)
	}
	defer d.session.awaitOpen(d)()
	if err = d.open(ctx); err != nil {
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

// Unmap takes a device away: EBUSY while a user has it open, or it is being mapped,
// unless forced; EALREADY while another does the same.
func (c *Client) Unmap(ctx context.Context, name string, force bool) error {
	ctx, p, err := c.claim(ctx, name, force)
	switch {
	case errors.Is(err, syscall.ENOENT), err == errGivenUp:
		if found, derr := c.dropWaiting(name, force); found || err == errGivenUp {
			err = derr
		}
	case err == nil:
		err = c.unmapAt(ctx, p, force)
	}
	if err != nil {
		return fmt.Errorf("unmap %q: %w", name, err)
	}
	return nil
}

func (c *Client) dropWaiting(name string, force bool) (found bool, err error) {
	c.mapMu.Lock()
	defer c.mapDone()
	return c.drop(name, force)
}

// unmapAt is the unmap of what was claimed. If the front end does not let go of it,
// it stays mapped.
func (c *Client) unmapAt(ctx context.Context, p *place, force bool) error {
	if force {
		p.d.failRequests() // else the front end would wait for them
	}
	if fe := p.d.fe.Load(); fe != nil {
		if err := fe.remove(ctx, p.d, force); err != nil {
			c.mapMu.Lock()
			defer c.mapDone()
			p.end()
			return err
		}
	}
	c.unmap(ctx, p)
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

// unmap is the rest of an unmap, after the front end has let go of the device.
func (c *Client) unmap(ctx context.Context, p *place) {
	d := p.d
	ctx = context.WithoutCancel(ctx)
	epoch := d.end()
	_ = d.drain(ctx, forcedClose)
	d.sendClose(ctx, epoch, d.id.Load())
	c.devices[d.index].Store(nil)
	c.forgetDisk()
	c.leave(ctx, d) // a session that ends here ends its requests
	if err := d.held(); err != nil {
		c.retire(d, err)
	} else {
		c.release(d)
		d.log.Info("device unmapped")
	}
	c.vacate(p)
}

// forgetDisk writes down that a device is gone, before its session is.
func (c *Client) forgetDisk() {
	c.mapMu.Lock()
	defer c.mapDone()
	c.save()
}

// release gives the memory of a device back that has no requests any more.
func (c *Client) release(d *Device) {
	d.vanish()
	d.freeArena()
}

// retire leaves the rest of an unmap to the end of the device's requests: a
// server may still write to its memory until it has answered, or its path is
// lost. Until then the device's number is not given to another. The caller vacates
// its place afterwards.
func (c *Client) retire(d *Device, cause error) {
	d.log.Warn("device unmapped, its memory is kept until its requests have ended", "err", cause)
	c.mapMu.Lock()
	c.retired[d.index] = d
	c.retiring.Add(1)
	c.mapDone()
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
