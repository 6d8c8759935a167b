package handover

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sockpair"
)

// Predecessor is the process that hands over to this one.
type Predecessor struct {
	pair    *pair
	sockets map[string][]*os.File
}

// pairFD is the descriptor of the socket pair. Those of sockets follow.
const pairFD = 3

// Inherited returns the predecessor that the environment describes, nil if there is
// none, and takes the description out of the environment. Call it once in a process,
// before descriptors are opened.
func Inherited() (*Predecessor, error) {
	text := os.Getenv(Environment)
	if text == "" {
		return nil, nil
	}
	os.Unsetenv(Environment)
	var d description
	if err := json.Unmarshal([]byte(text), &d); err != nil {
		return nil, fmt.Errorf("environment %s=%q: %w", Environment, text, err)
	}
	unix.CloseOnExec(pairFD)
	conn, err := sockpair.Conn(os.NewFile(pairFD, "handover"))
	if err != nil {
		return nil, fmt.Errorf("environment %s: descriptor %d: %w", Environment, pairFD, err)
	}
	p := join(conn)
	if d.Version != Version {
		err := fmt.Errorf("the running process hands over by version %d, this program knows %d: restart the daemon in place of upgrading it", d.Version, Version)
		p.say(wordFailed, strconv.Quote(err.Error()))
		return nil, err
	}
	pre := &Predecessor{pair: p, sockets: map[string][]*os.File{}}
	for i, name := range d.Sockets {
		f, err := plain(pairFD+1+i, name)
		if err != nil {
			return nil, fmt.Errorf("socket %q: %w", name, err)
		}
		unix.Close(pairFD + 1 + i)
		pre.sockets[name] = append(pre.sockets[name], f)
	}
	return pre, nil
}

// Take returns the next socket of a name, nil if there is none. The caller owns it.
func (p *Predecessor) Take(name string) *os.File {
	if p == nil || len(p.sockets[name]) == 0 {
		return nil
	}
	f := p.sockets[name][0]
	p.sockets[name] = p.sockets[name][1:]
	return f
}

// TakeAll returns the sockets of a name.
func (p *Predecessor) TakeAll(name string) (all []*os.File) {
	for f := p.Take(name); f != nil; f = p.Take(name) {
		all = append(all, f)
	}
	return all
}

// Drop closes the sockets that were not taken.
func (p *Predecessor) Drop() {
	for name, files := range p.sockets {
		for _, f := range files {
			f.Close()
		}
		delete(p.sockets, name)
	}
}

// Ready says that this process is prepared.
func (p *Predecessor) Ready(version string) error {
	return p.pair.say(wordReady, strings.ReplaceAll(version, "\n", " "))
}

// AwaitState waits for the state of the predecessor.
func (p *Predecessor) AwaitState(ctx context.Context) (text string, err error) {
	text, err = p.pair.hear(ctx, wordState)
	if errors.Is(err, io.EOF) {
		err = errCalledOff
	}
	return text, err
}

var errCalledOff = errors.New("the running process has ended, or has called the upgrade off")

// AwaitYours waits until the predecessor takes nothing of its state back: it says so,
// or has ended.
func (p *Predecessor) AwaitYours(ctx context.Context) error {
	if _, err := p.pair.hear(ctx, wordYours); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}

// AwaitGo waits until the predecessor serves no more, and returns the number of
// devices that its clients had open.
func (p *Predecessor) AwaitGo(ctx context.Context) (devices int, err error) {
	text, err := p.pair.hear(ctx, wordGo)
	if errors.Is(err, io.EOF) {
		err = errCalledOff
	}
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(text)
}

// Serving says that this process serves.
func (p *Predecessor) Serving() error { return p.pair.say(wordServing, "") }

// Failed says why this process ends. Without a predecessor it does nothing.
func (p *Predecessor) Failed(why error) {
	if p != nil {
		_ = p.pair.say(wordFailed, strconv.Quote(why.Error())) // it may have ended
	}
}

// AwaitEnd waits for the end of the predecessor.
func (p *Predecessor) AwaitEnd(ctx context.Context) error {
	_, err := p.pair.hear(ctx, "end")
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	p.pair.conn.Close()
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}
