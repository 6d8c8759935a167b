package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/doctor"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

var findingFields = []report.Field[doctor.Finding]{
	report.F("check", "Check", "what was checked", func(f doctor.Finding) any { return f.Check }),
	report.F("subject", "Subject", "which one of several", func(f doctor.Finding) any { return f.Subject }),
	report.F("outcome", "Outcome", "ok, note, warning or problem", func(f doctor.Finding) any { return string(f.Outcome) }),
	report.F("text", "Found", "what was found", func(f doctor.Finding) any { return f.Text }),
	report.F("do", "To do", "what helps", func(f doctor.Finding) any { return f.Do }),
}

func newDoctor() *cobra.Command {
	c := &cobra.Command{
		Use: "doctor [SERVER...]", Short: "Check this host, the daemons and the way to servers",
		Long: `Check this host, the daemons that run here and the way to servers, and say for
each finding what to do. Servers are those of the client's sessions, and those
that are named: [SRC@]ADDRESS[:PORT][%FABRIC]. Each is tried over each fabric, or
over the one that is named, by a session of its own, without a daemon. With
--device a device of the named servers is read for a second, too.

The files of keys and certificates are those of the options --tls-..., as the
daemons have them; without any, those of /etc/rnbd/client.yaml and client.d, and of
server.yaml and server.d. With --tls require, or --auth, servers are tried with them.

The exit code is 1 if there is a problem; warnings and notes leave it at 0.`,
		Example: "  rnbd doctor\n  rnbd doctor 10.0.0.1 --device disk.img\n  rnbd doctor -o json",
		Args:    args(cobra.ArbitraryArgs),
	}
	all := c.Flags().Bool("all", false, "print what is in order, too")
	device := c.Flags().String("device", "", "device of the named servers that is read to measure the bandwidth")
	var keys clientTLS
	keys.register(c.Flags(), "TLS to the servers: off or require")
	keys.registerAuth(c.Flags(), "prove both ends' identities to the servers, without TLS: off, allow or require")
	c.RunE = func(cmd *cobra.Command, servers []string) error {
		ctx, cancel, err := deadline(cmd)
		if err != nil {
			return err
		}
		defer cancel()
		o, err := readFlags(cmd)
		if err != nil {
			return err
		}
		found := doctor.DefaultHost().Check()
		of, known := checkDaemons(ctx, cmd)
		found = append(found, of...)
		found = append(found, checkKeys(&keys.tlsOptions)...)
		of, err = checkServers(ctx, servers, known, *device, &keys)
		if err != nil {
			return err
		}
		return printFindings(cmd.OutOrStdout(), o.Options, append(found, of...), *all)
	}
	return c
}

// printFindings prints findings. The text for people has the worst last, and
// omits those in order unless all is set.
func printFindings(w io.Writer, o report.Options, found []doctor.Finding, all bool) error {
	if o.Machine() {
		if err := report.List(w, o, report.Build("findings", "finding", findingFields, found)); err != nil {
			return err
		}
	} else if err := tellFindings(w, found, all); err != nil {
		return err
	}
	if doctor.Worst(found) == doctor.Problem {
		return errors.New("there are problems; the lines above say what to do")
	}
	return nil
}

func tellFindings(w io.Writer, found []doctor.Finding, all bool) error {
	var b strings.Builder
	counts := map[doctor.Outcome]int{}
	for _, outcome := range []doctor.Outcome{doctor.OK, doctor.Note, doctor.Warning, doctor.Problem} {
		for _, f := range found {
			if f.Outcome != outcome {
				continue
			}
			counts[outcome]++
			if outcome == doctor.OK && !all {
				continue
			}
			subject := f.Check
			if f.Subject != "" {
				subject += " " + f.Subject
			}
			fmt.Fprintf(&b, "%-8s %s: %s\n", outcome, subject, f.Text)
			if f.Do != "" {
				fmt.Fprintf(&b, "         -> %s\n", f.Do)
			}
		}
	}
	fmt.Fprintf(&b, "checks: %d, in order %d, notes %d, warnings %d, problems %d\n",
		len(found), counts[doctor.OK], counts[doctor.Note], counts[doctor.Warning], counts[doctor.Problem])
	_, err := io.WriteString(w, b.String())
	return err
}

// checkDaemons checks the running daemons, and returns the paths of the client
// in the form of map.
func checkDaemons(ctx context.Context, cmd *cobra.Command) (found []doctor.Finding, paths []string) {
	found = append(found, checkPlugins(defaultPluginDir()))
	for _, m := range modes {
		socket, err := socketPath(cmd, m.name)
		if err != nil {
			continue
		}
		d, err := connect(ctx, cmd, m.set)
		switch {
		case errors.Is(err, fs.ErrPermission):
			found = append(found, doctor.Finding{Check: "permissions", Subject: socket, Outcome: doctor.Warning, Text: "this user may not open the control socket", Do: "run the command as root, or as the user of the daemon"})
			continue
		case err != nil:
			found = append(found, doctor.Finding{Check: "daemon", Subject: m.name, Outcome: doctor.Note, Text: "does not run, or not on " + socket, Do: "rnbd " + m.name + " run, where this host is a " + m.name})
			if m.set == onServer {
				found = append(found, checkPorts()...)
			}
			continue
		}
		of, more := checkDaemon(ctx, d, m.name)
		d.close()
		found, paths = append(found, of...), append(paths, more...)
	}
	return found, paths
}

