package main

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/metrics"
	"github.com/rnbd-go/rnbd/modules/rtrs"
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
	Auth    string `yaml:"auth"`
}

func (o *tlsOptions) register(f *pflag.FlagSet, modes string) {
	f.StringVar(&o.TLS, "tls", tlsOff, modes)
	f.StringVar(&o.TLSCA, "tls-ca", "", "PEM file: certificates of those who may sign the other ends' certificates")
	f.StringVar(&o.TLSCert, "tls-cert", "", "PEM file: certificate of this end, and those between it and the CA of the other ends")
	f.StringVar(&o.TLSKey, "tls-key", "", "PEM file: private key of --tls-cert")
	f.StringVar(&o.TLSCRL, "tls-crl", "", "PEM file: lists of revoked certificates, signed by a CA of --tls-ca")
	f.StringVar(&o.TLSPSK, "tls-psk", "", "file of shared keys, lines of \"rnbd psk new\", in place of certificates; a server may have both")
}

// registerAuth adds the option of daemons whose paths have challenges.
func (o *tlsOptions) registerAuth(f *pflag.FlagSet, modes string) {
	f.StringVar(&o.Auth, "auth", tlsOff, modes)
}

// open reads the files of the options. Without TLS, without challenges, and unless they
// are needed for something else, it returns nil.
func (o *tlsOptions) open(name string, challenges, needed bool, log *slog.Logger) (*tlsauth.Auth, error) {
	files := tlsauth.Files{CA: o.TLSCA, Cert: o.TLSCert, Key: o.TLSKey, CRL: o.TLSCRL, PSK: o.TLSPSK}
	if o.TLS == tlsOff && !challenges && !needed {
		if files != (tlsauth.Files{}) {
			return nil, usageError{fmt.Errorf("files of keys are named, and --tls is off, as --auth is: say --tls %s or --auth %s", tlsRequire, tlsRequire)}
		}
		return nil, nil
	}
	a, err := tlsauth.New(tlsauth.Config{Files: files, Name: name, Logger: log})
	if err == nil && challenges {
		err = a.CheckProofs(rtrs.MaxProofCerts)
	}
	if err != nil {
		return nil, usageError{fmt.Errorf("--tls %s, --auth %s: %w", o.TLS, o.Auth, err)}
	}
	return a, nil
}

// authMode parses the value of --auth, or of the word auth of a listener.
func authMode(where, value string) (rtrs.AuthMode, error) {
	m, err := rtrs.ParseAuthMode(value)
	if err != nil {
		return m, usageError{fmt.Errorf("%s: %w", where, err)}
	}
	return m, nil
}

// clientTLS are the TLS options of a command that is a client itself.
type clientTLS struct {
	tlsOptions
	name string
}

func (o *clientTLS) register(f *pflag.FlagSet, modes string) {
	o.tlsOptions.register(f, modes)
	f.StringVar(&o.name, "tls-name", "", "what the server must prove to be (default the address of the path)")
}

// open reads the files. Without TLS it returns nil.
func (o *clientTLS) open() (*tlsauth.Auth, error) {
	if o.TLS != tlsOff && o.TLS != tlsRequire {
		return nil, usageError{fmt.Errorf("--tls %q: use %s or %s", o.TLS, tlsOff, tlsRequire)}
	}
	return o.tlsOptions.open(o.name, false, false, slog.New(slog.DiscardHandler))
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

// keysLook is the time between two looks of a server at the files of TLS.
const keysLook = 2 * time.Second

// watchKeys looks at the files of a until the function that it returns is called, and
// calls changed when other ones are in use. a may be nil.
func watchKeys(a *tlsauth.Auth, changed func()) (stop func()) {
	if a == nil {
		return func() {}
	}
	done, last := make(chan struct{}), a.Reads()
	var ended sync.WaitGroup
	ended.Go(func() {
		tick := time.NewTicker(keysLook)
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case <-tick.C:
			}
			_ = a.Reload(false) // it has logged its error
			if n := a.Reads(); n != last {
				last = n
				changed()
			}
		}
	})
	return func() { close(done); ended.Wait() }
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

// Words behind the address of a listener. wordTrusted marks one of a fabric
// without TLS: the operator states that its network is protected in another way.
// wordAuth stands for --auth on that listener.
const (
	wordTrusted = "trusted"
	wordAuth    = "auth="

	trusted = "," + wordTrusted
)

// listener is an argument of --listen.
type listener struct {
	fabric, addr string
	trusted      bool
	auth         rtrs.AuthMode
}

// parseListener parses an argument of --listen, [FABRIC://]ADDRESS:PORT[,WORD]...
// It refuses a listener that --tls require does not cover.
func (o *tlsOptions) parseListener(arg string) (l listener, err error) {
	where := "--listen " + arg
	if l.auth, err = authMode("--auth", o.Auth); err != nil {
		return l, err
	}
	words := strings.Split(arg, ",")
	l.fabric, l.addr = cutFabric(words[0])
	for _, w := range words[1:] {
		mode, isAuth := strings.CutPrefix(w, wordAuth)
		switch {
		case w == wordTrusted:
			l.trusted = true
		case isAuth:
			if l.auth, err = authMode(where, mode); err != nil {
				return l, err
			}
		default:
			return l, usageError{fmt.Errorf("%s: %q is neither %s nor %sMODE", where, w, wordTrusted, wordAuth)}
		}
	}
	if o.TLS == tlsRequire && l.fabric != defaultFabric && !l.trusted {
		return l, usageError{fmt.Errorf("%s: the fabric %s has no TLS, which --tls require asks for; "+
			"write %s,%s if IPsec, WireGuard or a network of its own protects it", where, l.fabric, arg, wordTrusted)}
	}
	return l, nil
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
