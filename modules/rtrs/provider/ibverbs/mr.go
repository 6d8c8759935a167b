//go:build linux && cgo && ibverbs

package ibverbs

// #include <stdlib.h>
// #include "lib.h"
import "C"

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// pd implements verbs.PD.
type pd struct {
	dev *Device
	c   *cPD

	windows [windowBuckets]atomic.Pointer[[]*memoryWindow] // replaced under mu

	mu      sync.Mutex
	regions []*memoryRegion
	loop    *cLoop // binds new windows; nil: there are none yet
}

// windowBuckets spread the windows by the index in their keys.
const windowBuckets = 1 << 10

// memoryRegion is memory that the library has registered. It keeps buf from the
// garbage collector.
type memoryRegion struct {
	c    *cMR
	buf  []byte
	refs int // MRs that use it, guarded by pd.mu
}

// memoryWindow is a part of a region under a key of its own that changes.
type memoryWindow struct {
	index uint32 // upper 24 bits of its keys
	c     *cWindow
}

// AllocPD implements verbs.Device.
func (d *Device) AllocPD() (verbs.PD, error) {
	p := &pd{dev: d}
	if err := errnoOf(C.rv_alloc_pd(d.ctx, &p.c)); err != nil {
		return nil, fmt.Errorf("allocate protection domain on %s: %w", d.info.Name, err)
	}
	return p, nil
}

// RegMR implements verbs.PD. Memory of a region under changing keys is locked
// once, also when it is registered as a whole before.
func (p *pd) RegMR(buf []byte, access verbs.Access) (verbs.MR, error) {
	if len(buf) == 0 {
		return nil, errors.New("register memory: empty buffer")
	}
	if access&verbs.AccessRotate != 0 && p.dev.info.Caps&verbs.CapKeyRotation == 0 {
		return nil, fmt.Errorf("register memory on %s under changing keys: %w", p.dev.info.Name, verbs.ErrUnsupported)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	m := &mr{pd: p, buf: buf}
	if access&verbs.AccessRotate == 0 {
		r, err := p.registerMemory(buf, access)
		m.r = r
		return m, err
	}
	if m.r = p.regionOf(buf); m.r == nil {
		r, err := p.registerMemory(buf, 0)
		if err != nil {
			return nil, err
		}
		m.r, r.refs = r, 0
	}
	m.r.refs++
	if err := m.bindWindow(access); err != nil {
		p.releaseRegion(m.r)
		return nil, fmt.Errorf("bind a memory window on %s: %w", p.dev.info.Name, err)
	}
	return m, nil
}

// registerMemory makes a region with one user.
func (p *pd) registerMemory(buf []byte, access verbs.Access) (*memoryRegion, error) {
	flags := C.int(C.IBV_ACCESS_LOCAL_WRITE)
	if access&verbs.AccessRemoteWrite != 0 {
		flags |= C.IBV_ACCESS_REMOTE_WRITE
	}
	if access&verbs.AccessRemoteRead != 0 {
		flags |= C.IBV_ACCESS_REMOTE_READ
	}
	if p.dev.info.Caps&verbs.CapKeyRotation != 0 {
		flags |= C.IBV_ACCESS_MW_BIND
	}
	r := &memoryRegion{buf: buf, refs: 1}
	if err := errnoOf(C.rv_reg_mr(p.c, addrOf(buf), C.uint64_t(len(buf)), flags, &r.c)); err != nil {
		var errno syscall.Errno
		errors.As(err, &errno)
		return nil, registerError(p.dev.info.Name, len(buf), errno, currentMemlock())
	}
	p.regions = append(p.regions, r)
	return r, nil
}

// regionOf finds the region that buf lies in.
func (p *pd) regionOf(buf []byte) *memoryRegion {
	first := addrOf(buf)
	for _, r := range p.regions {
		at := addrOf(r.buf)
		if first >= at && uint64(first-at)+uint64(len(buf)) <= uint64(len(r.buf)) {
			return r
		}
	}
	return nil
}

// releaseRegion gives up one use of r; mu is held.
func (p *pd) releaseRegion(r *memoryRegion) error {
	if r.refs--; r.refs > 0 {
		return nil
	}
	p.regions = slices.DeleteFunc(p.regions, func(o *memoryRegion) bool { return o == r })
	return errnoOf(C.rv_dereg_mr(r.c))
}

// windowFor returns the window that key belongs to, in any variant, or nil. Data
// path.
func (p *pd) windowFor(key uint32) *cWindow {
	index := key >> 8
	list := p.windows[index%windowBuckets].Load()
	if list == nil {
		return nil
	}
	for _, w := range *list {
		if w.index == index {
			return w.c
		}
	}
	return nil
}

// setWindow adds w or, with add false, removes it; mu is held.
func (p *pd) setWindow(w *memoryWindow, add bool) {
	bucket := &p.windows[w.index%windowBuckets]
	var list []*memoryWindow
	if old := bucket.Load(); old != nil {
		list = slices.DeleteFunc(slices.Clone(*old), func(o *memoryWindow) bool { return o == w })
	}
	if add {
		list = append(list, w)
	}
	bucket.Store(&list)
}

// Close implements verbs.PD.
func (p *pd) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.loop != nil {
		C.rv_loop_close(p.loop)
		C.free(unsafe.Pointer(p.loop))
		p.loop = nil
	}
	if err := errnoOf(C.rv_dealloc_pd(p.c)); err != nil {
		return fmt.Errorf("free protection domain on %s: %w", p.dev.info.Name, err)
	}
	return nil
}

