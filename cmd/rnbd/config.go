package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/config"
)

// Words for --config and --config-dir.
const (
	configAuto = "auto"
	configNone = "none"
)

// systemConfig has the configuration of root's daemons: a file and a folder for each.
var systemConfig = "/etc/rnbd"

func systemFile(kind string) string { return filepath.Join(systemConfig, kind+".yaml") }

func systemDir(kind string) string { return filepath.Join(systemConfig, kind+".d") }

// readsSystemConfig reports whether cmd runs root's daemon on the default socket. A
// second daemon would map the same again.
func readsSystemConfig(cmd *cobra.Command) bool {
	f := cmd.Flags().Lookup("socket")
	return os.Geteuid() == 0 && os.Getenv("RNBD_SOCKET") == "" && (f == nil || f.Value.String() == "")
}

// configFile is the configuration file of the daemon of a kind; empty: none.
func (o *daemonOptions) configFile(cmd *cobra.Command, kind string) string {
	switch {
	case o.Config == configNone:
		return ""
	case o.Config != configAuto:
		return o.Config
	case !readsSystemConfig(cmd) || len(existing(systemFile(kind))) == 0:
		return ""
	}
	return systemFile(kind)
}

// configDir is the folder of configuration files of the daemon of a kind; empty:
// none.
func (o *daemonOptions) configDir(cmd *cobra.Command, kind string) string {
	switch {
	case o.ConfigDir == configNone:
		return ""
	case o.ConfigDir != configAuto:
		return o.ConfigDir
	case !readsSystemConfig(cmd):
		return ""
	}
	return systemDir(kind)
}

// configFiles are the files that a daemon of a kind reads, in their order.
func (o *daemonOptions) configFiles(cmd *cobra.Command, kind string) (files []string, err error) {
	if file := o.configFile(cmd, kind); file != "" {
		files = append(files, file)
	}
	if dir := o.configDir(cmd, kind); dir != "" {
		more, err := config.Files(dir)
		if err != nil {
			return nil, err
		}
		files = append(files, more...)
	}
	return files, nil
}

// load reads the configuration files of a daemon into the struct that its flags
// set. Flags of the command line win. next is called behind each file. spare, unless
// it is nil, may leave out a file that is broken.
func (o *daemonOptions) load(cmd *cobra.Command, kind string, into any, next func(), spare spareFile) error {
	given := givenFlags(cmd)
	files, err := o.configFiles(cmd, kind)
	if err != nil {
		return err
	}
	o.filesRead = files
	if err := readAll(files, into, next, spare); err != nil {
		return errors.New(oneLine(err))
	}
	for _, restore := range given {
		if err := restore(); err != nil {
			return err
		}
	}
	return nil
}

func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

// spareFile is asked about a file that is broken by err. It returns nil to leave the
// file out.
type spareFile func(file string, text []byte, err error) error

// readAll reads files into the same struct. The error lists all that is wrong
// with them.
func readAll(files []string, into any, next func(), spare spareFile) error {
	var errs []error
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err == nil {
			err = config.Decode(f, text, into)
			if err != nil && spare != nil {
				err = spare(f, text, err)
			}
		}
		errs = append(errs, err)
		next()
	}
	return errors.Join(errs...)
}

// givenFlags remembers the flags of the command line, to set them again over
// the values of the files.
func givenFlags(cmd *cobra.Command) (restore []func() error) {
	cmd.Flags().Visit(func(f *pflag.Flag) {
		set := flagSetter(f)
		restore = append(restore, func() error { return set(f) })
	})
	return restore
}

// flagSetter returns a function that gives a flag the value that from has now.
func flagSetter(from *pflag.Flag) func(to *pflag.Flag) error {
	if list, ok := from.Value.(pflag.SliceValue); ok {
		values := append([]string(nil), list.GetSlice()...)
		return func(to *pflag.Flag) error {
			list, ok := to.Value.(pflag.SliceValue)
			if !ok {
				return fmt.Errorf("--%s is no list", to.Name)
			}
			return list.Replace(values)
		}
	}
	value := from.Value.String()
	return func(to *pflag.Flag) error { return to.Value.Set(value) }
}
