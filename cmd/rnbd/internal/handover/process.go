package handover

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sockpair"
)

// Socket is a socket that listens, with the name under which the next process finds
// it. Several may have one name.
type Socket struct {
	Name string
	File *os.File
}

// Version is that of the lines and of the environment.
const Version = 1

// Environment names the variable that describes the descriptors. Its value is a
// description in JSON.
const Environment = "RNBD_HANDOVER"

// description is the value of Environment. Sockets are the names of the
// descriptors from 4 on.
type description struct {
	Version int      `json:"version"`
	Sockets []string `json:"sockets"`
}

// Process is the next process of a daemon.
type Process struct {
	cmd  *exec.Cmd
	pair *pair
	done chan struct{} // closed when the process has ended
	err  error         // its end; read after done
}

// Start starts the next process: a program with its arguments, on the standard
// streams of this process. The sockets stay the caller's.
func Start(program string, args, env []string, sockets []Socket) (*Process, error) {
	ours, theirs, err := newPair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	d := description{Version: Version}
	files := []*os.File{theirs}
	for _, s := range sockets {
		f, err := plainCopy(s.File)
		if err != nil {
			ours.conn.Close()
			return nil, fmt.Errorf("socket %q: %w", s.Name, err)
		}
		defer f.Close()
		d.Sockets = append(d.Sockets, s.Name)
		files = append(files, f)
	}
	text, err := json.Marshal(d)
	if err != nil {
		ours.conn.Close()
		return nil, err
	}
	cmd := exec.Command(program, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = os.Stdin, os.Stdout, os.Stderr, files
	cmd.Env = append(env, Environment+"="+string(text))
	if err := cmd.Start(); err != nil {
		ours.conn.Close()
		return nil, err
	}
	p := &Process{cmd: cmd, pair: ours, done: make(chan struct{})}
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// PID returns the number of the process.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Ready waits until the process is prepared, and returns its version.
func (p *Process) Ready(ctx context.Context) (version string, err error) {
	if version, err = p.await(ctx, wordReady); err != nil {
		return "", fmt.Errorf("the new process %d is not ready: %w", p.PID(), err)
	}
	return version, nil
}

// Go tells the process to serve. devices is the number of devices that clients had
// open.
func (p *Process) Go(devices int) error { return p.Why(p.pair.say(wordGo, strconv.Itoa(devices))) }

// State passes on the state of this process, as a text in one line.
func (p *Process) State(text string) error { return p.Why(p.pair.say(wordState, text)) }

// Yours tells the process that nothing of the state is taken back.
func (p *Process) Yours() error { return p.Why(p.pair.say(wordYours, "")) }

// Why returns the end of the process in place of err, an error of sending something to
// it, if it has ended.
func (p *Process) Why(err error) error {
	if err == nil {
		return nil
	}
	select {
	case <-p.done:
		return fmt.Errorf("the new process %d has ended: %w", p.PID(), endOf(p.err))
	case <-time.After(time.Second):
		return err
	}
}

// Serving waits until the process serves.
func (p *Process) Serving(ctx context.Context) error {
	if _, err := p.await(ctx, wordServing); err != nil {
		return fmt.Errorf("the new process %d does not serve: %w", p.PID(), err)
	}
	return nil
}

// await waits for a word of the process, and returns the rest of its line.
func (p *Process) await(ctx context.Context, word string) (rest string, err error) {
	rest, err = p.pair.hear(ctx, word)
	if !errors.Is(err, io.EOF) {
		return rest, err
	}
	select {
	case <-p.done:
		return "", fmt.Errorf("it has ended: %w", endOf(p.err))
	case <-time.After(time.Second):
		return "", errors.New("it does not take part, as a program that cannot be handed over to")
	}
}

// endOf gives a process that ended without an error one.
func endOf(err error) error {
	if err == nil {
		return errors.New("exit status 0")
	}
	return err
}

// Kill ends the process, and waits for that.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill() // it may have ended
	<-p.done
	p.pair.conn.Close()
}

// Words of the lines.
const (
	wordReady   = "ready"
	wordState   = "state"
	wordYours   = "yours"
	wordGo      = "go"
	wordServing = "serving"
	wordFailed  = "failed"
)

// pair is one end of the socket pair.
type pair struct {
	conn  *net.UnixConn
	mu    sync.Mutex // held while a line is read
	lines *bufio.Reader
}

// newPair makes a socket pair. The other end is for the next process.
func newPair() (*pair, *os.File, error) {
	conn, theirs, err := sockpair.New(unix.SOCK_STREAM, "handover")
	if err != nil {
		return nil, nil, err
	}
	return join(conn), theirs, nil
}

func join(conn *net.UnixConn) *pair { return &pair{conn: conn, lines: bufio.NewReader(conn)} }

// lineTime bounds the writing of a line.
const lineTime = 5 * time.Second

// say sends a word and the rest of its line.
func (p *pair) say(word, rest string) error {
	p.conn.SetWriteDeadline(time.Now().Add(lineTime))
	_, err := fmt.Fprintf(p.conn, "%s %s\n", word, rest)
	return err
}

// hear waits for a line that begins with word, and returns the rest of it. Lines
// with other words, of later versions, are passed over.
func (p *pair) hear(ctx context.Context, word string) (rest string, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conn.SetReadDeadline(time.Time{})
	defer context.AfterFunc(ctx, func() { p.conn.SetReadDeadline(time.Now()) })()
	for {
		line, err := p.lines.ReadString('\n')
		if ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		if errors.Is(err, syscall.ECONNRESET) { // it has ended before it read all
			err = io.EOF
		}
		if err != nil {
			return "", err
		}
		got, rest, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		switch got {
		case word:
			return rest, nil
		case wordFailed:
			why, err := strconv.Unquote(rest)
			if err != nil {
				why = rest
			}
			return "", errors.New(why)
		}
	}
}
