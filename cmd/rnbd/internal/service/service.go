package service

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Manager is the service manager that started this process. The zero value
// stands for none. Its methods may be called at the same time.
type Manager struct {
	notify   *net.UnixAddr // nil: the manager awaits no messages
	watchdog time.Duration // the manager kills a process that is silent for so long; 0: never
	sockets  map[string][]*os.File
}

// firstFD is the first descriptor of sockets that the manager passes.
const firstFD = 3

// The environment of sd_notify(3), sd_watchdog_enabled(3) and sd_listen_fds(3).
const (
	envNotify   = "NOTIFY_SOCKET"
	envInterval = "WATCHDOG_USEC"
	envWatched  = "WATCHDOG_PID"
	envPID      = "LISTEN_PID"
	envNumber   = "LISTEN_FDS"
	envNames    = "LISTEN_FDNAMES"
)

// Meet returns the manager that the environment describes, and takes the
// description out of the environment, so that plugins do not get it. Call it
// once in a process, before descriptors are opened. The error is that of a
// description without sense.
func Meet() (*Manager, error) {
	defer forget()
	m := &Manager{sockets: map[string][]*os.File{}}
	if name := os.Getenv(envNotify); name != "" {
		m.notify = &net.UnixAddr{Name: name, Net: "unixgram"}
	}
	if text := os.Getenv(envInterval); text != "" && isMine(envWatched) {
		us, err := strconv.ParseInt(text, 10, 64)
		if err != nil || us <= 0 {
			return nil, fmt.Errorf("environment %s=%q is no number of microseconds", envInterval, text)
		}
		m.watchdog = time.Duration(us) * time.Microsecond
	}
	if text := os.Getenv(envNumber); text != "" && os.Getenv(envPID) != "" && isMine(envPID) {
		return m, m.take(text, strings.Split(os.Getenv(envNames), ":"))
	}
	return m, nil
}

// take makes files of the descriptors.
func (m *Manager) take(number string, names []string) error {
	n, err := strconv.Atoi(number)
	if err != nil || n < 0 || n > 1024 {
		return fmt.Errorf("environment %s=%q is no number of sockets", envNumber, number)
	}
	for i := range n {
		name := "unknown" // systemd's name of sockets without one
		if i < len(names) && names[i] != "" {
			name = names[i]
		}
		unix.CloseOnExec(firstFD + i)
		m.sockets[name] = append(m.sockets[name], os.NewFile(uintptr(firstFD+i), name))
	}
	return nil
}

// isMine reports whether the variable names this process, or nothing.
func isMine(variable string) bool {
	text := os.Getenv(variable)
	return text == "" || text == strconv.Itoa(os.Getpid())
}

func forget() {
	for _, name := range []string{envNotify, envInterval, envWatched, envPID, envNumber, envNames} {
		os.Unsetenv(name)
	}
}

// Sockets returns the listening sockets that the manager holds under a name.
// The caller owns them from the first call on.
func (m *Manager) Sockets(name string) []*os.File {
	files := m.sockets[name]
	delete(m.sockets, name)
	return files
}

// Others returns the names of the sockets that were not asked for.
func (m *Manager) Others() (names []string) {
	for name := range m.sockets {
		names = append(names, name)
	}
	return names
}

// Ready says that the daemon serves; of a reload, that it is over.
func (m *Manager) Ready(status string) { m.send("READY=1\nSTATUS=" + status) }

// Reloading says that the daemon reads its configuration again. Ready follows.
func (m *Manager) Reloading() {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) // it does not fail
	m.send(fmt.Sprintf("RELOADING=1\nMONOTONIC_USEC=%d", now.Nano()/1000))
}

// Stopping says that the daemon ends, within limit.
func (m *Manager) Stopping(limit time.Duration) {
	m.send(fmt.Sprintf("STOPPING=1\nWATCHDOG=1\nEXTEND_TIMEOUT_USEC=%d", limit.Microseconds()))
}

// MainProcess says that another process of the service is its main one.
func (m *Manager) MainProcess(pid int) { m.send(fmt.Sprintf("MAINPID=%d", pid)) }

// Environment describes the manager to another process of the service. The sockets
// are not part of it.
func (m *Manager) Environment() (env []string) {
	if m.notify != nil {
		env = append(env, envNotify+"="+m.notify.Name)
	}
	if m.watchdog > 0 {
		env = append(env, envInterval+"="+strconv.FormatInt(m.watchdog.Microseconds(), 10))
	}
	return env
}

// askTime bounds a question to the manager.
const askTime = 3 * time.Second

// HostStops reports whether the manager is taking the host down. It asks
// systemctl; without an answer the host stays up.
func (m *Manager) HostStops(ctx context.Context) bool {
	if m.notify == nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	out, _ := exec.CommandContext(ctx, "systemctl", "is-system-running").Output() // it fails in any state but one
	return strings.TrimSpace(string(out)) == "stopping"
}

// send gives the manager a message. One that does not arrive costs the daemon
// nothing: the manager sees to a service that is silent.
func (m *Manager) send(text string) {
	if m.notify == nil {
		return
	}
	c, err := net.DialUnix("unixgram", nil, m.notify)
	if err != nil {
		return
	}
	defer c.Close()
	c.SetWriteDeadline(time.Now().Add(time.Second))
	c.Write([]byte(text))
}

// Watch tells the watchdog of the manager, until ctx ends, that the daemon is
// alive, as long as alive returns nil. alive has a third of the interval to
// answer. Watch returns at once if the manager has no watchdog.
func (m *Manager) Watch(ctx context.Context, log *slog.Logger, alive func(context.Context) error) {
	if m.watchdog == 0 {
		return
	}
	turn := time.NewTicker(m.watchdog / 3)
	defer turn.Stop()
	for well := true; ; {
		check, cancel := context.WithTimeout(ctx, m.watchdog/3)
		err := alive(check)
		cancel()
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			m.send("WATCHDOG=1")
		case well:
			log.Error("the daemon hangs: unless that ends, the service manager will kill it", "within", m.watchdog, "err", err)
		}
		well = err == nil
		select {
		case <-ctx.Done():
			return
		case <-turn.C:
		}
	}
}
