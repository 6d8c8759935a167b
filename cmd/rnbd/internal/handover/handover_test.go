package handover

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// behaviour selects what this program does as the next process.
const behaviour = "HANDOVER_TEST"

func TestMain(m *testing.M) {
	if b := os.Getenv(behaviour); b != "" {
		if err := next(b); err != nil {
			os.Stderr.WriteString(err.Error() + "\n")
			os.Exit(9)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// next is the next process.
func next(behaviour string) error {
	if behaviour == "exit" {
		return errors.New("this one exits")
	}
	p, err := Inherited()
	if err != nil {
		return err
	}
	if os.Getenv(Environment) != "" {
		return errors.New("plugins would get the description")
	}
	switch behaviour {
	case "fail":
		p.Failed(errors.New("a \"reason\"\nof two lines"))
		return nil
	case "hang":
		return p.AwaitEnd(context.Background())
	}
	l, err := net.FileListener(p.Take("echo"))
	if err != nil {
		return err
	}
	if p.Take("echo") != nil || p.Take("nothing") != nil {
		return errors.New("there are more sockets")
	}
	if err := p.Ready("v2 of\nit"); err != nil {
		return err
	}
	n, err := p.AwaitGo(context.Background())
	if err != nil || behaviour == "die" {
		return errors.Join(err, errors.New("dead"))
	}
	if n != 7 {
		return errors.New("another number")
	}
	if err := p.Serving(); err != nil {
		return err
	}
	if err := p.AwaitEnd(context.Background()); err != nil {
		return err
	}
	c, err := l.Accept()
	if err != nil {
		return err
	}
	defer c.Close()
	_, err = io.Copy(c, io.LimitReader(c, 5))
	return err
}

// begin starts the next process with a socket.
func begin(t *testing.T, b string) (p *Process, addr string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f, err := l.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	p, err = Start(os.Args[0], nil, append(os.Environ(), behaviour+"="+b), []Socket{{"echo", f}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
	t.Cleanup(func() {
		if flags := flagsOf(t, l); flags&unix.O_NONBLOCK == 0 {
			t.Error("the socket blocks, and with it whoever closes it while it is accepting")
		}
		l.Close()
		f.Close()
	})
	return p, l.Addr().String()
}

func flagsOf(t *testing.T, l net.Listener) (flags int) {
	t.Helper()
	raw, err := l.(*net.TCPListener).SyscallConn()
	if err == nil {
		cerr := raw.Control(func(fd uintptr) { flags, err = unix.FcntlInt(fd, unix.F_GETFL, 0) })
		err = errors.Join(err, cerr)
	}
	if err != nil {
		t.Fatal(err)
	}
	return flags
}

func bounded(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func TestHandOver(t *testing.T) {
	p, addr := begin(t, "serve")
	version, err := p.Ready(bounded(t))
	if err != nil || version != "v2 of it" {
		t.Fatalf("ready: %q, %v", version, err)
	}
	c, err := net.Dial("tcp", addr) // it waits in the backlog
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := p.Go(7); err != nil {
		t.Fatal(err)
	}
	if err := p.Serving(bounded(t)); err != nil {
		t.Fatal(err)
	}
	p.pair.conn.Close() // this process ends
	c.SetDeadline(time.Now().Add(time.Minute))
	c.Write([]byte("hello"))
	b := make([]byte, 5)
	if _, err := io.ReadFull(c, b); err != nil || string(b) != "hello" {
		t.Errorf("%q, %v", b, err)
	}
}

func TestProcessesThatDoNotGetReady(t *testing.T) {
	for b, want := range map[string]string{"exit": "exit status 9", "fail": "a \"reason\"\nof two lines"} {
		p, _ := begin(t, b)
		if _, err := p.Ready(bounded(t)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", b, err, want)
		}
	}
	p, _ := begin(t, "hang")
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := p.Ready(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
	p.Kill()
	p.Kill() // for the second time, too
}

func TestProcessThatDiesBeforeItServes(t *testing.T) {
	p, _ := begin(t, "die")
	if _, err := p.Ready(bounded(t)); err != nil {
		t.Fatal(err)
	}
	if err := p.Go(7); err != nil {
		t.Fatal(err)
	}
	if err := p.Serving(bounded(t)); err == nil || !strings.Contains(err.Error(), "exit status 9") {
		t.Errorf("%v", err)
	}
}

func TestWithoutAPredecessor(t *testing.T) {
	p, err := Inherited()
	if p != nil || err != nil {
		t.Fatalf("%v, %v", p, err)
	}
	if p.Take("control") != nil {
		t.Error("a socket of nobody")
	}
	p.Failed(errors.New("x"))
}
