package volume

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// KindFiles is the kind of a pool of files in a folder.
const KindFiles = "files"

// Config describes a pool.
type Config struct {
	Name string // of the pool: CheckName
	Kind string // KindFiles
	Path string // absolute path of the folder
}

// Check returns the first error of the configuration, EINVAL.
func (c Config) Check() error {
	if err := CheckName(c.Name); err != nil {
		return fmt.Errorf("pool: %w", err)
	}
	switch {
	case c.Kind != KindFiles:
		return fmt.Errorf("pool %q: kind %q is unknown, write %s: %w", c.Name, c.Kind, KindFiles, syscall.EINVAL)
	case !filepath.IsAbs(c.Path):
		return fmt.Errorf("pool %q: path %q: write the absolute path of a folder: %w", c.Name, c.Path, syscall.EINVAL)
	}
	return nil
}

// ID identifies the file of a volume on this host.
type ID struct{ Dev, Ino uint64 }

// Uses counts the clients that have a volume open.
type Uses struct{ Readers, Writers int }

// Users are the clients that have volumes open.
type Users interface {
	// Hold keeps everyone from opening or closing the file until release is called, and
	// returns who has it open. The error is that of ctx.
	Hold(ctx context.Context, id ID) (uses Uses, release func(), err error)
	// Pause waits until no write of the file is under way, and holds back further ones
	// until resume is called, whose error says that writes were not held back all the
	// time. The caller has called Hold.
	Pause(ctx context.Context, id ID) (resume func() error, err error)
	// Resized tells those who have the file open of its new size.
	Resized(ctx context.Context, id ID) error
}

// Pool keeps the volumes of one folder. Its methods may be called by any goroutine.
// It holds nothing open between calls, so its file system can be unmounted.
type Pool struct {
	cfg   Config
	users Users
	names locks // of volumes and their snapshots, by the name of the volume
	// openFolder is replaced by tests.
	openFolder func(path string) (folder, error)

	mu    sync.Mutex
	id    string // of the pool, when it was used first; empty: it was not
	clean bool   // files that an earlier process has left are removed
}

// New returns a pool. It does not touch the folder. The error is EINVAL.
func New(cfg Config, users Users) (*Pool, error) {
	if err := cfg.Check(); err != nil {
		return nil, err
	}
	return &Pool{cfg: cfg, users: users, openFolder: func(path string) (folder, error) { return openFolder(path) }}, nil
}

// Config returns the configuration of the pool.
func (p *Pool) Config() Config { return p.cfg }

// Names of the pool's own files.
const (
	markerName = ".rnbd-pool"
	tempPrefix = ".rnbd-new-"
)

// marker is the contents of the file that makes a folder a pool.
type marker struct {
	Pool string `json:"pool"`
	ID   string `json:"id"`
}

// Init makes the folder a pool. A folder that is one already stays as it is. EEXIST:
// it is another pool. ESTALE: it is missing.
func (p *Pool) Init(context.Context) error {
	fail := func(err error) error { return fmt.Errorf("pool %q: %w", p.cfg.Name, err) }
	d, err := p.openFolder(p.cfg.Path)
	if err != nil {
		return fail(gone(err))
	}
	defer d.close()
	m, err := readMarker(d)
	switch {
	case err == nil && m.Pool == p.cfg.Name:
		return nil
	case err == nil:
		return fail(fmt.Errorf("folder %s is the pool %q: %w", p.cfg.Path, m.Pool, syscall.EEXIST))
	case !errors.Is(err, syscall.ENOENT):
		return fail(err)
	}
	text, err := json.Marshal(marker{Pool: p.cfg.Name, ID: rand.Text()})
	if err != nil {
		return fail(err)
	}
	err = makeFile(d, markerName, func(f *os.File) error {
		if err := d.setAttr(f, []byte("{}")); err != nil {
			return fmt.Errorf("volumes need a file system with extended attributes, as ext4, XFS, btrfs, or tmpfs from Linux 6.6 on: %w", err)
		}
		_, err := f.Write(append(text, '\n'))
		return err
	})
	if err != nil && !errors.Is(err, syscall.EEXIST) { // another process may have been faster
		return fail(err)
	}
	return nil
}

// gone says that the folder of a pool cannot be used. ENOENT would read as the lack of
// a volume.
func gone(err error) error {
	if errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.ENOTDIR) {
		return fmt.Errorf("its folder is missing, or is not mounted: %v: %w", err, syscall.ESTALE)
	}
	return err
}

func readMarker(d folder) (m marker, err error) {
	f, err := d.open(markerName, unix.O_RDONLY)
	if err != nil {
		return m, err
	}
	defer f.Close()
	return m, parseMarker(f, &m)
}

