package nemesis

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// Effects of faults on processes and sessions. Faults overlap: a server is up
// while no fault wants it down.

func (w *world) killServer(*Fault) error { return w.takeDown(w.server.Kill) }
func (w *world) endServer(*Fault) error  { return w.takeDown(w.server.Stop) }

func (w *world) takeDown(how func() error) error {
	w.run.Lock()
	defer w.run.Unlock()
	w.downs++
	if w.downs > 1 {
		return nil
	}
	return how()
}

func (w *world) startServer(*Fault) error {
	w.run.Lock()
	defer w.run.Unlock()
	w.downs--
	if w.downs > 0 {
		return nil
	}
	return w.server.Start()
}

func (w *world) restartServer(f *Fault) error {
	if err := w.killServer(f); err != nil {
		return err
	}
	return w.startServer(f)
}

func (w *world) otherSettings(f *Fault) error { return w.useSettings(f, +1) }
func (w *world) usualSettings(f *Fault) error { return w.useSettings(f, -1) }

func (w *world) useSettings(f *Fault, n int) error {
	if err := w.killServer(f); err != nil {
		return err
	}
	w.run.Lock()
	w.other += n
	w.server.Options(w.settings(w.other)...)
	w.run.Unlock()
	return w.startServer(f)
}

func (w *world) freezeServer(*Fault) error {
	w.run.Lock()
	defer w.run.Unlock()
	w.frozen++
	if w.downs > 0 {
		return nil
	}
	return w.server.Signal(syscall.SIGSTOP)
}

func (w *world) thawServer(*Fault) error {
	w.run.Lock()
	defer w.run.Unlock()
	w.frozen--
	if w.downs > 0 || w.frozen > 0 {
		return nil
	}
	return w.server.Signal(syscall.SIGCONT)
}

func (w *world) freezeClient(*Fault) error { return w.client.Signal(syscall.SIGSTOP) }
func (w *world) thawClient(*Fault) error   { return w.client.Signal(syscall.SIGCONT) }

func (w *world) killFrontend(*Fault) error {
	return signal(w.client.PID(), "frontend-", syscall.SIGKILL)
}
func (w *world) freezeFrontend(*Fault) error {
	return signal(w.client.PID(), "frontend-", syscall.SIGSTOP)
}
func (w *world) thawFrontend(*Fault) error {
	return signal(w.client.PID(), "frontend-", syscall.SIGCONT)
}
func (w *world) stormFrontend(f *Fault) error {
	return storm(f, func() error { return w.killFrontend(f) })
}

// killPlugin spares the plugins of a server that starts: it would end with them.
func (w *world) killPlugin(*Fault) error {
	w.run.Lock()
	defer w.run.Unlock()
	return signal(w.server.PID(), "io-", syscall.SIGKILL)
}

func (w *world) freezePlugin(*Fault) error  { return signal(w.server.PID(), "io-", syscall.SIGSTOP) }
func (w *world) thawPlugin(*Fault) error    { return signal(w.server.PID(), "io-", syscall.SIGCONT) }
func (w *world) stormPlugin(f *Fault) error { return storm(f, func() error { return w.killPlugin(f) }) }

// storm repeats a kill while the fault lasts.
func storm(f *Fault, kill func() error) error {
	n := max(int(f.Size), 1)
	for range n {
		if err := kill(); err != nil {
			return err
		}
		time.Sleep(f.For.duration() / time.Duration(n))
	}
	return nil
}

// signal sends sig to the children of a daemon with names that begin with
// prefix. A daemon that is down has none.
func signal(daemon int, prefix string, sig syscall.Signal) error {
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return err
	}
	for _, name := range stats {
		stat, err := os.ReadFile(name)
		if err != nil {
			continue // it has ended
		}
		// PID (NAME) STATE PPID ...; the name may have spaces
		pid, rest, _ := bytes.Cut(stat, []byte(" ("))
		i := bytes.LastIndexByte(rest, ')')
		fields := bytes.Fields(rest[max(i, 0)+1:])
		if i < 0 || len(fields) < 2 || !bytes.HasPrefix(rest, []byte(prefix)) || string(fields[1]) != strconv.Itoa(daemon) {
			continue
		}
		if n, err := strconv.Atoi(string(pid)); err == nil && n > 1 {
			if err := syscall.Kill(n, sig); err != nil && err != syscall.ESRCH {
				return fmt.Errorf("signal %v to %s: %w", sig, rest[:i], err)
			}
		}
	}
	return nil
}

// reset ends the TCP connections of a path as if its peer had sent RST.
func (w *world) reset(f *Fault) error {
	addr, _, _ := strings.Cut(w.specs[f.Path], "@")
	out, err := exec.Command("ip", "netns", "exec", w.ns[0], "ss", "-K", "-t", "src", addr).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ss -K: %w: %s", err, out)
	}
	return nil
}

