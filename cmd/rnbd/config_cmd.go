package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/config"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/mappings"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/names"
)

func newConfig() *cobra.Command {
	root := group("config", "Check, compare and apply configuration files")
	root.Long = `The daemons read YAML files: the one of --config, then those of the folder
/etc/rnbd/client.d or /etc/rnbd/server.d. A key is a flag of "rnbd client run" or
"rnbd server run"; files of the client also have the mappings that it keeps:

  mappings:
    - device: disk.img
      server: [10.0.0.1, 10.1.0.1]
      name: rnbd0`
	root.AddCommand(newConfigCheck(),
		newConfigReload("diff", "Show what a reload would change", true),
		newConfigReload("apply", "Read the configuration again and apply it", false),
		newConfigReload("reload", "The same as apply, and as SIGHUP to the daemon", false),
		newConfigExport(), newConfigSchema())
	return root
}

// kinds parses the words client and server, and returns the rest.
func kinds(args []string) (set daemonSet, rest []string) {
	if len(args) > 0 {
		for _, m := range modes {
			if m.name == args[0] {
				return m.set, args[1:]
			}
		}
	}
	return onBoth, args
}

func newConfigCheck() *cobra.Command {
	return &cobra.Command{
		Use: "check [client|server] [FILE|FOLDER...]", Short: "Check configuration files",
		Long: "Check files, or those of folders, without a daemon. With none named these are\n/etc/rnbd/client.yaml, client.d, server.yaml and server.d. All errors are shown,\nwith file, line and column.",
		Example: `  rnbd config check
  rnbd config check client client.yaml`,
		Args: args(cobra.ArbitraryArgs),
		RunE: func(cmd *cobra.Command, a []string) error {
			set, places := kinds(a)
			if set == onBoth && len(places) > 0 {
				return usageError{fmt.Errorf("write: rnbd config check client|server %s", strings.Join(places, " "))}
			}
			var errs []error
			checked := 0
			for _, m := range modes {
				if set&m.set == 0 {
					continue
				}
				of := places
				if len(of) == 0 {
					of = existing(systemFile(m.name), systemDir(m.name))
				}
				n, err := checkConfig(m.set, of)
				checked += n
				errs = append(errs, err)
			}
			if err := errors.Join(errs...); err != nil {
				return usageError{err}
			}
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "files checked: %d\n", checked)
			return err
		},
	}
}

func existing(names ...string) []string {
	return slices.DeleteFunc(names, func(n string) bool {
		_, err := os.Stat(n)
		return errors.Is(err, os.ErrNotExist)
	})
}

// checkConfig reads files and folders as the daemon of a kind does.
func checkConfig(kind daemonSet, places []string) (n int, err error) {
	var files []string
	for _, p := range places {
		st, err := os.Stat(p)
		if err != nil {
			return 0, err
		}
		if !st.IsDir() {
			files = append(files, p)
			continue
		}
		of, err := config.Files(p)
		if err != nil {
			return 0, err
		}
		files = append(files, of...)
	}
	if kind == onServer {
		_, o := serverRun()
		return len(files), o.collectAccess(func(eachFile func()) error { return readAll(files, o, eachFile, nil) })
	}
	_, o := clientRun()
	return len(files), o.collect(func(eachFile func()) error { return readAll(files, o, eachFile, nil) })
}

// configChange is a change of the configuration of a daemon.
type configChange struct {
	daemon string
	*controlpb.ConfigChange
}

var changeFields = []report.Field[configChange]{
	report.F("daemon", "Daemon", "client or server", func(c configChange) any { return c.daemon }),
	report.F("action", "Action", "map, unmap, set, or restart: it holds from the next start on", func(c configChange) any { return c.Action }),
	report.F("subject", "Subject", "device or key", func(c configChange) any { return c.Subject }),
	report.F("detail", "Detail", "what is mapped or set", func(c configChange) any { return c.Detail }),
	report.F("error", "Error", "why it was not done", func(c configChange) any { return c.Error }),
}

