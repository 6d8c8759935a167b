package plugin

import (
	"context"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/names"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/pluginpb"
)

// OpenedDisk is the answer of a plugin that has opened a disk.
type OpenedDisk struct {
	Limits   blk.Limits
	Verifier []byte // incarnation of the storage, see Verifying; empty: not told
}

// OpenDisk does what OpenStorage does, and returns the limits alone.
func (p *Process) OpenDisk(ctx context.Context, r OpenRequest) (blk.Limits, error) {
	opened, err := p.OpenStorage(ctx, r)
	return opened.Limits, err
}

// OpenStorage opens a disk under r.Device. The plugin gets a copy of r.File. The
// file stays the caller's. Io plugins only.
func (p *Process) OpenStorage(ctx context.Context, r OpenRequest) (OpenedDisk, error) {
	what := fmt.Sprintf("open disk %d", r.Device)
	if err := p.awaitAbandoned(ctx, r.Device); err != nil {
		return OpenedDisk{}, p.failed(what, err)
	}
	req := &pluginpb.OpenDiskRequest{
		Device: r.Device, Name: names.Valid(r.Name), Mode: uint32(r.Mode), ReadOnly: r.ReadOnly, Generation: r.Generation,
	}
	if r.File != nil {
		token, err := p.sendFile(r.File)
		if err != nil {
			return OpenedDisk{}, p.failed(what, err)
		}
		req.Token = token
	}
	resp, err := p.disks.OpenDisk(ctx, req)
	if err != nil {
		if ctx.Err() != nil {
			p.abandon(r.Device)
		}
		return OpenedDisk{}, p.failed(what, err)
	}
	if n := len(resp.GetVerifier()); n > MaxVerifier {
		return OpenedDisk{}, p.failed(what, fmt.Errorf("its verifier has %d bytes, at most %d are possible: %w", n, MaxVerifier, syscall.EPROTO))
	}
	opened := OpenedDisk{Limits: limitsFromPB(resp.GetLimits()), Verifier: resp.GetVerifier()}
	if err := checkLimits(&opened.Limits); err != nil {
		p.abandon(r.Device)
		return OpenedDisk{}, p.failed(what, fmt.Errorf("%w: %w", err, syscall.EPROTO))
	}
	return opened, nil
}

// abandonTime bounds the clean-up of an open without a caller.
const abandonTime = 5 * time.Second

// abandon closes a disk after an open that may have succeeded after all. It
// does not wait; the next open of that index does.
func (p *Process) abandon(device uint32) {
	done := make(chan struct{})
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.abandoned == nil {
		p.abandoned = map[uint32]chan struct{}{}
	}
	p.abandoned[device] = done
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), abandonTime)
		defer cancel()
		_ = p.CloseDisk(ctx, device)
		p.mu.Lock()
		defer p.mu.Unlock()
		close(done)
		if p.abandoned[device] == done {
			delete(p.abandoned, device)
		}
	}()
}