// mr implements verbs.MR.
type mr struct {
	pd   *pd
	r    *memoryRegion
	buf  []byte
	w    *memoryWindow // nil: the region's key
	rkey uint32

	closed bool // guarded by pd.mu
}

// bindWindow binds a window to m; pd.mu is held.
func (m *mr) bindWindow(access verbs.Access) error {
	p := m.pd
	if p.loop == nil {
		l := (*cLoop)(C.calloc(1, C.sizeof_struct_rv_loop))
		if err := errnoOf(C.rv_loop_open(l, p.c, p.c)); err != nil {
			C.free(unsafe.Pointer(l))
			return err
		}
		p.loop = l
	}
	w := (*cWindow)(C.calloc(1, C.sizeof_struct_rv_window))
	w.mr, w.addr, w.len = m.r.c, addrOf(m.buf), C.uint64_t(len(m.buf))
	if access&verbs.AccessRemoteWrite != 0 {
		w.access |= C.IBV_ACCESS_REMOTE_WRITE
	}
	if access&verbs.AccessRemoteRead != 0 {
		w.access |= C.IBV_ACCESS_REMOTE_READ
	}
	if err := errnoOf(C.rv_window_open(p.loop, p.c, w)); err != nil {
		C.free(unsafe.Pointer(w))
		return err
	}
	m.rkey = uint32(w.key)
	m.w = &memoryWindow{m.rkey >> 8, w}
	p.setWindow(m.w, true)
	return nil
}

func (m *mr) LKey() uint32 { return uint32(m.r.c.lkey) }

func (m *mr) RKey() uint32 {
	if m.w != nil {
		return m.rkey
	}
	return uint32(m.r.c.rkey)
}

func (m *mr) Addr() uint64 { return uint64(addrOf(m.buf)) }
func (m *mr) Len() int     { return len(m.buf) }

// Close implements verbs.MR.
func (m *mr) Close() error {
	m.pd.mu.Lock()
	defer m.pd.mu.Unlock()
	if m.closed {
		return nil
	}
	m.closed = true
	var err error
	if m.w != nil {
		m.pd.setWindow(m.w, false)
		if err = errnoOf(C.rv_window_close(m.w.c)); err == nil {
			C.free(unsafe.Pointer(m.w.c))
		}
	}
	if e := m.pd.releaseRegion(m.r); err == nil {
		err = e
	}
	if err != nil {
		return fmt.Errorf("deregister %d bytes on %s: %w", len(m.buf), m.pd.dev.info.Name, err)
	}
	return nil
}
