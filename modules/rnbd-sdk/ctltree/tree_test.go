package ctltree

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Tests use system calls, not package os: that would ask the kernel whether
// the file can be polled, from a thread that the answer may need.

func mayMount(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skip("there is no /dev/fuse")
	}
}

// serve mounts d at "t" of a folder and returns the mount's path.
func serve(t *testing.T, d Dir) string {
	t.Helper()
	mayMount(t)
	root := t.TempDir()
	tree, err := Mount(root, map[string]Node{"t": d}, Options{Name: "test", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tree.Close(); err != nil {
			t.Error(err)
		}
	})
	return filepath.Join(root, "t")
}

func read(path string) (string, error) {
	fd, err := unix.Open(path, unix.O_RDONLY, 0)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	var out []byte
	buf := make([]byte, 8192)
	for {
		n, err := unix.Read(fd, buf)
		if n <= 0 {
			return string(out), err
		}
		out = append(out, buf[:n]...)
	}
}

func write(path, data string) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_TRUNC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	n, err := unix.Write(fd, []byte(data))
	if err == nil && n != len(data) {
		return io.ErrShortWrite
	}
	return err
}

func list(t *testing.T, path string) []string {
	t.Helper()
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	buf := make([]byte, 65536)
	var names []string
	for {
		n, err := unix.ReadDirent(fd, buf)
		if err != nil {
			t.Fatal(err)
		}
		if n <= 0 {
			slices.Sort(names)
			return names
		}
		_, _, names = unix.ParseDirent(buf[:n], -1, names)
	}
}

func TestFiles(t *testing.T) {
	var got noted
	dir := serve(t, Fixed{
		"ro":   Text(func() string { return "value" }),
		"rw":   Command("Usage: echo x > rw", func(_ context.Context, c string) error { got.add(c); return nil }),
		"wo":   &File{Store: func(context.Context, []byte) error { return nil }},
		"link": Link("sub/deep"),
		"sub":  Fixed{"deep": Text(func() string { return "below" })},
		"bad":  &File{Show: func() (string, error) { return "", fmt.Errorf("gone: %w", syscall.ENODEV) }},
		"long": &File{Show: func() (string, error) { return strings.Repeat("0123456789", 5000), nil }},
	})
	if names := list(t, dir); !slices.Equal(names, []string{"bad", "link", "long", "ro", "rw", "sub", "wo"}) {
		t.Errorf("the folder has %q", names)
	}
	for name, want := range map[string]string{
		"ro": "value\n", "rw": "Usage: echo x > rw\n", "link": "below\n", "sub/deep": "below\n",
		"long": strings.Repeat("0123456789", 5000),
	} {
		if text, err := read(filepath.Join(dir, name)); err != nil || text != want {
			t.Errorf("read %s: %q, %v; want %q", name, text, err, want)
		}
	}
	for name, mode := range map[string]uint32{"ro": 0o444, "rw": 0o644, "wo": 0o200, "sub": 0o755, "link": 0o777} {
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(dir, name), &st); err != nil || st.Mode&0o7777 != mode {
			t.Errorf("mode of %s is %o, %v; want %o", name, st.Mode&0o7777, err, mode)
		}
	}
	for _, c := range []struct {
		name string
		err  error
		want error
	}{
		{"write to 0444", write(dir+"/ro", "1"), unix.EACCES},
		{"read of 0200", second(read(dir + "/wo")), unix.EACCES},
		{"what is not there", second(read(dir + "/none")), unix.ENOENT},
		{"write to what is not there", write(dir+"/none", "1"), unix.ENOENT},
		{"a file that cannot show itself", second(read(dir + "/bad")), unix.ENODEV},
		{"creating a file", unix.Mknod(dir+"/new", unix.S_IFREG|0o644, 0), unix.EPERM},
		{"opening a new file", create(dir + "/new"), unix.EACCES},
		{"mkdir", unix.Mkdir(dir+"/new", 0o755), unix.EPERM},
		{"unlink", unix.Unlink(dir + "/ro"), unix.EPERM},
		{"rmdir", unix.Rmdir(dir + "/sub"), unix.EPERM},
		{"rename", unix.Rename(dir+"/ro", dir+"/rx"), unix.EPERM},
		{"symlink", unix.Symlink("ro", dir+"/new"), unix.EPERM},
		{"hard link", unix.Link(dir+"/ro", dir+"/new"), unix.EPERM},
		{"chmod", unix.Chmod(dir+"/ro", 0o777), unix.EPERM},
		{"touch", unix.Utime(dir+"/rw", &unix.Utimbuf{}), nil},
	} {
		if c.want == nil && c.err != nil || !errors.Is(c.err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, c.err, c.want)
		}
	}
	if err := write(dir+"/rw", "one word\n"); err != nil || !slices.Equal(got.take(), []string{"one word"}) {
		t.Errorf("the command was lost, %v", err)
	}
}

