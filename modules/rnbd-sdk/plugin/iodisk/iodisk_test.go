package iodisk

import (
	"bytes"
	"context"
	"errors"
	"io"
	"sync"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/plugintest"
)

// memory is a store in memory, behind a lock.
type memory struct {
	mu   sync.RWMutex
	data []byte
}

func (m *memory) Size() int64  { return int64(len(m.data)) }
func (m *memory) Close() error { return nil }
func (m *memory) Sync() error  { return nil }

func (m *memory) ReadAt(b []byte, off int64) (int, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return bytes.NewReader(m.data).ReadAt(b, off)
}

func (m *memory) WriteAt(b []byte, off int64) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return copy(m.data[off:], b), nil
}

func (m *memory) WriteZeroes(off, n int64, _ bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	clear(m.data[off:][:n])
	return nil
}

func (m *memory) Discard(off, n int64) error { return m.WriteZeroes(off, n, false) }

func serverOf(s Store) *Server {
	return &Server{
		Info:      plugin.Info{Name: "iodisk", Version: "1", Names: plugin.NamesOpaque},
		OpenStore: func(context.Context, plugin.OpenRequest) (Store, error) { return s, nil },
	}
}

func TestStoreKeepsTheContractOfPlugins(t *testing.T) {
	plugintest.RunIO(t, serverOf(&memory{data: make([]byte, 4<<20)}), plugintest.Options{})
}

// readOnlyStore has no method of writing.
type readOnlyStore struct{ io.ReaderAt }

func (readOnlyStore) Size() int64  { return 2000 }
func (readOnlyStore) Close() error { return nil }

func TestLimitsFollowTheStore(t *testing.T) {
	d, err := serverOf(readOnlyStore{bytes.NewReader(make([]byte, 2000))}).Open(t.Context(), plugin.OpenRequest{Name: "x"})
	if err != nil {
		t.Fatal(err)
	}
	if l := d.Limits(); !l.ReadOnly || l.Size != 1536 || l.WriteCache || l.MaxDiscard != 0 || l.MaxWriteZeroes != 0 {
		t.Errorf("limits of a store that can only be read: %+v", l)
	}
	d, err = serverOf(&memory{data: make([]byte, 4096)}).Open(t.Context(), plugin.OpenRequest{Name: "x"})
	if err != nil {
		t.Fatal(err)
	}
	if l := d.Limits(); l.ReadOnly || l.Size != 4096 || !l.WriteCache || l.MaxDiscard == 0 || l.MaxWriteZeroes == 0 {
		t.Errorf("limits of a store with all methods: %+v", l)
	}
	if _, err := serverOf(&memory{}).Open(t.Context(), plugin.OpenRequest{Name: "x"}); blk.ToErrno(err) != blk.EINVAL {
		t.Errorf("an empty store: %v", err)
	}
}

// failing returns an error from every call.
type failing struct {
	memory
	err error
}

func (f *failing) ReadAt([]byte, int64) (int, error)  { return 1, f.err }
func (f *failing) WriteAt([]byte, int64) (int, error) { return 0, f.err }
func (f *failing) Sync() error                        { return f.err }

func TestErrorsOfTheStore(t *testing.T) {
	for err, want := range map[error]blk.Errno{
		errors.New("no errno"): blk.EIO,
		syscall.ENOSPC:         blk.ENOSPC,
		io.EOF:                 blk.EIO,
		nil:                    blk.EIO, // a short read
	} {
		d, oerr := serverOf(&failing{memory: memory{data: make([]byte, 4096)}, err: err}).Open(t.Context(), plugin.OpenRequest{Name: "x"})
		if oerr != nil {
			t.Fatal(oerr)
		}
		if errno := d.(*disk).carryOut(&plugin.Request{Op: blk.Read, Buf: make([]byte, 512), Len: 512}); errno != want {
			t.Errorf("read, %v: %v, want %v", err, errno, want)
		}
		if err == nil {
			continue
		}
		for _, op := range []blk.Op{blk.Write, blk.Flush} {
			if errno := d.(*disk).carryOut(&plugin.Request{Op: op, Buf: make([]byte, 512), Len: 512}); errno != want {
				t.Errorf("%v, %v: %v, want %v", op, err, errno, want)
			}
		}
	}
}