func newConfigReload(name, short string, dry bool) *cobra.Command {
	c := &cobra.Command{
		Use: name + " [client|server]", Short: short,
		Long: short + `.

Mappings that are new are begun, and tried in the background until they work;
those that a configuration had and has no more are taken away unless they are in
use. Other devices are left alone. Of the other keys log-level is taken over at
once; those that hold from the next start on are listed with the action
"restart". With an error in a file nothing is changed, while a start of the client
leaves out a file of its folder that is broken and has nothing but mappings.`,
		Example: "  rnbd config " + name,
		Args:    args(cobra.MaximumNArgs(1)),
	}
	dryRun := &dry
	if !dry {
		dryRun = c.Flags().Bool("dry-run", false, "only show what would change")
	}
	c.RunE = func(cmd *cobra.Command, a []string) error {
		set, rest := kinds(a)
		if len(rest) > 0 {
			return usageError{fmt.Errorf("%q: write client or server", rest[0])}
		}
		ctx, cancel, err := deadline(cmd)
		if err != nil {
			return err
		}
		defer cancel()
		return reloadConfig(ctx, cmd, set, *dryRun)
	}
	return c
}

func reloadConfig(ctx context.Context, cmd *cobra.Command, set daemonSet, dry bool) error {
	d, err := connect(ctx, cmd, set)
	if err != nil {
		return err
	}
	defer d.close()
	var rows []configChange
	add := func(daemon string, r *controlpb.ReloadReply, err error) error {
		for _, c := range r.GetChanges() {
			rows = append(rows, configChange{daemon, c})
		}
		return err
	}
	request := &controlpb.ReloadRequest{DryRun: dry}
	if d.client != nil {
		r, err := d.client.Reload(ctx, request)
		if err := add("client", r, err); err != nil {
			return err
		}
	}
	if d.server != nil {
		r, err := d.server.Reload(ctx, request)
		if err := add("server", r, err); err != nil {
			return err
		}
	}
	return printChanges(cmd, rows)
}

// printChanges lists changes. Those that failed make an error.
func printChanges(cmd *cobra.Command, rows []configChange) error {
	o, err := readFlags(cmd)
	if err != nil {
		return err
	}
	if len(rows) == 0 && !o.Machine() {
		_, err := fmt.Fprintln(cmd.OutOrStdout(), "nothing to change")
		return err
	}
	if err := report.List(cmd.OutOrStdout(), o.Options, report.Build("changes", "change", changeFields, rows)); err != nil {
		return err
	}
	for _, c := range rows {
		if c.Error != "" {
			return fmt.Errorf("%s %s: %s", c.Action, c.Subject, c.Error)
		}
	}
	return nil
}

func newConfigExport() *cobra.Command {
	return &cobra.Command{
		Use: "export", Short: "Print what is mapped as a configuration file",
		Long:    "Print what is mapped now as a configuration file of the client.",
		Example: "  rnbd config export > /etc/rnbd/client.d/mappings.yaml",
		Args:    args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel, err := deadline(cmd)
			if err != nil {
				return err
			}
			defer cancel()
			d, err := connect(ctx, cmd, onClient)
			if err != nil {
				return err
			}
			defer d.close()
			inv, err := d.look(ctx, true)
			if err != nil {
				return err
			}
			text, err := exported(inv)
			if err != nil {
				return err
			}
			_, err = cmd.OutOrStdout().Write(text)
			return err
		},
	}
}

// exported returns the configuration file for the mapped devices.
func exported(inv *inventory) ([]byte, error) {
	file := struct {
		Mappings []mappings.Mapping `yaml:"mappings"`
	}{[]mappings.Mapping{}}
	for _, dev := range inv.devices {
		if dev.mapped != nil {
			file.Mappings = append(file.Mappings, mappingOf(inv, dev))
		}
	}
	var b bytes.Buffer
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	if err := enc.Encode(file); err != nil {
		return nil, err
	}
	return b.Bytes(), enc.Close()
}