// checkPlugins looks for those of both daemons.
func checkPlugins(dir string) doctor.Finding {
	var missing []string
	for _, p := range []string{"io-blockio", "io-fileio", "frontend-ublk", "frontend-nbd", "frontend-fuse"} {
		if len(existing(filepath.Join(dir, p))) == 0 {
			missing = append(missing, p)
		}
	}
	if len(missing) > 0 {
		return doctor.Finding{Check: "plugins", Outcome: doctor.Warning, Text: strings.Join(missing, ", ") + " not in " + dir, Do: "install them beside rnbd, or give the daemons --plugin-dir"}
	}
	return doctor.Finding{Check: "plugins", Outcome: doctor.OK, Text: "in " + dir}
}

// checkPorts looks whether a server could listen on its default port.
func checkPorts() (found []doctor.Finding) {
	const address = "127.0.0.1:1234"
	l, err := net.Listen("tcp", address)
	if err != nil {
		text := err.Error()
		if pid, name := holderOf("tcp", address); pid > 0 {
			text = fmt.Sprintf("process %d (%s) listens there", pid, name)
		}
		return append(found, doctor.Finding{Check: "port", Subject: address, Outcome: doctor.Note, Text: text, Do: "give a server another --listen"})
	}
	_ = l.Close()
	return append(found, doctor.Finding{Check: "port", Subject: address, Outcome: doctor.OK, Text: "free for a server"})
}

// checkDaemon checks the information that a daemon gives about itself.
func checkDaemon(ctx context.Context, d *daemons, name string) (found []doctor.Finding, paths []string) {
	ask := func() (*controlpb.DaemonInfo, error) {
		if d.client != nil {
			return d.client.Info(ctx, &controlpb.InfoRequest{})
		}
		return d.server.Info(ctx, &controlpb.InfoRequest{})
	}
	info, err := ask()
	if err == nil && info.Version != versionString() {
		found = append(found, doctor.Finding{Check: "daemon", Subject: name, Outcome: doctor.Note, Text: "version " + info.Version + ", this command has " + versionString(), Do: "restart the daemon to run what is installed"})
	} else if err == nil {
		found = append(found, doctor.Finding{Check: "daemon", Subject: name, Outcome: doctor.OK, Text: fmt.Sprintf("runs, process %d", info.Pid)})
	}
	inv, lerr := d.look(ctx, true)
	if err = errors.Join(err, lerr); err != nil {
		return append(found, doctor.Finding{Check: "daemon", Subject: name, Outcome: doctor.Problem, Text: err.Error(), Do: "see its log; restart it if it does not answer"}), nil
	}
	for _, c := range info.Conditions {
		found = append(found, conditionFinding(c, name))
	}
	of, paths := checkPaths(inv)
	return append(found, of...), paths
}

// conditionFinding is the finding for a condition of a daemon.
func conditionFinding(c *controlpb.Condition, daemon string) doctor.Finding {
	f := doctor.Finding{Check: conditionChecks[c.Kind], Subject: c.Subject, Outcome: doctor.Problem, Text: c.Text, Do: "rnbd explain " + c.Kind}
	if f.Subject == "" {
		f.Subject = daemon + " daemon"
	}
	if f.Check == "" { // of a newer daemon
		f.Check = c.Kind
	}
	return f
}

// conditionChecks are the checks by the kinds of conditions.
var conditionChecks = map[string]string{
	control.RequestsHang: "requests", control.RequestsFailed: "requests", control.RedundancyLost: "session", control.ServerAway: "session",
	control.DeviceClosed: "device", control.DeviceFailed: "device", control.PluginDown: "plugin", control.AuditLost: "audit",
	control.ConfigProblem: "configuration",
}

// checkPaths checks the client's sessions.
func checkPaths(inv *inventory) (found []doctor.Finding, paths []string) {
	for _, s := range inv.sessions {
		if s.incoming {
			continue
		}
		for _, p := range s.Paths {
			paths = append(paths, pathSpec(p))
			if !connected(p) {
				found = append(found, doctor.Finding{Check: "path", Subject: s.Name + " " + p.Dst, Outcome: doctor.Problem, Text: p.State + ": " + p.LastError, Do: "check network and server; `rnbd path reconnect " + s.Name + fmt.Sprintf(" %d`", p.Id)})
			}
		}
		if len(s.Paths) == 1 {
			found = append(found, doctor.Finding{Check: "session", Subject: s.Name, Outcome: doctor.Note, Text: "has one path: its loss stops the devices", Do: "rnbd path add " + s.Name + " ADDRESS"})
		}
	}
	return found, paths
}

// tryLimit bounds a try of a server over one fabric.
const tryLimit = 5 * time.Second

// checkServers tries servers: those named over every fabric, those known as they
// are known.
func checkServers(ctx context.Context, named, known []string, device string, keys *clientTLS) (found []doctor.Finding, err error) {
	if device != "" && len(named) == 0 {
		return nil, usageError{errors.New("--device is a device of a named server: write rnbd doctor SERVER --device NAME")}
	}
	if len(named)+len(known) == 0 {
		return nil, nil
	}
	choices, err := resolvePaths(ctx, named)
	if err != nil {
		return nil, err
	}
	p, err := newProber(ctx, keys)
	if err != nil {
		return nil, err
	}
	defer p.close()
	for _, choice := range choices {
		of, works := p.overAll(ctx, choice)
		if found = append(found, of...); device != "" {
			found = append(found, p.bandwidth(ctx, works, device))
		}
	}
	slices.Sort(known)
	for _, server := range slices.Compact(known) {
		f, _ := p.over(ctx, server)
		found = append(found, f...)
	}
	return found, nil
}
