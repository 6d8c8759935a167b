package main

import (
	"cmp"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

const (
	defaultConnections = 4
	maxConnections     = 16
	defaultReconnect   = 30 * time.Second
)

// settings are those of the plugin: README.md lists them.
type settings struct {
	server      nbdwire.Address // of a remote server
	run         string          // command of a captive server; empty: the server is remote
	lock        string          // file that the captive server inherits locked
	export      string          // of all names, unless byName is set
	byName      bool            // the name of a device is that of its export
	crash       plugin.CrashClass
	replay      bool // requests in flight are sent again on a new connection
	connections int
	reconnect   time.Duration
}

// parseSettings reads the settings of the host.
func parseSettings(in map[string]string) (s settings, err error) {
	s = settings{connections: defaultConnections, reconnect: defaultReconnect, crash: plugin.KeepsFlushed}
	for key, value := range in {
		if err := s.set(key, value); err != nil {
			return s, fmt.Errorf("%w: %w", err, blk.EINVAL)
		}
	}
	return s, s.complete(in)
}

// set reads one setting.
func (s *settings) set(key, value string) (err error) {
	switch key {
	case "uri":
		s.server, err = nbdwire.ParseURI(value)
	case "run":
		s.run = value
	case "lock":
		if s.lock = value; !filepath.IsAbs(value) {
			err = fmt.Errorf("lock %q is no absolute path", value)
		}
	case "export":
		s.export = value
	case "keeps":
		s.crash, err = parseKeeps(value)
	case "replay":
		if s.replay = value == "unsafe"; !s.replay && value != "off" {
			err = fmt.Errorf("replay %q: write unsafe or off", value)
		}
	case "connections":
		s.connections, err = strconv.Atoi(value)
		if err != nil || s.connections < 1 || s.connections > maxConnections {
			err = fmt.Errorf("connections %q: want 1 to %d", value, maxConnections)
		}
	case "reconnect":
		s.reconnect, err = time.ParseDuration(value)
		if err != nil || s.reconnect < 0 {
			err = fmt.Errorf("reconnect %q: want a duration, such as 30s", value)
		}
	default:
		err = fmt.Errorf("setting %q is not known; known are uri, run, lock, export, keeps, replay, connections and reconnect", key)
	}
	return err
}

func parseKeeps(value string) (plugin.CrashClass, error) {
	switch value {
	case "acknowledged":
		return plugin.KeepsAcknowledged, nil
	case "flushed":
		return plugin.KeepsFlushed, nil
	case "nothing":
		return plugin.LosesAll, nil
	}
	return 0, fmt.Errorf("keeps %q: write acknowledged, flushed or nothing", value)
}

// complete checks the settings against each other and fills in the rest.
func (s *settings) complete(in map[string]string) error {
	_, named := in["export"]
	_, keeps := in["keeps"]
	switch {
	case (s.run == "") == (s.server.Address == ""):
		return fmt.Errorf("set either uri, the address of an NBD server, or run, the command of one: %w", blk.EINVAL)
	case s.run == "" && s.lock != "":
		return fmt.Errorf("lock is of a server started by run: %w", blk.EINVAL)
	case s.run == "" && keeps:
		return fmt.Errorf("keeps is of a server started by run; what a remote server keeps is not known, and replay=unsafe repeats requests all the same: %w", blk.EINVAL)
	case s.run != "" && s.replay:
		return fmt.Errorf("replay is of a remote server; requests to a server started by run are repeated with keeps=acknowledged: %w", blk.EINVAL)
	case s.run != "" && s.lock == "":
		return fmt.Errorf("run needs lock, a file or folder that no other server uses, for instance its image: the next process of the plugin waits for the end of the server by it: %w", blk.EINVAL)
	}
	if s.run != "" {
		return s.completeRun()
	}
	if !named {
		s.export = s.server.Export
	}
	s.byName = !named && !s.server.Named || s.export == "*"
	if s.replay {
		s.crash = plugin.KeepsAcknowledged
	}
	return nil
}

// completeRun gives nbdkit its socket. Other servers name theirs by $socket.
func (s *settings) completeRun() error {
	s.byName = s.export == "*"
	if strings.Contains(s.run, "$socket") || strings.Contains(s.run, "${socket}") {
		return nil
	}
	program, rest, _ := strings.Cut(strings.TrimSpace(s.run), " ")
	if filepath.Base(program) != "nbdkit" {
		return fmt.Errorf("run %q: the command of a server other than nbdkit says where it listens, by $socket: %w", s.run, blk.EINVAL)
	}
	s.run = program + ` --foreground --exit-with-parent --unix "$socket" ` + rest
	return nil
}

// exportOf returns the export of a device.
func (s *settings) exportOf(device string) string {
	if s.byName {
		return device
	}
	return s.export
}

// where names the server in messages.
func (s *settings) where() string { return cmp.Or(s.run, s.server.Address) }
