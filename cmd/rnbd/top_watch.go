package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/top"
)

// fullScreen is a terminal that shows one screen after the other.
type fullScreen struct {
	in, out *os.File
	before  unix.Termios
}

// takeTerminal has the keys of in come one by one, without echo, and has out show an
// empty screen. Signals of the terminal stay, but the one that stops: the terminal
// would be left as it is.
func takeTerminal(in, out *os.File) (*fullScreen, error) {
	now, err := unix.IoctlGetTermios(int(in.Fd()), unix.TCGETS)
	if err != nil {
		return nil, fmt.Errorf("the terminal: %w", err)
	}
	f := &fullScreen{in, out, *now}
	now.Iflag &^= unix.ICRNL | unix.IXON
	now.Lflag &^= unix.ICANON | unix.ECHO | unix.IEXTEN
	now.Cc[unix.VMIN], now.Cc[unix.VTIME], now.Cc[unix.VSUSP] = 1, 0, 0
	if err := unix.IoctlSetTermios(int(in.Fd()), unix.TCSETS, now); err != nil {
		return nil, fmt.Errorf("the terminal: %w", err)
	}
	_, err = out.WriteString("\x1b[?1049h\x1b[?25l\x1b[?7l") // second screen, no cursor, no wrapping
	if err != nil {
		f.restore()
	}
	return f, err
}

// restore undoes takeTerminal. Keys that were not read are dropped.
func (f *fullScreen) restore() {
	// Both are tried: a terminal that hung up takes neither.
	_, _ = f.out.WriteString("\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l")
	_ = unix.IoctlSetTermios(int(f.in.Fd()), unix.TCSETSF, &f.before)
}

func (f *fullScreen) size() (width, height int) {
	size, err := unix.IoctlGetWinsize(int(f.out.Fd()), unix.TIOCGWINSZ)
	if err != nil || size.Col == 0 || size.Row == 0 {
		return 80, 24
	}
	return int(size.Col), int(size.Row)
}

func (f *fullScreen) draw(lines []string) error {
	var b bytes.Buffer
	b.WriteString("\x1b[H")
	b.WriteString(strings.Join(lines, "\x1b[K\r\n"))
	b.WriteString("\x1b[K\x1b[J")
	_, err := f.out.Write(b.Bytes())
	return err
}

// topWatch is a run of top on a terminal.
type topWatch struct {
	topOptions
	screen      *fullScreen
	color       bool
	before, now *top.Sample
	typed       []byte // the begin of a key
}

// escapeTime is how long the rest of a control sequence may take. Without a rest it
// was the key Escape.
const escapeTime = 100 * time.Millisecond

// watch shows screens until q or a signal.
func (t *topSampler) watch(ctx context.Context, in, out *os.File, o topOptions, color bool) error {
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGWINCH, syscall.SIGHUP, syscall.SIGQUIT)
	defer signal.Stop(signals)
	screen, err := takeTerminal(in, out)
	if err != nil {
		return err
	}
	defer screen.restore() // after a panic, too
	ctx, cancel := context.WithCancel(ctx)
	asked := make(chan string, 1) // views
	samples, broken, ended := make(chan *top.Sample), make(chan any, 1), make(chan struct{})
	go func() {
		defer close(ended)
		t.answer(ctx, asked, samples, broken)
	}()
	defer func() { cancel(); <-ended }()
	w := &topWatch{topOptions: o, screen: screen, color: color}
	return w.run(ctx, readKeys(in), signals, asked, samples, broken)
}

// answer takes a sample for each view that is asked for. A panic is sent on, so that
// it comes up where the terminal is restored.
func (t *topSampler) answer(ctx context.Context, asked <-chan string, samples chan<- *top.Sample, broken chan<- any) {
	defer func() {
		if p := recover(); p != nil {
			broken <- p
		}
	}()
	for {
		select {
		case <-ctx.Done():
			return
		case view := <-asked:
			select {
			case samples <- t.sample(ctx, view):
			case <-ctx.Done():
			}
		}
	}
}

// readKeys returns typed bytes; the channel is closed when the terminal is gone. It
// reads until the process ends.
func readKeys(in *os.File) <-chan []byte {
	keys := make(chan []byte)
	go func() {
		defer close(keys)
		for {
			b := make([]byte, 256)
			n, err := in.Read(b)
			if err != nil || n == 0 {
				return
			}
			keys <- b[:n]
		}
	}()
	return keys
}

func (w *topWatch) run(ctx context.Context, keys <-chan []byte, signals <-chan os.Signal, asked chan<- string, samples <-chan *top.Sample, broken <-chan any) error {
	ticks := time.NewTicker(w.interval)
	defer ticks.Stop()
	asked <- w.state.View
	waiting := true
	var escape <-chan time.Time
	for !w.state.Quit {
		select {
		case <-ctx.Done():
			return nil
		case s := <-signals:
			if s != syscall.SIGWINCH {
				return nil
			}
		case typed, ok := <-keys:
			if !ok {
				return nil
			}
			escape = nil
			if w.press(typed, false); len(w.typed) > 0 {
				escape = time.After(escapeTime)
			}
		case <-escape:
			w.press(nil, true)
		case <-ticks.C:
			if !waiting && !w.state.Paused {
				asked <- w.state.View
				waiting = true
			}
			continue
		case s := <-samples:
			waiting = false
			if w.now != nil && w.state.Paused { // asked for before the pause
				continue
			}
			w.before, w.now = w.now, s
		case p := <-broken:
			panic(p)
		}
		if err := w.draw(); err != nil {
			return err
		}
	}
	return nil
}

// press has the state follow the keys that were typed.
func (w *topWatch) press(typed []byte, final bool) {
	var keys []top.Key
	keys, w.typed = top.Decode(append(w.typed, typed...), final)
	for _, k := range keys {
		w.state.Press(k)
	}
}

func (w *topWatch) draw() error {
	if w.now == nil {
		return nil
	}
	width, height := w.screen.size()
	return w.screen.draw(top.Screen(w.state, w.before, w.now, w.interval, top.Size{Width: width, Height: height, Color: w.color}))
}
