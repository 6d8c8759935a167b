package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/config"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/doctor"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/redact"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/machine"
)

// Bounds of a bundle.
const (
	maxBundled    = 4 << 20 // bytes of one file, its end if it is longer
	bundledLines  = "5000"  // of the journal, per unit
	bundledUnits  = "rnbd-client rnbd-server"
	bundleTimeout = 5 * time.Second // for each source
)

func newBundle() *cobra.Command {
	c := &cobra.Command{
		Use: "bundle [FILE]", Short: "Collect what a report of an error needs in one archive",
		Long: `Write a tar.gz archive with configuration, state, logs where they can be read,
what the daemons show, their events, metrics, findings of "rnbd doctor" and versions. Values of
keys, passwords and tokens are replaced by REMOVED, comments of configuration files
are left out. Names of devices, sessions and hosts stay: look at it before you
hand it on. What is left out, and why, is printed and stands in missing.txt. FILE is rnbd-bundle-TIME.tar.gz if it is not said, - is standard output.`,
		Example: "  rnbd bundle\n  rnbd bundle report.tar.gz --metrics 127.0.0.1:9800 --log /var/log/rnbd.log",
		Args:    args(cobra.MaximumNArgs(1)),
	}
	b := &bundle{}
	f := c.Flags()
	f.StringArrayVar(&b.metrics, "metrics", nil, "ADDRESS:PORT of a daemon's metrics, repeatable, beside those of configuration files")
	f.StringArrayVar(&b.logs, "log", nil, "log file to include, repeatable, beside the journal of the units")
	f.StringArrayVar(&b.configs, "config", nil, "configuration file or folder to include, repeatable, beside those of "+systemConfig)
	c.RunE = func(cmd *cobra.Command, a []string) error {
		name := "rnbd-bundle-" + time.Now().UTC().Format("20060102T150405Z") + ".tar.gz"
		if len(a) > 0 {
			name = a[0]
		}
		ctx, cancel, err := deadline(cmd)
		if err != nil {
			return err
		}
		defer cancel()
		b.collect(ctx, cmd)
		if name == "-" {
			return b.write(cmd.OutOrStdout())
		}
		return b.save(cmd, name)
	}
	return c
}

// bundle is an archive in the making.
type bundle struct {
	metrics, logs, configs []string
	files                  []bundled
	missing                []string // files that could not be collected, with the reasons
}

// bundled is one file of it.
type bundled struct {
	name string
	text []byte
}

// add takes over a text without its secrets.
func (b *bundle) add(name string, text []byte) {
	if len(text) > maxBundled {
		text = text[len(text)-maxBundled:]
	}
	b.files = append(b.files, bundled{name, redact.Text(text)})
}

func (b *bundle) miss(what string, err error) {
	b.missing = append(b.missing, fmt.Sprintf("%s: %v", what, err))
}

// collect collects everything. It lists in missing.txt the parts that it cannot
// collect.
func (b *bundle) collect(ctx context.Context, cmd *cobra.Command) {
	b.add("version.txt", []byte(fmt.Sprintf("rnbd %s\nkernel %s\ncpu %s\n", versionString(), machine.Kernel(), machine.CPU())))
	found, _ := checkDaemons(ctx, cmd)
	var text bytes.Buffer
	if err := report.List(&text, report.Options{Format: "json"}, report.Build("findings", "finding", findingFields, append(doctor.DefaultHost().Check(), found...))); err == nil {
		b.add("doctor.json", text.Bytes())
	}
	configs := append([]string{}, b.configs...)
	for _, m := range modes {
		dir := b.askDaemon(ctx, cmd, m.set, m.name)
		configs = append(configs, existing(systemFile(m.name), systemDir(m.name))...)
		if dir != "" && dir != systemDir(m.name) {
			configs = append(configs, dir)
		}
	}
	b.addConfigs(configs)
	if socket, err := socketPath(cmd, "client"); err == nil {
		b.addFile("state", strings.TrimSuffix(socket, ".sock")+".devices")
	}
	for _, l := range b.logs {
		b.addFile("log", l)
	}
	b.addJournals(ctx)
	if len(b.metrics) == 0 {
		b.miss("metrics", errors.New("no configuration file has their address: say --metrics ADDRESS:PORT of each daemon that serves them"))
	}
	for _, m := range b.metrics {
		b.addMetrics(ctx, m)
	}
	if len(b.missing) > 0 {
		b.add("missing.txt", []byte(strings.Join(b.missing, "\n")+"\n"))
	}
}

// askDaemon adds all information of a daemon and returns its configuration
// folder.
func (b *bundle) askDaemon(ctx context.Context, cmd *cobra.Command, set daemonSet, name string) (configDir string) {
	ctx, cancel := context.WithTimeout(ctx, bundleTimeout)
	defer cancel()
	d, err := connect(ctx, cmd, set)
	if err != nil {
		b.miss(name, err)
		return ""
	}
	defer d.close()
	tell := func(what string, m proto.Message, err error) {
		if err != nil {
			b.miss(name+" "+what, err)
			return
		}
		text, err := protojson.MarshalOptions{Multiline: true}.Marshal(m)
		if err != nil {
			b.miss(name+" "+what, err)
			return
		}
		b.add(filepath.Join(name, what+".json"), text)
	}
	var info *controlpb.DaemonInfo
	switch {
	case d.client != nil:
		info, err = d.client.Info(ctx, &controlpb.InfoRequest{})
		tell("info", info, err)
		devices, err := d.client.ListDevices(ctx, &controlpb.ListRequest{})
		tell("devices", devices, err)
		sessions, err := d.client.ListSessions(ctx, &controlpb.ListRequest{})
		tell("sessions", sessions, err)
		stats, err := d.client.DeviceStats(ctx, &controlpb.DeviceRequest{})
		tell("stats", stats, err)
		events, err := d.client.Events(ctx, &controlpb.EventsRequest{})
		tell("events", events, err)
	case d.server != nil:
		info, err = d.server.Info(ctx, &controlpb.InfoRequest{})
		tell("info", info, err)
		devices, err := d.server.ListDevices(ctx, &controlpb.ListRequest{})
		tell("devices", devices, err)
		sessions, err := d.server.ListSessions(ctx, &controlpb.ListRequest{})
		tell("sessions", sessions, err)
		stats, err := d.server.DeviceStats(ctx, &controlpb.DeviceRequest{})
		tell("stats", stats, err)
		events, err := d.server.Events(ctx, &controlpb.EventsRequest{})
		tell("events", events, err)
	}
	return info.GetConfigDir()
}