func second(_ string, err error) error { return err }

func create(path string) error {
	fd, err := unix.Open(path, unix.O_CREAT|unix.O_WRONLY, 0o644)
	if err == nil {
		unix.Close(fd)
	}
	return err
}

func TestErrnoReachesTheShell(t *testing.T) {
	dir := serve(t, Fixed{"ctl": Command("usage", func(_ context.Context, c string) error {
		for errno := syscall.Errno(1); errno < 134; errno++ {
			if unix.ErrnoName(errno) == c {
				return fmt.Errorf("wanted: %w", errno)
			}
		}
		return errors.New("no errno at all")
	})})
	for _, name := range []string{"EINVAL", "EEXIST", "ENOENT", "EBUSY", "EALREADY", "ENOTCONN", "ENXIO", "ECONNRESET", "EPROTONOSUPPORT", "ENOMEM"} {
		out, _ := exec.Command("sh", "-c", "LC_ALL=C; echo "+name+" > "+dir+"/ctl").CombinedOutput()
		want := ""
		for e := syscall.Errno(1); e < 134; e++ {
			if unix.ErrnoName(e) == name {
				want = e.Error()
			}
		}
		if !strings.Contains(strings.ToLower(string(out)), want) && !strings.Contains(string(out), "I/O error") {
			t.Errorf("%s: the shell says %q, want %q", name, out, want)
		}
		if err := write(dir+"/ctl", name+"\n"); unix.ErrnoName(errnoOf(err)) != name {
			t.Errorf("%s: write returns %v", name, err)
		}
	}
	if err := write(dir+"/ctl", "x"); err != unix.EIO {
		t.Errorf("an error without an errno: %v, want EIO", err)
	}
}

