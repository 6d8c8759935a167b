package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// incarnation names the time for which the caches of this host have lost nothing. It is part
// of the verifiers that clients compare: docs/extend/protocol/rnbd.md, "Writes that a power cut
// loses". Without a file it is the boot id. With a file a host that was shut down in order keeps
// the name: the server flushes every node that was open for writing when it stops, and notes
// in the file that it has.
//
// The file has a line for each fact:
//
//	incarnation NAME of boot ID    the first line
//	open "PATH"                    the node was open for writing in this boot
//	clean                          everything was flushed, and nothing was open since
type incarnation struct {
	path  string                  // of the file; empty: there is none
	boot  string                  // boot id of this host
	flush func(path string) error // replaced in tests

	mu   sync.Mutex
	name string          // empty before begin
	file *os.File        // nil: the record is not kept
	lock *os.File        // locked while file is open, so that no other server has the record
	open map[string]bool // paths that the file has
}

// errUnclean reports that a stop was no orderly one, so that clients are told of lost writes.
var errUnclean = errors.New("the next start of this host is told to clients as a power cut")

// begin reads the record and starts that of this boot. It is called before clients are served,
// a second time after a hand-over that has failed. The error says why the record is not kept;
// the name is the boot id then.
func (i *incarnation) begin() (err error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.file != nil {
		return nil
	}
	i.name, i.open = i.boot, map[string]bool{}
	if i.path == "" || i.boot == "" {
		return nil
	}
	if i.lock, err = lockFile(i.path + ".lock"); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			i.close()
		}
	}()
	r, err := readIncarnation(i.path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	// A start of the daemon alone loses nothing, whatever the record says of flushes.
	if r.boot == i.boot || r.clean {
		i.name = r.name
	}
	if r.boot != i.boot || r.clean {
		if err := writeIncarnation(i.path, i.name, i.boot); err != nil {
			i.name = i.boot // the old record still says that nothing was lost
			return err
		}
		r.open = nil
	}
	for _, p := range r.open {
		i.open[p] = true
	}
	i.file, err = os.OpenFile(i.path, os.O_WRONLY|os.O_APPEND, 0)
	return err
}

// now returns the name.
func (i *incarnation) now() string {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.name
}

// noteOpen records that the node at path is open for writing. The record needs no flush: it
// matters only as long as this kernel runs.
func (i *incarnation) noteOpen(path string) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.file == nil || i.open[path] {
		return nil
	}
	if _, err := fmt.Fprintf(i.file, "open %s\n", strconv.Quote(path)); err != nil {
		i.close()
		return fmt.Errorf("note a device that is open for writing, %w: %w", errUnclean, err)
	}
	i.open[path] = true
	return nil
}

// flushesAtOnce bounds the nodes that are flushed at the same time.
const flushesAtOnce = 16

// end flushes what was open for writing, and records that. No request is under way. At the end
// of ctx it gives up; a flush that hangs is left behind.
func (i *incarnation) end(ctx context.Context) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.file == nil {
		return nil
	}
	defer i.close()
	r, err := readIncarnation(i.path) // an earlier process of this boot may have written, too
	if err != nil {
		return fmt.Errorf("%w: %w", errUnclean, err)
	}
	if err := i.flushAll(ctx, r.open); err != nil {
		return fmt.Errorf("%w: %w", errUnclean, err)
	}
	if _, err := i.file.WriteString("clean\n"); err != nil {
		return fmt.Errorf("%w: %w", errUnclean, err)
	}
	return i.file.Sync()
}

// abandon ends the record of this process without a flush. The next process of this boot goes on
// with it; the next start of the host is a power cut for clients.
func (i *incarnation) abandon() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.close()
}

// close closes the files. The caller holds mu.
func (i *incarnation) close() {
	for _, f := range []**os.File{&i.file, &i.lock} {
		if *f != nil {
			(*f).Close()
			*f = nil
		}
	}
}

// lockFile opens a file and locks it until it is closed.
func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s, another server may have it: %w", path, err)
	}
	return f, nil
}

// flushAll flushes the nodes at paths. A flush that hangs is left behind at the end of ctx.
func (i *incarnation) flushAll(ctx context.Context, paths []string) error {
	results := make(chan error, len(paths))
	room := make(chan struct{}, flushesAtOnce)
	go func() {
		for _, p := range paths {
			room <- struct{}{}
			go func() { results <- i.flush(p); <-room }()
		}
	}()
	var errs []error
	for range paths {
		select {
		case err := <-results:
			errs = append(errs, err)
		case <-ctx.Done():
			return errors.Join(append(errs, fmt.Errorf("a flush hangs: %w", ctx.Err()))...)
		}
	}
	return errors.Join(errs...)
}

// noPath stands for a device that a plugin has made of a name. The server cannot flush it.
const noPath = ""

// flushNode makes what was written to a file or a block device durable. A node without a name
// is left out: after the next start no process can open it.
func flushNode(path string) error {
	if path == noPath {
		return errors.New("a plugin that makes devices of names tells no incarnation of its own")
	}
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("flush: %w", err)
	}
	defer f.Close()
	if err := unix.Fdatasync(int(f.Fd())); err != nil {
		return fmt.Errorf("flush %s: %w", path, err)
	}
	return nil
}

// incarnationRecord is the content of the file.
type incarnationRecord struct {
	name, boot string
	open       []string
	clean      bool
}

func readIncarnation(path string) (r incarnationRecord, err error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return r, err
	}
	for n, line := range bytes.Split(bytes.TrimSuffix(b, []byte("\n")), []byte("\n")) {
		word, rest, _ := strings.Cut(string(line), " ")
		switch {
		case n == 0:
			if _, err := fmt.Sscanf(string(line), "incarnation %s of boot %s", &r.name, &r.boot); err != nil {
				return incarnationRecord{}, nil // as if there were none: a power cut
			}
		case word == "clean":
			r.clean = true
		case word == "open":
			p, err := strconv.Unquote(rest)
			if err != nil {
				return incarnationRecord{}, nil
			}
			r.open, r.clean = append(r.open, p), false
		default:
			return incarnationRecord{}, nil
		}
	}
	return r, nil
}

// writeIncarnation replaces the file by one without devices, durably.
func writeIncarnation(path, name, boot string) error {
	tmp := path + ".new"
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(f, "incarnation %s of boot %s\n", name, boot)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := os.Rename(tmp, path); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Sync()
}
