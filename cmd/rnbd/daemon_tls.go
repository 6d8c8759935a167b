package main

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/metrics"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/iwarp"
	"github.com/rnbd-go/rnbd/modules/rtrs/tlsauth"
)

// Values of --tls.
const (
	tlsOff     = "off"
	tlsAllow   = "allow"
	tlsRequire = "require"
)

// tlsOptions are the TLS options of both daemons.
type tlsOptions struct {
	TLS     string `yaml:"tls"`
	TLSCA   string `yaml:"tls-ca"`
	TLSCert string `yaml:"tls-cert"`
	TLSKey  string `yaml:"tls-key"`
	TLSCRL  string `yaml:"tls-crl"`
	TLSPSK  string `yaml:"tls-psk"`
}

func (o *tlsOptions) register(f *pflag.FlagSet, modes string) {
	f.StringVar(&o.TLS, "tls", tlsOff, modes)
	f.StringVar(&o.TLSCA, "tls-ca", "", "PEM file: certificates of those who may sign the other ends' certificates")
	f.StringVar(&o.TLSCert, "tls-cert", "", "PEM file: certificate of this end, and those between it and the CA of the other ends")
	f.StringVar(&o.TLSKey, "tls-key", "", "PEM file: private key of --tls-cert")
	f.StringVar(&o.TLSCRL, "tls-crl", "", "PEM file: lists of revoked certificates, signed by a CA of --tls-ca")
	f.StringVar(&o.TLSPSK, "tls-psk", "", "file of shared keys, lines of \"rnbd psk new\", in place of certificates; a server may have both")
}

// open reads the files of the options. Without TLS it returns nil.
func (o *tlsOptions) open(name string, log *slog.Logger) (*tlsauth.Auth, error) {
	files := tlsauth.Files{CA: o.TLSCA, Cert: o.TLSCert, Key: o.TLSKey, CRL: o.TLSCRL, PSK: o.TLSPSK}
	if o.TLS == tlsOff {
		if files != (tlsauth.Files{}) {
			return nil, usageError{fmt.Errorf("files for TLS are named, and --tls is off: say --tls %s", tlsRequire)}
		}
		return nil, nil
	}
	a, err := tlsauth.New(tlsauth.Config{Files: files, Name: name, Logger: log})
	if err != nil {
		return nil, usageError{fmt.Errorf("--tls %s: %w", o.TLS, err)}
	}
	return a, nil
}

// openTLS reads the files for the TLS of the metrics page. Without any it returns
// nil.
func (o *metricsOptions) openTLS(log *slog.Logger) (metrics.TLS, error) {
	files := tlsauth.Files{Cert: o.MetricsCert, Key: o.MetricsKey, CA: o.MetricsClientCA}
	if files == (tlsauth.Files{}) {
		return nil, nil
	}
	a, err := tlsauth.NewHTTPS(tlsauth.Config{Files: files, Logger: log})
	if err != nil {
		return nil, usageError{fmt.Errorf("--metrics %s: %w", o.Metrics, err)}
	}
	return a, nil
}

// mode returns the TLS mode of listeners.
func (o *tlsOptions) mode() (iwarp.TLSMode, error) {
	switch o.TLS {
	case tlsOff:
		return iwarp.TLSOff, nil
	case tlsAllow:
		return iwarp.TLSAllow, nil
	case tlsRequire:
		return iwarp.TLSRequire, nil
	}
	return 0, usageError{fmt.Errorf("--tls %q: use %s, %s or %s", o.TLS, tlsOff, tlsAllow, tlsRequire)}
}

// trusted marks a listener of a fabric without TLS: the operator states that
// its network is protected in another way.
const trusted = ",trusted"

// checkListener refuses a listener that --tls require does not cover. It returns
// the address without the word trusted.
func (o *tlsOptions) checkListener(listen, fabric, addr string) (string, error) {
	addr, said := strings.CutSuffix(addr, trusted)
	if o.TLS != tlsRequire || fabric == defaultFabric || said {
		return addr, nil
	}
	return "", usageError{fmt.Errorf("--listen %s: the fabric %s has no TLS, which --tls require asks for; "+
		"write %s%s if IPsec, WireGuard or a network of its own protects it", listen, fabric, listen, trusted)}
}

func newPSK() *cobra.Command {
	c := group("psk", "Shared keys for TLS")
	var file string
	add := &cobra.Command{
		Use:   "new IDENTITY",
		Short: "Make a shared key for a client",
		Long: `New makes a random key and prints the line IDENTITY:KEY. With --file the line
is added to that file, which is made with mode 0600 if it does not exist. The
server's file of --tls-psk has the lines of all clients, that of a client has its
own line alone.`,
		Example: "  rnbd psk new tenant-a --file /etc/rnbd/tenant-a.psk",
		Args:    args(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			line, err := tlsauth.NewPSK(args[0])
			if err != nil {
				return usageError{err}
			}
			if file == "" {
				_, err = fmt.Fprint(cmd.OutOrStdout(), line)
				return err
			}
			return addLine(file, line)
		},
	}
	add.Flags().StringVar(&file, "file", "", "file to add the line to (default: print it)")
	c.AddCommand(add)
	return c
}

// addLine appends line to a file that only its owner can read. It refuses a
// second key of an identity.
func addLine(file, line string) error {
	identity, _, _ := strings.Cut(line, ":")
	old, err := os.ReadFile(file)
	if err != nil && !os.IsNotExist(err) {
		return err
	}
	for l := range strings.Lines(string(old)) {
		if strings.HasPrefix(strings.TrimSpace(l), identity+":") {
			return usageError{fmt.Errorf("%s has a key of %q already: remove that line first", file, identity)}
		}
	}
	if n := len(old); n > 0 && old[n-1] != '\n' {
		line = "\n" + line
	}
	f, err := os.OpenFile(filepath.Clean(file), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.WriteString(line); err != nil {
		return err
	}
	return f.Sync()
}