func (w *world) resetAll(*Fault) error {
	for path := range w.specs {
		if err := w.reset(&Fault{Path: path}); err != nil {
			return err
		}
	}
	return nil
}

// Commands may be refused or come too late in the middle of other faults; only
// the resulting state counts. heal repeats those that must have their effect.

const commandTime = 5 * time.Second

func command(f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), commandTime)
	defer cancel()
	return f(ctx)
}

// pathID finds the id of a path, in a list of client or server.
func pathID(paths []*controlpb.Path, spec string) (uint32, bool) {
	src, dst, _ := strings.Cut(spec, "@")
	dst, _, _ = strings.Cut(dst, "%")
	to := netip.MustParseAddrPort(dst).Addr().String()
	for _, p := range paths {
		if host, err := netip.ParseAddrPort(p.Dst); err == nil && (host.Addr().String() == to || host.Addr().String() == src) {
			return p.Id, true
		}
	}
	return 0, false
}

// onPath runs a command about a path that the client has.
func (w *world) onPath(f *Fault, do func(context.Context, *controlpb.PathRequest) error) error {
	return command(func(ctx context.Context) error {
		l, err := w.client.API.ListSessions(ctx, &controlpb.ListRequest{})
		if err != nil {
			return err
		}
		for _, s := range l.Sessions {
			if id, ok := pathID(s.Paths, w.specs[f.Path]); ok {
				return do(ctx, &controlpb.PathRequest{Session: s.Name, Id: id})
			}
		}
		return fmt.Errorf("there is no path %s", w.specs[f.Path])
	})
}

func (w *world) disconnectPath(f *Fault) error {
	return w.noted(w.onPath(f, func(ctx context.Context, r *controlpb.PathRequest) error {
		_, err := w.client.API.DisconnectPath(ctx, r)
		return err
	}))
}

func (w *world) reconnectPath(f *Fault) error {
	return w.noted(w.onPath(f, func(ctx context.Context, r *controlpb.PathRequest) error {
		_, err := w.client.API.ReconnectPath(ctx, r)
		return err
	}))
}

func (w *world) deletePath(f *Fault) error {
	return w.noted(w.onPath(f, func(ctx context.Context, r *controlpb.PathRequest) error {
		r.Force = true
		_, err := w.client.API.RemovePath(ctx, r)
		return err
	}))
}

func (w *world) addPath(f *Fault) error {
	return w.noted(command(func(ctx context.Context) error {
		_, err := w.client.API.AddPath(ctx, &controlpb.AddPathRequest{Session: session, Path: w.specs[f.Path]})
		return err
	}))
}

func (w *world) serverDisconnects(f *Fault) error {
	return w.noted(command(func(ctx context.Context) error {
		w.run.Lock()
		api := w.server.API
		w.run.Unlock()
		l, err := api.ListSessions(ctx, &controlpb.ListRequest{})
		if err != nil {
			return err
		}
		for _, s := range l.Sessions {
			if id, ok := pathID(s.Paths, w.specs[f.Path]); ok {
				_, err = api.DisconnectPath(ctx, &controlpb.PathRequest{Session: s.Name, Id: id})
			}
		}
		return err
	}))
}

func (w *world) reconnectSession(f *Fault) error {
	for path := range w.specs {
		if err := w.reconnectPath(&Fault{Path: path}); err != nil {
			return err
		}
	}
	return nil
}

func (w *world) remap(*Fault) error {
	for _, name := range w.names {
		_ = w.noted(command(func(ctx context.Context) error {
			_, err := w.client.API.Remap(ctx, &controlpb.RemapRequest{Device: name})
			return err
		}))
	}
	return nil
}

// noted logs the failure of a command that may fail.
func (w *world) noted(err error) error {
	if err != nil {
		w.log("      %v", err)
	}
	return nil
}

// heal repeats the commands that must have their effect when all faults have
// ended: it adds and connects paths that commands removed, or that have given
// up.
func (w *world) heal(s *Schedule) {
	ended := time.Now()
	for _, f := range s.Faults {
		switch f.Kind {
		case "path delete":
			for w.onPath(&f, func(context.Context, *controlpb.PathRequest) error { return nil }) != nil && time.Since(ended) < patience {
				_ = w.addPath(&f)
				time.Sleep(500 * time.Millisecond)
			}
		case "path disconnect", "server settings":
			for path := range w.specs {
				if w.closed(path) {
					_ = w.reconnectPath(&Fault{Path: path})
				}
			}
		}
	}
}

// closed reports whether a path waits for a command.
func (w *world) closed(path int) (closed bool) {
	_ = command(func(ctx context.Context) error {
		l, err := w.client.API.ListSessions(ctx, &controlpb.ListRequest{})
		if err != nil {
			return err
		}
		for _, s := range l.Sessions {
			for _, p := range s.Paths {
				id, ok := pathID(s.Paths, w.specs[path])
				closed = closed || ok && p.Id == id && p.State == "closed"
			}
		}
		return nil
	})
	return closed
}
