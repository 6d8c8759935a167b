package rtrs

import (
	"fmt"
	"sync/atomic"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Region is memory registered with every device of a session, so that any
// path can carry it. The memory belongs to the caller and must stay mapped
// until Close.
type Region struct {
	session *Session
	mem     []byte
	// keys by device index. Replaced as a whole when a device is added;
	// the data path loads it once per request.
	keys atomic.Pointer[[]regionKey]
}

type regionKey struct {
	mr         verbs.MR
	addr       uint64
	lkey, rkey uint32
}

// Data names a piece of a Region; a nil Region is no data.
type Data struct {
	Region   *Region
	Off, Len int // bytes
}

// inRegion reports whether the piece lies inside its region.
func (d *Data) inRegion() bool {
	if d.Region == nil {
		return d.Len == 0
	}
	return d.Off >= 0 && d.Len >= 0 && d.Len <= len(d.Region.mem)-d.Off
}

// localElement is the piece as a local element for device dev.
func (d *Data) localElement(dev int) verbs.SGE {
	return verbs.SGE{Buf: d.Region.mem[d.Off : d.Off+d.Len], LKey: (*d.Region.keys.Load())[dev].lkey}
}

// Register makes mem usable for the requests of the session, on the devices
// of all its paths and of those added later. The server may write to it for
// as long as it is registered. Any goroutine.
func (s *Session) Register(mem []byte) (*Region, error) {
	if len(mem) == 0 {
		return nil, fmt.Errorf("rtrs: register memory for session %s: no bytes: %w", s.name, syscall.EINVAL)
	}
	r := &Region{session: s, mem: mem}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, fmt.Errorf("rtrs: register memory for session %s: %w: %w", s.name, ErrClosed, verbs.ErrClosed)
	}
	for _, d := range s.devices {
		if err := r.addDevice(d); err != nil {
			r.releaseKeys()
			return nil, fmt.Errorf("rtrs: register %d bytes for session %s: %w", len(mem), s.name, err)
		}
	}
	s.regions[r] = struct{}{}
	return r, nil
}

// addDevice registers the memory with one more device, in the order of their
// indices. The session's mu is held.
func (r *Region) addDevice(d *sessionDevice) error {
	mr, err := d.pd.RegMR(r.mem, verbs.AccessRemoteWrite)
	if err != nil {
		return fmt.Errorf("device %s: %w", d.dev.Info().Name, err)
	}
	var keys []regionKey
	if old := r.keys.Load(); old != nil {
		keys = append(keys, *old...)
	}
	keys = append(keys, regionKey{mr, mr.Addr(), mr.LKey(), mr.RKey()})
	r.keys.Store(&keys)
	return nil
}

// Bytes returns the registered memory.
func (r *Region) Bytes() []byte { return r.mem }

// Close ends the registration. No request may use the region any more. When
// Close returns, the memory is neither read nor written, not even by a server
// that continues to write to it or by a retransmission from it: the caller may
// unmap it. Any goroutine may call Close.
func (r *Region) Close() error {
	s := r.session
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.regions[r]; !ok {
		return nil
	}
	delete(s.regions, r)
	return r.releaseKeys()
}

func (r *Region) releaseKeys() error {
	keys := r.keys.Swap(nil)
	if keys == nil {
		return nil
	}
	var first error
	for _, k := range *keys {
		if err := k.mr.Close(); err != nil && first == nil {
			first = fmt.Errorf("rtrs: unregister memory: %w", err)
		}
	}
	return first
}

// sessionDevice is a device used by a session, with its protection domain.
// Devices stay until the session is closed.
type sessionDevice struct {
	dev   verbs.Device
	pd    verbs.PD
	index int // in Session.devices and in Region.keys
}

// deviceEntry returns the session's entry for dev, made if it is new: then all
// regions are registered on it before it returns.
func (s *Session) deviceEntry(dev verbs.Device) (*sessionDevice, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range s.devices {
		if d.dev == dev {
			return d, nil
		}
	}
	pd, err := dev.AllocPD()
	if err != nil {
		return nil, fmt.Errorf("device %s: %w", dev.Info().Name, err)
	}
	d := &sessionDevice{dev: dev, pd: pd, index: len(s.devices)}
	for r := range s.regions {
		if err := r.addDevice(d); err != nil {
			s.dropDevice(d)
			return nil, err
		}
	}
	s.devices = append(s.devices, d)
	return d, nil
}

// dropDevice undoes the registrations of a device that was not added.
func (s *Session) dropDevice(d *sessionDevice) {
	for r := range s.regions {
		keys := *r.keys.Load()
		if len(keys) <= d.index {
			continue
		}
		keys[d.index].mr.Close()
		short := keys[:d.index:d.index]
		r.keys.Store(&short)
	}
	d.pd.Close()
}