// addConfigs takes over configuration files, and remembers where they serve metrics.
func (b *bundle) addConfigs(places []string) {
	for _, p := range places {
		files := []string{p}
		if st, err := os.Stat(p); err != nil {
			b.miss("configuration", err)
			continue
		} else if st.IsDir() {
			if files, err = config.Files(p); err != nil {
				b.miss("configuration", err)
				continue
			}
		}
		for _, f := range files {
			text, err := readBounded(f)
			if err != nil {
				b.miss("configuration", err)
				continue
			}
			text = redact.YAML(text)
			for line := range strings.Lines(string(text)) {
				if addr, ok := strings.CutPrefix(line, "metrics:"); ok && strings.TrimSpace(addr) != "" {
					b.metrics = append(b.metrics, strings.Trim(strings.TrimSpace(addr), `"'`))
				}
			}
			b.add(filepath.Join("config", strings.TrimPrefix(filepath.Clean(f), "/")), text)
		}
	}
}

// addFile takes over a file that may not be there.
func (b *bundle) addFile(folder, name string) {
	text, err := readBounded(name)
	switch {
	case errors.Is(err, os.ErrNotExist) && folder == "state":
	case err != nil:
		b.miss(folder, err)
	default:
		b.add(filepath.Join(folder, filepath.Base(name)), text)
	}
}

// readBounded reads a regular file, its end if it is long.
func readBounded(name string) ([]byte, error) {
	st, err := os.Stat(name)
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is no regular file", name)
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if st.Size() > maxBundled {
		if _, err := f.Seek(-maxBundled, io.SeekEnd); err != nil {
			return nil, err
		}
	}
	return io.ReadAll(io.LimitReader(f, maxBundled))
}

// addJournals takes over the last lines of the units' logs, where journald has any.
func (b *bundle) addJournals(ctx context.Context) {
	if _, err := exec.LookPath("journalctl"); err != nil {
		b.miss("journal", fmt.Errorf("%w: say --log FILE where a daemon logs to a file", err))
		return
	}
	for _, unit := range strings.Fields(bundledUnits) {
		limited, cancel := context.WithTimeout(ctx, bundleTimeout)
		out, err := exec.CommandContext(limited, "journalctl", "--no-pager", "--quiet", "-n", bundledLines, "-u", unit).Output()
		cancel()
		switch {
		case err != nil:
			b.miss("journal of "+unit, err)
		case len(out) == 0:
			b.miss("journal of "+unit, errors.New("it has no lines that this user can read: say --log FILE where the daemon logs to a file, or run the command as root"))
		default:
			b.add("log/"+unit+".log", out)
		}
	}
}

func (b *bundle) addMetrics(ctx context.Context, addr string) {
	ctx, cancel := context.WithTimeout(ctx, bundleTimeout)
	defer cancel()
	addr, _ = metricsAddress(addr)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/metrics", nil)
	if err != nil {
		b.miss("metrics", err)
		return
	}
	rsp, err := http.DefaultClient.Do(req)
	if err != nil {
		b.miss("metrics", err)
		return
	}
	defer rsp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(rsp.Body, maxBundled))
	if err != nil || rsp.StatusCode != http.StatusOK {
		b.miss("metrics of "+addr, errors.Join(err, errors.New(rsp.Status)))
		return
	}
	b.add("metrics/"+strings.NewReplacer(":", "-", "/", "-").Replace(addr)+".txt", text)
}

// write writes the archive.
func (b *bundle) write(w io.Writer) error {
	zip := gzip.NewWriter(w)
	archive := tar.NewWriter(zip)
	now := time.Now()
	for _, f := range b.files {
		h := &tar.Header{Name: filepath.Join("rnbd-bundle", f.name), Mode: 0o600, Size: int64(len(f.text)), ModTime: now}
		if err := archive.WriteHeader(h); err != nil {
			return err
		}
		if _, err := archive.Write(f.text); err != nil {
			return err
		}
	}
	return errors.Join(archive.Close(), zip.Close())
}

// save writes the archive to a new file that only its owner can read.
func (b *bundle) save(cmd *cobra.Command, name string) error {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("bundle: %w", err)
	}
	if err := errors.Join(b.write(f), f.Close()); err != nil {
		return errors.Join(fmt.Errorf("bundle: %w", err), os.Remove(name))
	}
	out := cmd.OutOrStdout()
	fmt.Fprintf(out, "wrote %s, files: %d\n", name, len(b.files))
	for _, m := range b.missing {
		fmt.Fprintln(out, "left out:", strings.ReplaceAll(m, "\n", "; "))
	}
	return nil
}
