package loopback

import (
	"fmt"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

type loopDevice struct {
	net  *Network
	info verbs.Info

	// Guarded by net.mu.
	regions map[uint32]*memRegion // by index, the upper 24 bits of a key
	closed  bool
}

func (d *loopDevice) Info() verbs.Info { return d.info }

func (d *loopDevice) AllocPD() (verbs.PD, error) {
	if d.isClosed() {
		return nil, fmt.Errorf("allocate protection domain on %s: %w", d.info.Name, verbs.ErrClosed)
	}
	return &protDomain{dev: d}, nil
}

func (d *loopDevice) isClosed() bool {
	d.net.mu.Lock()
	defer d.net.mu.Unlock()
	return d.closed
}

// Close closes the listeners of the device and refuses new objects.
func (d *loopDevice) Close() error {
	n := d.net
	n.mu.Lock()
	defer n.mu.Unlock()
	d.closed = true
	for _, l := range n.listeners {
		if l.dev == d {
			l.close()
		}
	}
	return nil
}

// protDomain is a protection domain.
type protDomain struct {
	dev  *loopDevice
	uses int // regions and queue pairs; guarded by net.mu
}

func (p *protDomain) Close() error {
	p.dev.net.mu.Lock()
	defer p.dev.net.mu.Unlock()
	if p.uses > 0 {
		return fmt.Errorf("close protection domain of %s: %d regions and queue pairs left: %w", p.dev.info.Name, p.uses, syscall.EBUSY)
	}
	return nil
}

func (p *protDomain) RegMR(buf []byte, access verbs.Access) (verbs.MR, error) {
	if len(buf) == 0 {
		return nil, fmt.Errorf("register memory on %s: no bytes: %w", p.dev.info.Name, syscall.EINVAL)
	}
	n := p.dev.net
	n.mu.Lock()
	defer n.mu.Unlock()
	r := &memRegion{pd: p, buf: buf, access: access, addr: n.nextAddr, valid: true}
	r.first = n.nextIndex<<8 | firstKeyByte
	r.key = r.first
	n.nextIndex++
	n.nextAddr += (uint64(len(buf)) + 2*regionGap) &^ (regionGap - 1)
	p.dev.regions[r.first>>8] = r
	p.uses++
	return r, nil
}

const (
	// firstKeyByte lets a key wrap at its second rotation, so that every test
	// that rotates sees it.
	firstKeyByte = 0xfe
	// regionGap keeps the addresses of regions apart, and page aligned.
	regionGap = 4096
)

// memRegion is a registered memory region.
type memRegion struct {
	pd     *protDomain
	buf    []byte
	addr   uint64
	access verbs.Access
	first  uint32 // key at registration

	// Guarded by net.mu.
	key   uint32
	valid bool
}

func (r *memRegion) LKey() uint32 { return r.first }
func (r *memRegion) RKey() uint32 { return r.first }
func (r *memRegion) Addr() uint64 { return r.addr }
func (r *memRegion) Len() int     { return len(r.buf) }

func (r *memRegion) Close() error {
	r.pd.dev.net.mu.Lock()
	defer r.pd.dev.net.mu.Unlock()
	if r.pd.dev.regions[r.first>>8] != r {
		return fmt.Errorf("close memory region %#x: %w", r.first, verbs.ErrClosed)
	}
	delete(r.pd.dev.regions, r.first>>8)
	r.pd.uses--
	return nil
}

// reachMemory returns the n bytes at addr that the peer of a queue pair of pd may
// touch through key, or nil.
func (p *protDomain) reachMemory(key uint32, addr uint64, n int, need verbs.Access) []byte {
	r := p.dev.regions[key>>8]
	if r == nil || r.pd != p || !r.valid || r.key != key || r.access&need == 0 {
		return nil
	}
	if addr < r.addr || addr-r.addr > uint64(len(r.buf)) || uint64(n) > uint64(len(r.buf))-(addr-r.addr) {
		return nil
	}
	off := addr - r.addr
	return r.buf[off : off+uint64(n)]
}

// holdsBuffer reports whether buf is memory of the region of lkey. The key's low
// byte does not matter: local rights outlive rotations.
func (p *protDomain) holdsBuffer(lkey uint32, buf []byte) bool {
	if len(buf) == 0 {
		return true
	}
	r := p.dev.regions[lkey>>8]
	return r != nil && r.pd == p && containsSlice(r.buf, buf)
}

// invalidateKey makes key unreachable and reports whether it was reachable.
func (p *protDomain) invalidateKey(key uint32) bool {
	r := p.dev.regions[key>>8]
	if r == nil || r.pd != p || !r.valid || r.key != key {
		return false
	}
	r.valid = false
	return true
}

// registerKey makes the invalidated region of key's index reachable under key.
func (p *protDomain) registerKey(key uint32) bool {
	r := p.dev.regions[key>>8]
	if r == nil || r.pd != p || r.valid {
		return false
	}
	r.key, r.valid = key, true
	return true
}
