package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/spell"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

func mapVerbs() []*verb {
	return []*verb{
		{
			name: "map", on: onClient, bare: true, min: 1, max: -1, keyword: "from", args: "DEVICE from SERVER [PATH...] [ro|rw|migration]",
			words: outputWords | accessWords, flags: mapFlags, args0: mapWords, run: mapDevice, interrupted: mapLeft,
			short: "Map a device of a server",
			long: `Map opens DEVICE on the server and makes it a device here.

SERVER is an address, a host name, or the name of a session that is there. It
and each PATH is one path to the same server, [SRC@]ADDRESS[:PORT][%FABRIC],
where an ADDRESS is an IP address or gid:GID; requests are spread over all of
them, and go on as long as one is left. With --session alone an open session is
used again.`,
			example: `  rnbd map disk.img from 192.0.2.1
  rnbd map vg0/lv1 from 10.0.0.2@10.0.0.1 10.1.0.2@10.1.0.1 ro --loss queue:30s
  rnbd map vg0/lv2 from web1@storage`,
		},
		{
			name: "map-line", on: onClient, bare: true, min: 1, max: 1, args: "LINE|-", words: outputWords, run: mapLine, interrupted: mapLeft,
			short: "Map by a line as the kernel's map_device takes it",
			long: `Map what a line asks for that was written for the kernel's control file
map_device. With - lines are read from standard input, one device each.`,
			example: "  rnbd map-line 'sessname=s1 path=ip:192.0.2.1 device_path=disk.img access_mode=ro'\n  rnbd map-line - < /etc/rnbd/mappings",
		},
	}
}

// mapLeft describes the state after a signal ended a map: the daemon sees the
// end of the call, and undoes the mapping.
const mapLeft = "the daemon takes the mapping back; `rnbd list` shows what was mapped before"

// partLeft describes the state after a signal ended another change: the daemon
// goes on to its end.
const partLeft = "the daemon may have done it, or a part of it; `rnbd list` shows what is there"

func mapFlags(f *pflag.FlagSet) {
	f.String("session", "", "name of the session (default made from host and address)")
	f.String("frontend", "", "front end that serves it: auto, ublk, nbd, nbd-socket, fuse, fuse-loop (default the daemon's)")
	f.String("loss", "", "fail, or queue:DURATION (default the daemon's)")
	f.String("io-mode", "", "io plugin of the server that opens it: fileio, blockio (default the server's choice)")
	f.String("name", "", "name of the device here (default rnbdN)")
	f.Bool("persist", false, "map it again at each start of the daemon: a file in its configuration folder says so")
	f.StringToString("option", nil, "KEY=VALUE for the front end, repeatable")
}

func mapDevice(c *call) error {
	r := &controlpb.MapRequest{
		Path: c.args[0], Session: c.text("session"), AccessMode: c.access,
		Frontend: c.text("frontend"), Loss: c.text("loss"), Name: c.text("name"), IoMode: c.text("io-mode"),
	}
	var err error
	if r.Options, err = c.cmd.Flags().GetStringToString("option"); err != nil {
		return err
	}
	if err := c.checkFrom(r.Session); err != nil {
		return err
	}
	return c.with(func(ctx context.Context, d *daemons) error {
		keep := c.text("persist") == "true"
		if keep { // before anything is done
			if _, err := persistFile(ctx, d.client, "x"); err != nil {
				return err
			}
		}
		mapped, err := c.mapFrom(ctx, d, r, c.args[min(2, len(c.args)):])
		if err != nil {
			return mapHint(err, r)
		}
		if keep {
			if err := c.persist(ctx, d, mapped, r); err != nil {
				return err
			}
		}
		return c.printMapped(ctx, d, mapped)
	})
}

// persist saves the mapped device in the configuration.
func (c *call) persist(ctx context.Context, d *daemons, mapped *controlpb.ClientDevice, r *controlpb.MapRequest) error {
	file, err := persistFile(ctx, d.client, mapped.Name)
	if err != nil {
		return err
	}
	inv, err := d.look(ctx, false)
	if err != nil {
		return err
	}
	if err := persist(file, inv, mappedDevice(mapped, ""), r); err != nil {
		return err
	}
	c.say("%s is written down in %s", mapped.Name, file)
	return nil
}