// mappingOf is the mapping that makes dev again.
func mappingOf(inv *inventory, dev device) mappings.Mapping {
	m := mappings.Mapping{
		Device: dev.path, Name: names.Parse(dev.name), Session: dev.session, Access: dev.mode, Loss: dev.mapped.Loss,
		Frontend: dev.mapped.Frontend, IOMode: dev.mapped.IoMode, Options: dev.mapped.Options,
	}
	for _, s := range inv.sessions {
		if s.Name == dev.session && !s.incoming {
			for _, p := range s.Paths {
				m.Server = append(m.Server, pathSpec(p))
			}
		}
	}
	return m
}

func newConfigSchema() *cobra.Command {
	return &cobra.Command{
		Use: "schema", Short: "Print the JSON Schema of configuration files",
		Long: "Print the JSON Schema of configuration files: $defs/client of the client's,\n$defs/server of the server's.",
		Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return writeSchema(cmd.OutOrStdout())
		},
	}
}

// schemaID names the schema; it is no address.
const schemaID = "https://github.com/rnbd-go/rnbd/docs/config.schema.json"

func writeSchema(w io.Writer) error {
	clientCmd, clientOptions := clientRun()
	serverCmd, serverOptions := serverRun()
	schema := map[string]any{
		"$schema": "https://json-schema.org/draft/2020-12/schema",
		"$id":     schemaID,
		"title":   "Configuration files of rnbd",
		"anyOf":   []any{map[string]any{"$ref": "#/$defs/client"}, map[string]any{"$ref": "#/$defs/server"}},
		"$defs": map[string]any{
			"client": config.Schema(clientOptions, describeKeys(clientCmd.Flags())),
			"server": config.Schema(serverOptions, describeKeys(serverCmd.Flags())),
		},
	}
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(schema)
}

// mappingKeys describes those of a mapping.
var mappingKeys = map[string]string{
	"device":   "name on the server",
	"server":   "paths to the server: [SRC@]ADDRESS[:PORT][%FABRIC], where an address is an IP address or gid:GID",
	"name":     "name of the device here; without it rnbdN",
	"session":  "name of the session; made from host and address where there is none",
	"access":   "ro, rw (the default) or migration",
	"loss":     "what requests do while no path is left: fail, or queue:DURATION",
	"frontend": "front end that serves it: auto, ublk, nbd, nbd-socket, fuse, fuse-loop",
	"io-mode":  "io plugin of the server that opens it: fileio, blockio",
	"options":  "KEY: VALUE for the front end",
}

// nbdAccessKeys describes those of a rule of NBD clients.
var nbdAccessKeys = map[string]string{
	"identity": "patterns of what a client's certificate says; without them the rule fits clients without a certificate, too",
	"device":   "patterns of names of devices here",
	"allow":    "none, ro or rw, each with those before it",
}

// poolKeys describes those of a pool.
var poolKeys = map[string]string{
	"name": "its name, the part before the slash in the names of its volumes",
	"kind": "files: sparse files in a folder",
	"path": "absolute path of the folder",
}

// describeKeys returns the descriptions of the flags of the same names.
func describeKeys(f *pflag.FlagSet) func(path ...string) string {
	return func(path ...string) string {
		switch {
		case len(path) == 0:
			return ""
		case path[0] == keyMappings && len(path) == 1:
			return "mappings that the client keeps"
		case path[0] == keyMappings:
			return mappingKeys[path[1]]
		case path[0] == keyNBDAccess && len(path) == 1:
			return "rules by which NBD clients may open devices; without one, each may open all"
		case path[0] == keyNBDAccess:
			return nbdAccessKeys[path[1]]
		case path[0] == keyPools && len(path) == 1:
			return "places for volumes, that rnbd volume creates"
		case path[0] == keyPools:
			return poolKeys[path[1]]
		case path[0] == keyAccess && len(path) == 1:
			return "rules by which clients may open devices; without one, everything is allowed"
		case path[0] == keyAccess:
			return accessKeys[path[1]]
		}
		if flag := f.Lookup(path[0]); flag != nil {
			return flag.Usage
		}
		return ""
	}
}
