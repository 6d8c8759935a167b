package uring

import (
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Flags of io_uring_setup.
const (
	setupCQSize       = 1 << 3
	setupClamp        = 1 << 4
	setupRDisabled    = 1 << 6
	setupSubmitAll    = 1 << 7
	setupCoopTaskrun  = 1 << 8
	setupTaskrunFlag  = 1 << 9
	setupSQE128       = 1 << 10
	setupSingleIssuer = 1 << 12
	setupDeferTaskrun = 1 << 13
	setupNoSQArray    = 1 << 16
)

// modes are tried in turn; a kernel answers EINVAL to flags it does not know.
// All but the last let completions wait until we look for them, instead of
// interrupting the thread.
var modes = []uint32{
	setupRDisabled | setupSubmitAll | setupSingleIssuer | setupDeferTaskrun | setupTaskrunFlag | setupNoSQArray, // 6.6
	setupRDisabled | setupSubmitAll | setupSingleIssuer | setupDeferTaskrun | setupTaskrunFlag,                  // 6.1
	setupRDisabled | setupSubmitAll | setupCoopTaskrun | setupTaskrunFlag,                                       // 5.19
	setupRDisabled, // 5.10
}

const (
	featSingleMmap = 1 << 0
	featNoDrop     = 1 << 1

	sqCQOverflow = 1 << 1 // completions wait in the kernel
	sqTaskrun    = 1 << 2 // deferred work waits

	enterGetEvents = 1 << 0

	registerBuffers     = 0
	unregisterBuffers   = 1
	registerFiles       = 2
	registerEventfd     = 4
	registerProbe       = 8
	registerEnableRings = 12
	registerBuffers2    = 15
	registerMaxWorkers  = 19

	registerSparse = 1 << 0
)

// Options of NewRing.
type Options struct {
	CQEntries int  // 0: twice the submission entries
	SQE128    bool // entries of 128 bytes, for URING_CMD with 80 bytes of payload
}

// Ring is one io_uring. The package comment says which threads may use it.
type Ring struct {
	fd    int
	flags uint32 // of the setup
	on    bool   // enabled, that is bound to its thread

	mem, sqMem []byte // rings; entries

	sqHead, sqTail, sqFlags *atomic.Uint32
	cqHead, cqTail          *atomic.Uint32
	cqes                    []CQE
	sqEntries, cqEntries    uint32
	tail                    uint32 // next submission entry; the kernel has seen sqTail
}

// NewRing makes a ring of the given submission entries, a power of two or
// rounded up to one. The first Submit, Run or Wait binds it to its thread.
func NewRing(entries int, o Options) (*Ring, error) {
	if entries <= 0 || entries > 1<<15 {
		return nil, fmt.Errorf("io_uring of %d entries: want 1 to %d", entries, 1<<15)
	}
	if o.CQEntries == 0 {
		o.CQEntries = 2 * entries
	}
	var err error
	for _, mode := range modes {
		var r *Ring
		if r, err = newRing(entries, o, mode); err == nil {
			return r, nil
		}
		if !errors.Is(err, unix.EINVAL) {
			break
		}
	}
	return nil, err
}

func newRing(entries int, o Options, mode uint32) (*Ring, error) {
	p := params{flags: mode | setupCQSize | setupClamp, cqEntries: uint32(o.CQEntries)}
	if o.SQE128 {
		p.flags |= setupSQE128
	}
	fd, err := setup(uint32(entries), &p)
	if err != nil {
		return nil, fmt.Errorf("io_uring_setup: %w", err)
	}
	r := &Ring{fd: fd, flags: p.flags, sqEntries: p.sqEntries, cqEntries: p.cqEntries}
	if need := uint32(featSingleMmap | featNoDrop); p.features&need != need {
		r.Close()
		return nil, fmt.Errorf("io_uring has features %#x, want %#x (Linux 5.10)", p.features, need)
	}
	if err := r.mapRings(&p); err != nil {
		r.Close()
		return nil, fmt.Errorf("io_uring: %w", err)
	}
	return r, nil
}

// Next returns a cleared entry to fill, or nil when the ring is full. It is
// submitted by Submit.
func (r *Ring) Next() *SQE {
	if r.tail-r.sqHead.Load() == r.sqEntries {
		return nil
	}
	s := r.sqe(r.tail & (r.sqEntries - 1))
	r.tail++
	return s
}

// Pending returns the number of entries that the kernel has not taken yet.
func (r *Ring) Pending() int { return int(r.tail - r.sqHead.Load()) }

// Submit hands all entries to the kernel in one call. EAGAIN and EBUSY mean
// that some are left; try again after reaping. Rejected entries complete with
// an error of their own.
func (r *Ring) Submit() error { return r.enter(0) }

// Wait is Submit, then blocks until n completions are there.
func (r *Ring) Wait(n int) error { return r.enter(uint32(n)) }

// Run lets the kernel finish work that it keeps for this thread, so that its
// completions can be peeked.
func (r *Ring) Run() error { return r.call(0, 0, enterGetEvents) }

func (r *Ring) enter(wait uint32) error {
	r.sqTail.Store(r.tail)
	for {
		n := r.tail - r.sqHead.Load()
		if n == 0 && wait == 0 {
			return nil
		}
		var flags uint32
		if wait > 0 || r.flags&setupDeferTaskrun != 0 {
			flags = enterGetEvents
		}
		if err := r.call(n, wait, flags); err != nil {
			return err
		}
		if r.tail == r.sqHead.Load() {
			return nil
		}
	}
}

// call is io_uring_enter. Being interrupted by the runtime's signals means
// nothing: whatever was submitted counts, the rest is submitted again.
func (r *Ring) call(submit, wait, flags uint32) error {
	if !r.on {
		if err := register(r.fd, registerEnableRings, nil, 0); err != nil {
			return fmt.Errorf("enable io_uring: %w", err)
		}
		r.on = true
	}
	for {
		errno := enterSyscall(r.fd, submit, wait, flags)
		switch errno {
		case 0:
			return nil
		case unix.EINTR:
			submit = min(submit, r.tail-r.sqHead.Load())
		default:
			return errno
		}
	}
}

// Peek copies completions to dst without waiting and returns how many.
func (r *Ring) Peek(dst []CQE) int {
	head := r.cqHead.Load()
	n := r.cqTail.Load() - head
	if n == 0 && r.on && r.sqFlags.Load()&(sqTaskrun|sqCQOverflow) != 0 {
		if r.Run() != nil {
			return 0
		}
		n = r.cqTail.Load() - head
	}
	n = min(n, uint32(len(dst)))
	for i := range n {
		dst[i] = r.cqes[(head+i)&(r.cqEntries-1)]
	}
	if n > 0 {
		r.cqHead.Store(head + n)
	}
	return int(n)
}

// Ready reports whether Peek would find a completion without a system call.
func (r *Ring) Ready() bool { return r.cqTail.Load() != r.cqHead.Load() }

// Arm prepares the owner for sleep on the eventfd of RegisterEventfd. The
// caller has drained the eventfd. False: there is something to submit or to
// peek. Completions after true signal the eventfd.
func (r *Ring) Arm() bool {
	if r.on && r.flags&setupDeferTaskrun != 0 {
		r.Run() // fails on a foreign thread only, as does all else there
	}
	return !r.Ready() && r.Pending() == 0
}

// takeBack removes the entries that the kernel has not taken, telling each.
func (r *Ring) takeBack(f func(userData uint64)) {
	head := r.sqHead.Load()
	for i := head; i != r.tail; i++ {
		f(r.sqeAt(i & (r.sqEntries - 1)).UserData)
	}
	r.tail = head
	r.sqTail.Store(head)
}

// FD returns the ring's descriptor.
func (r *Ring) FD() int { return r.fd }

// RegisterEventfd has the kernel signal fd at every completion.
func (r *Ring) RegisterEventfd(fd int) error {
	v := int32(fd)
	return r.register("eventfd", registerEventfd, int32Pointer(&v), 1)
}

// allowWorkers has the kernel start up to n threads for requests on files and block
// devices that it cannot start without waiting.
func (r *Ring) allowWorkers(n int32) error {
	v := [2]int32{n, 0} // of bounded work, of other work; 0: as it is
	return r.register("workers", registerMaxWorkers, int32Pointer(&v[0]), len(v))
}

// RegisterFiles gives descriptors indices for FixedFile, once.
func (r *Ring) RegisterFiles(fds []int32) error {
	if len(fds) == 0 {
		return nil
	}
	return r.register("files", registerFiles, int32Pointer(&fds[0]), len(fds))
}

// RegisterBuffers pins memory and gives it indices for ReadFixed and
// WriteFixed, in place of all earlier buffers. Nothing may be in flight on
// the buffers, before and after.
func (r *Ring) RegisterBuffers(bufs [][]byte) error {
	if err := register(r.fd, unregisterBuffers, nil, 0); err != nil && err != unix.ENXIO {
		return fmt.Errorf("unregister io_uring buffers: %w", err)
	}
	if len(bufs) == 0 {
		return nil
	}
	vecs := make([]unix.Iovec, len(bufs))
	for i, b := range bufs {
		vecs[i].Base = &b[0]
		vecs[i].SetLen(len(b))
	}
	return r.register("buffers", registerBuffers, iovecPointer(&vecs[0]), len(vecs))
}

// ReserveBuffers makes room for n registered buffers that do not exist yet: a
// driver registers the pages of a request at a given index (Linux 5.19). Once,
// instead of RegisterBuffers.
func (r *Ring) ReserveBuffers(n int) error {
	arg := bufferTable{nr: uint32(n), flags: registerSparse}
	return r.register("buffer table", registerBuffers2, arg.pointer(), bufferTableSize)
}

// Close unmaps and closes the ring. Operations in flight run on in the kernel.
func (r *Ring) Close() error {
	var errs []error
	for _, m := range []*[]byte{&r.mem, &r.sqMem} {
		if *m != nil {
			errs = append(errs, unix.Munmap(*m))
			*m = nil
		}
	}
	if r.fd >= 0 {
		errs = append(errs, unix.Close(r.fd))
		r.fd = -1
	}
	return errors.Join(errs...)
}