// checkFrom checks the words after the device: "from" and a server, or nothing
// if a session is named.
func (c *call) checkFrom(session string) error {
	device, word := c.args[0], c.arg(1)
	wrong := func(format string, args ...any) error {
		return usageError{fmt.Errorf(format+"; write: rnbd map %s from ADDRESS, or: rnbd map %s --session NAME", append(args, device, device)...)}
	}
	switch {
	case word == "from" && len(c.args) < 3:
		return wrong(`no server stands behind "from"`)
	case word == "from", word == "" && session != "":
		return nil
	case word == "":
		return wrong("the server is missing")
	case isAddress(word):
		return wrong(`"from" is missing before %q`, word)
	}
	return wrong(`%q stands where "from" belongs%s`, word, spell.Suggest(word, []string{"from"}))
}

// mapHint adds to the error of a map where to look for its cause.
func mapHint(err error, r *controlpb.MapRequest) error {
	access, server := r.AccessMode, "SERVER"
	if len(r.Paths) > 0 {
		server = r.Paths[0]
	}
	switch {
	case errors.Is(err, syscall.EPERM) && access == "rw":
		return hinted{err, "`rnbd server device list +hostname` on the server shows whether another client has it: then map it read-only (ro), or with --access migration; the server's log has the reason"}
	case errors.Is(err, syscall.EACCES):
		return hinted{err, "the server's log has the reason; if it is an access rule, `rnbd server access check` there says which one"}
	case errors.Is(err, syscall.ENXIO) && len(r.Paths) > 1:
		return hinted{err, "all addresses of one map are of one server; for fail-over between servers of one volume let an address move from one to the other, and map that address"}
	case errors.Is(err, syscall.EPERM), errors.Is(err, syscall.EBUSY):
		return hinted{err, "the server's log has the reason; `rnbd server device list +hostname` there shows which client has it"}
	case errors.Is(err, syscall.ENOENT):
		return hinted{err, "names are those below the server's --search-path, without it paths of block devices as /dev/vda; `rnbd discover " + server + "` lists them"}
	}
	return err
}

// printMapped shows a device that was just mapped.
func (c *call) printMapped(ctx context.Context, d *daemons, mapped *controlpb.ClientDevice) error {
	for _, why := range mapped.PassedOver {
		c.say("not by %s", why)
	}
	host := ""
	if inv, err := d.look(ctx, false); err == nil {
		if s, err := inv.session(mapped.Session); err == nil {
			host = s.Hostname
		}
	}
	if c.chosen == "" && !c.Machine() {
		return c.tell("mapped %s of %s as %s (%s, %s)\nat     %s",
			mapped.Path, cmp.Or(host, mapped.Session), mapped.Name, report.Human(mapped.Limits.GetSize()), mapped.AccessMode, mapped.Endpoint)
	}
	return printDevice(ctx, c, d, mappedDevice(mapped, host))
}

// mapFrom maps with the server that the words after "from" name: paths, names of
// hosts, or one session.
func (c *call) mapFrom(ctx context.Context, d *daemons, r *controlpb.MapRequest, from []string) (*controlpb.ClientDevice, error) {
	if len(from) > 0 && r.Session == "" && !isAddress(from[0]) {
		name, err := sessionNamed(ctx, d, from[0])
		switch {
		case err == nil:
			r.Session, from = name, from[1:]
		case !isNotFound(err):
			return nil, err
		}
	}
	choices, err := resolvePaths(ctx, from)
	if err != nil {
		return nil, err
	}
	var mapped *controlpb.ClientDevice
	err = tryPaths(ctx, choices, func(ctx context.Context, paths []string) (err error) {
		r.Paths = paths
		mapped, err = d.client.Map(ctx, r)
		return err
	})
	return mapped, err
}

// sessionNamed returns the name of the session that id names.
func sessionNamed(ctx context.Context, d *daemons, id string) (string, error) {
	inv, err := d.look(ctx, false)
	if err != nil {
		return "", err
	}
	s, err := inv.session(id)
	if err != nil {
		return "", err
	}
	return s.Name, nil
}

func mapLine(c *call) error {
	return c.with(func(ctx context.Context, d *daemons) error {
		if c.args[0] != "-" {
			return c.mapOneLine(ctx, d, c.args[0])
		}
		in := bufio.NewScanner(c.cmd.InOrStdin())
		for n := 1; in.Scan(); n++ {
			line := strings.TrimSpace(in.Text())
			if line == "" || strings.HasPrefix(line, "#") {
				continue
			}
			if err := c.mapOneLine(ctx, d, line); err != nil {
				return fmt.Errorf("line %d: %w", n, err)
			}
		}
		return in.Err()
	})
}

func (c *call) mapOneLine(ctx context.Context, d *daemons, line string) error {
	mapped, err := d.client.MapLine(ctx, &controlpb.MapLineRequest{Line: line})
	if err != nil {
		return err
	}
	return c.printMapped(ctx, d, mapped)
}