// maxMarker bounds the size of a marker in bytes.
const maxMarker = 4096

func parseMarker(f *os.File, m *marker) error {
	text, err := io.ReadAll(io.LimitReader(f, maxMarker))
	if err == nil {
		err = json.Unmarshal(text, m)
	}
	if err != nil {
		return fmt.Errorf("%s: %v: %w", f.Name(), err, syscall.EBADMSG)
	}
	return nil
}

// work is the folder of a pool during one call.
type work struct {
	folder
	marker *os.File // with a shared lock: it keeps another process from removing temporary files
}

func (w *work) end() {
	w.marker.Close()
	w.folder.close()
}

// begin opens the folder and checks that it is the pool's. end must follow.
func (p *Pool) begin() (*work, error) {
	d, err := p.openFolder(p.cfg.Path)
	if err != nil {
		return nil, fmt.Errorf("pool %q: %w", p.cfg.Name, gone(err))
	}
	f, err := p.checkMarker(d)
	if err != nil {
		d.close()
		return nil, fmt.Errorf("pool %q: %w", p.cfg.Name, err)
	}
	return &work{folder: d, marker: f}, nil
}

// checkMarker returns the open marker with a shared lock.
func (p *Pool) checkMarker(d folder) (*os.File, error) {
	f, err := d.open(markerName, unix.O_RDONLY)
	if errors.Is(err, syscall.ENOENT) {
		return nil, fmt.Errorf("folder %s is no pool yet, or its file system is not mounted; a new one is made by rnbd pool init %s: %w", p.cfg.Path, p.cfg.Name, syscall.ESTALE)
	}
	if err != nil {
		return nil, err
	}
	var m marker
	if err := parseMarker(f, &m); err != nil {
		f.Close()
		return nil, err
	}
	if err := p.recognize(m); err != nil {
		f.Close()
		return nil, err
	}
	if err := p.removeLeftovers(d, f); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// recognize compares a marker with the pool, and with the marker that was seen first.
func (p *Pool) recognize(m marker) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case m.Pool != p.cfg.Name:
		return fmt.Errorf("folder %s is the pool %q: another file system may be mounted there: %w", p.cfg.Path, m.Pool, syscall.ESTALE)
	case p.id != "" && m.ID != p.id:
		return fmt.Errorf("folder %s is another pool than before, with the id %s and not %s: another file system may be mounted there; restart the server if that is meant: %w", p.cfg.Path, m.ID, p.id, syscall.ESTALE)
	}
	p.id = m.ID
	return nil
}

// removeLeftovers takes the shared lock of a call. Before the first call of this
// process it removes the temporary files of earlier ones, unless another process has
// the lock, as during an upgrade.
func (p *Pool) removeLeftovers(d folder, f *os.File) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.clean {
		return flock(f, unix.LOCK_SH)
	}
	if err := flock(f, unix.LOCK_EX|unix.LOCK_NB); err == nil {
		names, err := d.names()
		if err != nil {
			return err
		}
		for _, name := range names {
			if !strings.HasPrefix(name, tempPrefix) {
				continue
			}
			if err := d.remove(name); err != nil && !errors.Is(err, syscall.ENOENT) && !errors.Is(err, syscall.EROFS) {
				return err
			}
		}
		p.clean = true
	}
	return flock(f, unix.LOCK_SH)
}

func flock(f *os.File, how int) error {
	for {
		err := unix.Flock(int(f.Fd()), how)
		if err == nil || !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// State is what is known of a pool.
type State struct {
	ID         string
	Size, Free uint64 // bytes of the file system
	Volumes    int    // with snapshots
}

// State returns the state of the pool, or why it cannot be used.
func (p *Pool) State(context.Context) (State, error) {
	w, err := p.begin()
	if err != nil {
		return State{}, err
	}
	defer w.end()
	p.mu.Lock()
	st := State{ID: p.id}
	p.mu.Unlock()
	names, err := w.names()
	if err != nil {
		return st, err
	}
	for _, name := range names {
		if _, err := ParseName(name); err == nil {
			st.Volumes++
		}
	}
	st.Size, st.Free, err = w.space()
	return st, err
}

// Open returns an O_PATH descriptor of a volume or a snapshot. The error is ENOENT if
// there is none.
func (p *Pool) Open(n Name) (*os.File, error) {
	if err := n.check(); err != nil {
		return nil, err
	}
	w, err := p.begin()
	if err != nil {
		return nil, err
	}
	defer w.end()
	return w.open(n.String(), unix.O_PATH)
}