func TestTextIsMadeAnewAtOffsetZero(t *testing.T) {
	var n atomic.Int64
	dir := serve(t, Fixed{"n": Text(func() string { return fmt.Sprint(n.Add(1)) })})
	fd, err := unix.Open(dir+"/n", unix.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	buf := make([]byte, 10)
	for i, want := range []string{"1\n", "2\n"} {
		if k, err := unix.Pread(fd, buf, 0); err != nil || string(buf[:k]) != want {
			t.Errorf("read %d: %q, %v; want %q", i, buf[:k], err, want)
		}
	}
	if k, err := unix.Pread(fd, buf, 1); err != nil || string(buf[:k]) != "\n" || n.Load() != 2 {
		t.Errorf("read at 1: %q, %v, made %d times", buf[:k], err, n.Load())
	}
	if a, _ := read(dir + "/n"); a != "3\n" {
		t.Errorf("another reader got %q", a)
	}
}

func TestWritesOfAnySize(t *testing.T) {
	var got noted
	dir := serve(t, Fixed{"ctl": &File{Store: func(_ context.Context, b []byte) error { got.add(string(b)); return nil }}})
	junk := make([]byte, 256)
	for i := range junk {
		junk[i] = byte(i)
	}
	for _, data := range []string{"x", "half a li", string(junk), strings.Repeat("z", MaxStore)} {
		if err, got := write(dir+"/ctl", data), got.take(); err != nil || !slices.Equal(got, []string{data}) {
			t.Errorf("%d bytes: %v, stored %d times", len(data), err, len(got))
		}
	}
	for _, size := range []int{MaxStore + 1, 2 * MaxStore, 1 << 20} {
		if err, got := write(dir+"/ctl", strings.Repeat("z", size)), got.take(); err != unix.EINVAL || len(got) != 0 {
			t.Errorf("%d bytes: %v, stored %d times; want EINVAL", size, err, len(got))
		}
	}
	// Each write is a command of its own, wherever it stands.
	fd, err := unix.Open(dir+"/ctl", unix.O_WRONLY|unix.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	unix.Write(fd, []byte("one"))
	unix.Write(fd, []byte("two"))
	unix.Pwrite(fd, []byte("three"), 100000)
	if got := got.take(); !slices.Equal(got, []string{"one", "two", "three"}) {
		t.Errorf("stored %q", got)
	}
}

// noted records the writes to files. The way through the kernel is none that
// the race detector sees.
type noted struct {
	mu   sync.Mutex
	list []string
}

func (n *noted) add(s string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.list = append(n.list, s)
}

func (n *noted) take() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	list := n.list
	n.list = nil
	return list
}

func TestInterruptedWriterReturnsAtOnce(t *testing.T) {
	begun, ended := make(chan struct{}, 1), make(chan error, 1)
	over := make(chan struct{})
	defer close(over)
	dir := serve(t, Fixed{
		"slow": &File{Store: func(ctx context.Context, _ []byte) error {
			begun <- struct{}{}
			<-ctx.Done()
			ended <- ctx.Err()
			<-over // and takes its time to come back
			return nil
		}},
		"other": Text(func() string { return "here" }),
	})
	cmd := exec.Command("sh", "-c", "echo 1 > "+dir+"/slow")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	<-begun
	if s, err := read(dir + "/other"); err != nil || s != "here\n" {
		t.Errorf("while a writer waits a reader gets %q, %v", s, err)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil { // processes in the background ignore interrupts
		t.Fatal(err)
	}
	back := make(chan error, 1)
	go func() { back <- cmd.Wait() }()
	select {
	case <-back:
	case <-time.After(10 * time.Second):
		t.Fatal("the writer does not come back")
	}
	if err := <-ended; err != context.Canceled {
		t.Errorf("the command's context: %v", err)
	}
}

func TestCloseEndsCommands(t *testing.T) {
	mayMount(t)
	begun := make(chan struct{})
	root := t.TempDir()
	tree, err := Mount(root, map[string]Node{"a/b": Fixed{"slow": &File{Store: func(ctx context.Context, _ []byte) error {
		close(begun)
		<-ctx.Done()
		return ctx.Err()
	}}}}, Options{Name: "test", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	result := make(chan error, 1)
	go func() { result <- write(root+"/a/b/slow", "1") }()
	<-begun
	if err := tree.Close(); err != nil {
		t.Error(err)
	}
	if err := <-result; err != unix.ENODEV && err != unix.EINTR {
		t.Errorf("the writer got %v", err)
	}
	if entries, err := os.ReadDir(root); err != nil || len(entries) != 0 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
}

func TestDirectoriesAreComputed(t *testing.T) {
	var mu sync.Mutex
	content := map[string]string{}
	set := func(name, text string) {
		mu.Lock()
		defer mu.Unlock()
		if content[name] = text; text == "" {
			delete(content, name)
		}
	}
	dir := serve(t, Listing{
		Names: func() (names []string) {
			mu.Lock()
			defer mu.Unlock()
			for n := range content {
				names = append(names, n)
			}
			return names
		},
		Node: func(name string) Node {
			mu.Lock()
			defer mu.Unlock()
			text, ok := content[name]
			if !ok {
				return nil
			}
			return Fixed{"v": Text(func() string { return text })}
		},
	})
	if names := list(t, dir); len(names) != 0 {
		t.Fatalf("the folder has %q", names)
	}
	set("a", "1")
	if got, err := read(dir + "/a/v"); got != "1\n" || err != nil {
		t.Fatalf("a/v is %q, %v", got, err)
	}
	inside, err := unix.Open(dir+"/a", unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(inside)
	set("a", "2")
	if got, err := read(dir + "/a/v"); got != "2\n" || err != nil {
		t.Errorf("a/v is %q, %v after the change", got, err)
	}
	if got, err := read(fmt.Sprintf("/proc/self/fd/%d/v", inside)); got != "2\n" || err != nil {
		t.Errorf("from inside v is %q, %v", got, err)
	}
	set("a", "")
	if _, err := read(dir + "/a/v"); err != unix.ENOENT {
		t.Errorf("a/v that is gone: %v", err)
	}
	set("b", "3")
	if names := list(t, dir); !slices.Equal(names, []string{"b"}) {
		t.Errorf("the folder has %q", names)
	}
}

// TestPanicIsAnError: a panic in a file breaks nothing else.
func TestPanicIsAnError(t *testing.T) {
	dir := serve(t, Fixed{
		"bad":   &File{Show: func() (string, error) { panic("oh") }, Store: func(context.Context, []byte) error { panic("no") }},
		"other": Text(func() string { return "here" }),
	})
	if _, err := read(dir + "/bad"); err != unix.EIO {
		t.Errorf("read: %v, want EIO", err)
	}
	if err := write(dir+"/bad", "1"); err != unix.EIO {
		t.Errorf("write: %v, want EIO", err)
	}
	if s, err := read(dir + "/other"); s != "here\n" || err != nil {
		t.Errorf("another file: %q, %v", s, err)
	}
}

func TestReadersThatStay(t *testing.T) {
	dir := serve(t, Fixed{"f": Text(func() string { return "text" })})
	var fds []int
	defer func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	}()
	for range 200 {
		fd, err := unix.Open(dir+"/f", unix.O_RDONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		fds = append(fds, fd)
		if n, err := unix.Read(fd, make([]byte, 2)); n != 2 || err != nil {
			t.Fatal(n, err)
		}
	}
	if s, err := read(dir + "/f"); s != "text\n" || err != nil {
		t.Errorf("another reader: %q, %v", s, err)
	} // serve's cleanup: the tree closes although they are open
}