// awaitAbandoned waits until no abandon of the index is under way: it would
// close the disk that is opened now.
func (p *Process) awaitAbandoned(ctx context.Context, device uint32) error {
	p.mu.Lock()
	done := p.abandoned[device]
	p.mu.Unlock()
	if done == nil {
		return nil
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// CloseDisk returns when no request of the disk is in flight and it is closed.
func (p *Process) CloseDisk(ctx context.Context, device uint32) error {
	_, err := p.disks.CloseDisk(ctx, &pluginpb.CloseDiskRequest{Device: device})
	return p.failed(fmt.Sprintf("close disk %d", device), err)
}

// ResizeDisk makes the plugin look at the backing store again, and returns
// the new limits.
func (p *Process) ResizeDisk(ctx context.Context, device uint32) (blk.Limits, error) {
	resp, err := p.disks.ResizeDisk(ctx, &pluginpb.ResizeDiskRequest{Device: device})
	l := limitsFromPB(resp.GetLimits())
	if err == nil {
		if bad := checkLimits(&l); bad != nil {
			err = fmt.Errorf("%w: %w", bad, syscall.EPROTO)
		}
	}
	return l, p.failed(fmt.Sprintf("resize disk %d", device), err)
}

// AddDevice makes a device appear. The arena s.ArenaID has been attached;
// s.Arena and s.Queues are not used. The plugin gets a copy of s.Channel; the
// file stays the caller's. Front-end plugins only, as all below.
func (p *Process) AddDevice(ctx context.Context, s DeviceSpec) error {
	what := fmt.Sprintf("add device %d", s.Index)
	r := &pluginpb.AddDeviceRequest{
		Index: s.Index, Name: s.Name, Limits: limitsToPB(s.Limits),
		Arena: s.ArenaID, SlotSize: uint32(s.SlotSize), Slots: uint32(s.Slots),
		Generation: s.Generation, Settings: s.Config,
		Identity: s.Identity, Location: s.Location,
	}
	if s.Channel != nil {
		token, err := p.sendFile(s.Channel)
		if err != nil {
			return p.failed(what, err)
		}
		r.Channel = token
	}
	_, err := p.front.AddDevice(ctx, r)
	return p.failed(what, err)
}

// RemoveDevice takes a device away; EBUSY while it is in use and force is not
// set.
func (p *Process) RemoveDevice(ctx context.Context, index uint32, force bool) error {
	_, err := p.front.RemoveDevice(ctx, &pluginpb.RemoveDeviceRequest{Index: index, Force: force})
	return p.failed(fmt.Sprintf("remove device %d", index), err)
}

// ResizeDevice tells the users of a device of its new limits.
func (p *Process) ResizeDevice(ctx context.Context, index uint32, limits blk.Limits) error {
	_, err := p.front.ResizeDevice(ctx, &pluginpb.ResizeDeviceRequest{Index: index, Limits: limitsToPB(limits)})
	return p.failed(fmt.Sprintf("resize device %d", index), err)
}

// AddListener gives the plugin a copy of a listening socket, to serve on.
func (p *Process) AddListener(ctx context.Context, name string, l *os.File) error {
	what := fmt.Sprintf("add listener %q", name)
	token, err := p.sendFile(l)
	if err != nil {
		return p.failed(what, err)
	}
	_, err = p.front.AddListener(ctx, &pluginpb.AddListenerRequest{Name: name, Token: token})
	return p.failed(what, err)
}

// SetTLS gives the plugin the means to serve its listeners by TLS. The error
// wraps EOPNOTSUPP if the plugin cannot.
func (p *Process) SetTLS(ctx context.Context, t TLS) error {
	r := &pluginpb.SetTLSRequest{
		Certificate: t.Certificate, PrivateKey: t.PrivateKey, ClientCa: t.ClientCA,
		Required: t.Required, Plain: t.Plain, ClientCrl: t.ClientCRL,
	}
	for _, rule := range t.Rules {
		r.Rules = append(r.Rules, &pluginpb.UserRule{Identity: rule.Identity, Device: rule.Device, Allow: rule.Allow})
	}
	done, err := p.front.SetTLS(ctx, r)
	if err == nil && t.picky() && !done.GetChecksUsers() {
		return fmt.Errorf("set TLS: %s %q: %w", p.c.Kind, p.c.Name, errNoChecks) // it was built before there was such a thing
	}
	return p.failed("set TLS", err)
}

// Openers is how many users have a device open.
func (p *Process) Openers(ctx context.Context, index uint32) (int, error) {
	st, err := p.DeviceStatus(ctx, index)
	return st.Openers, err
}

// DeviceStatus returns the front end's report about a device.
func (p *Process) DeviceStatus(ctx context.Context, index uint32) (DeviceStatus, error) {
	resp, err := p.front.DeviceStatus(ctx, &pluginpb.DeviceStatusRequest{Index: index})
	return DeviceStatus{Openers: int(resp.GetOpeners()), Location: resp.GetLocation()},
		p.failed(fmt.Sprintf("status of device %d", index), err)
}

func (p *Process) sendFile(f *os.File) (uint64, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return 0, err
	}
	var token uint64
	var serr error
	if err := raw.Control(func(fd uintptr) { token, serr = p.fds.send(int(fd)) }); err != nil {
		return 0, err
	}
	return token, serr
}
