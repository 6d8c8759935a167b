package plugin

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sockpair"
)

// Descriptors travel in messages of 8 bytes, the token, over a SEQPACKET
// socket pair. Only the host sends. Its end of file ends the plugin.
const (
	tokenSize = 8
	maxFDs    = 4

	// Bounds of the messages without a call yet. The call follows its message
	// at once, or never if its caller has given up. So messages are dropped
	// after a while, and the oldest when there are many.
	maxPending = 512
	pendingFor = time.Minute
)

// socketPair returns the host's connection and the plugin's descriptor. Both
// are close-on-exec.
func socketPair() (*net.UnixConn, *os.File, error) {
	return sockpair.New(unix.SOCK_SEQPACKET, "plugin control")
}

// fdSender is the host's end.
type fdSender interface {
	// send passes copies of fds and returns their token. The caller keeps its own.
	send(fds ...int) (token uint64, err error)
	// skip returns a token that carries nothing.
	skip() (token uint64)
	// close is the end of file for the plugin.
	close()
	// waitEnd returns when the plugin has closed its end, or close was called.
	waitEnd()
}

// connSender sends over a connection.
type connSender struct {
	mu   sync.Mutex
	conn *net.UnixConn
	last uint64 // token
}

func (s *connSender) send(fds ...int) (uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last++
	var msg [tokenSize]byte
	binary.LittleEndian.PutUint64(msg[:], s.last)
	if _, _, err := s.conn.WriteMsgUnix(msg[:], unix.UnixRights(fds...), nil); err != nil {
		return 0, fmt.Errorf("pass descriptors: %w", err)
	}
	return s.last, nil
}

func (s *connSender) close() { _ = s.conn.Close() }

func (s *connSender) waitEnd() {
	var b [1]byte
	_, _ = s.conn.Read(b[:]) // returns at the end: the peer never writes
}

func (s *connSender) skip() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last++
	return s.last
}

// fdReceiver is the plugin's end. run reads until the end of file.
type fdReceiver struct {
	conn *net.UnixConn

	mu      sync.Mutex
	pending map[uint64][]int
	order   []arrival     // of the pending messages; tokens grow
	dropped uint64        // the last token with dropped descriptors
	changed chan struct{} // closed and replaced at every arrival
	expires *time.Timer   // of the oldest message, or of one before it; nil: it was never needed
}

// arrival is a message and when it came.
type arrival struct {
	token uint64
	at    time.Time
}

func newFDReceiver(conn *net.UnixConn) *fdReceiver {
	return &fdReceiver{conn: conn, pending: map[uint64][]int{}, changed: make(chan struct{})}
}

// run returns at end of file, with nil, or for an error.
func (r *fdReceiver) run() error {
	buf := make([]byte, tokenSize)
	oob := make([]byte, unix.CmsgSpace(maxFDs*4))
	for {
		n, oobn, flags, _, err := r.conn.ReadMsgUnix(buf, oob)
		if err != nil || n == 0 {
			r.closeAll()
			if err == nil || errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) {
				return nil
			}
			return err
		}
		fds, err := rights(oob[:oobn])
		if err != nil || n != tokenSize || flags&(unix.MSG_CTRUNC|unix.MSG_TRUNC) != 0 {
			closeFDs(fds)
			return fmt.Errorf("descriptor message of %d bytes, flags %#x: %w", n, flags, errors.Join(err, unix.EPROTO))
		}
		r.put(binary.LittleEndian.Uint64(buf), fds)
	}
}

func rights(oob []byte) ([]int, error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	var all []int
	for i := range msgs {
		fds, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			return all, err
		}
		all = append(all, fds...)
	}
	return all, nil
}

func (r *fdReceiver) put(token uint64, fds []int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pending[token] = fds
	r.order = append(r.order, arrival{token, time.Now()})
	r.prune()
	close(r.changed)
	r.changed = make(chan struct{})
}

// prune drops messages that are too many or too old. The caller holds mu.
func (r *fdReceiver) prune() {
	now := time.Now()
	for len(r.order) > maxPending || len(r.order) > 0 && now.Sub(r.order[0].at) >= pendingFor {
		old := r.order[0].token
		closeFDs(r.pending[old])
		delete(r.pending, old)
		r.order, r.dropped = r.order[1:], max(r.dropped, old)
	}
	switch {
	case len(r.order) == 0: // a timer that runs finds nothing
	case r.expires == nil:
		r.expires = time.AfterFunc(pendingFor, r.expire)
	default:
		r.expires.Reset(r.order[0].at.Add(pendingFor).Sub(now))
	}
}

// expire drops the messages whose calls will not come.
func (r *fdReceiver) expire() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.prune()
}

// take waits for the descriptors of token; they belong to the caller. Exactly
// n are expected. ENOBUFS: they were dropped.
func (r *fdReceiver) take(ctx context.Context, token uint64, n int) ([]int, error) {
	for {
		fds, changed, dropped := r.look(token)
		if fds != nil {
			if len(fds) != n {
				closeFDs(fds)
				return nil, fmt.Errorf("token %d: %d descriptors, want %d: %w", token, len(fds), n, unix.EPROTO)
			}
			return fds, nil
		}
		if dropped {
			return nil, fmt.Errorf("descriptors of token %d came long before the call, or too many did: %w", token, unix.ENOBUFS)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for descriptors of token %d: %w", token, context.Cause(ctx))
		}
	}
}

func (r *fdReceiver) look(token uint64) (fds []int, changed chan struct{}, dropped bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	fds = r.pending[token]
	if fds != nil {
		delete(r.pending, token)
		r.order = slices.DeleteFunc(r.order, func(a arrival) bool { return a.token == token })
	}
	return fds, r.changed, fds == nil && token <= r.dropped
}

func (r *fdReceiver) closeAll() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, fds := range r.pending {
		closeFDs(fds)
	}
	clear(r.pending)
	r.order = nil
	if r.expires != nil {
		r.expires.Stop()
	}
}

func closeFDs(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

// reopen opens the file behind f again, with a new description.
func reopen(f *os.File, flags int) (*os.File, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	var out *os.File
	var oerr error
	err = raw.Control(func(fd uintptr) {
		var n int
		n, oerr = unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), flags|unix.O_CLOEXEC, 0)
		if oerr == nil {
			out = os.NewFile(uintptr(n), f.Name())
		}
	})
	if err != nil {
		return nil, err
	}
	return out, oerr
}
