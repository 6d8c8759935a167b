package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/metrics"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/status"
)

// metricsOptions are the options of the metrics page of both daemons.
type metricsOptions struct {
	Metrics          string `yaml:"metrics"`
	MetricsCert      string `yaml:"metrics-cert"`
	MetricsKey       string `yaml:"metrics-key"`
	MetricsTokenFile string `yaml:"metrics-token-file"`
	MetricsClientCA  string `yaml:"metrics-client-ca"`
}

func (o *metricsOptions) register(f *pflag.FlagSet) {
	f.StringVar(&o.Metrics, "metrics", "", "[ADDRESS:]PORT to serve metrics for Prometheus and a status page on, on 127.0.0.1 without an address; others need TLS and a token, or \""+trusted+"\" behind the port (default not at all)")
	f.StringVar(&o.MetricsCert, "metrics-cert", "", "PEM file: certificate of the metrics page, which is served by TLS 1.3 then, and those between it and the CA of its readers")
	f.StringVar(&o.MetricsKey, "metrics-key", "", "PEM file: private key of --metrics-cert")
	f.StringVar(&o.MetricsTokenFile, "metrics-token-file", "", "file of the bearer token that readers of metrics send")
	f.StringVar(&o.MetricsClientCA, "metrics-client-ca", "", "PEM file: certificates of those who may sign the certificates of the readers of metrics, who need one then")
}

// metricsAddress returns the address of a value of --metrics, and whether its
// network is trusted.
func metricsAddress(text string) (addr string, said bool) {
	addr, said = strings.CutSuffix(text, trusted)
	if !strings.Contains(addr, ":") {
		addr = ":" + addr
	}
	if strings.HasPrefix(addr, ":") {
		addr = "127.0.0.1" + addr
	}
	return addr, said
}

// address returns where the page listens, nil for nowhere. It refuses an address
// beyond loopback that is not protected.
func (o *metricsOptions) address() (*net.TCPAddr, error) {
	switch {
	case o.Metrics == "" && o.MetricsCert+o.MetricsKey+o.MetricsClientCA+o.MetricsTokenFile != "":
		return nil, usageError{errors.New("files for the metrics page are named, and --metrics is not: say --metrics ADDRESS:PORT")}
	case o.Metrics == "":
		return nil, nil
	case (o.MetricsCert == "") != (o.MetricsKey == ""):
		return nil, usageError{errors.New("--metrics-cert and --metrics-key need each other")}
	case o.MetricsClientCA != "" && o.MetricsCert == "":
		return nil, usageError{errors.New("--metrics-client-ca needs --metrics-cert and --metrics-key")}
	}
	text, said := metricsAddress(o.Metrics)
	addr, err := net.ResolveTCPAddr("tcp", text)
	if err != nil {
		return nil, usageError{fmt.Errorf("--metrics %s: %w; write [ADDRESS:]PORT", o.Metrics, err)}
	}
	protected := o.MetricsCert != "" && (o.MetricsTokenFile != "" || o.MetricsClientCA != "")
	if addr.IP.IsLoopback() || protected || said {
		return addr, nil
	}
	return nil, usageError{fmt.Errorf("--metrics %s: others than this host can read the names of devices, sessions and peers there; "+
		"add --metrics-cert, --metrics-key and --metrics-token-file, or write %s%s if all who reach the port may read them, "+
		"or --metrics %d for this host alone", o.Metrics, o.Metrics, trusted, addr.Port)}
}

// metricsPage is the metrics page of a daemon.
type metricsPage struct {
	addr  *net.TCPAddr   // nil: there is none
	guard *metrics.Guard // nil: nothing protects it
}

// openMetrics reads the files of the page.
func (o *metricsOptions) openMetrics(log *slog.Logger) (*metricsPage, error) {
	addr, err := o.address()
	if err != nil {
		return nil, err
	}
	t, err := o.openTLS(log)
	if err != nil {
		return nil, err
	}
	guard, err := metrics.NewGuard(t, o.MetricsTokenFile, log)
	if err != nil {
		return nil, usageError{fmt.Errorf("--metrics %s: %w", o.Metrics, err)}
	}
	return &metricsPage{addr, guard}, nil
}

// serve serves c and the status page of d until the function that it returns is
// called.
func (p *metricsPage) serve(c *metrics.Daemon, d *status.Daemon, log *slog.Logger) (stop func(), err error) {
	if p.addr == nil {
		return func() {}, nil
	}
	st := status.New(d)
	page, err := metrics.Listen(p.addr.String(), c, p.guard, st.Handler(), log)
	if err != nil {
		st.Close()
		return nil, err
	}
	log.Info("metrics are served", "address", page.Addr().String())
	return func() { page.Close(); st.Close() }, nil
}

// reload reads the files of the page again.
func (p *metricsPage) reload(dry bool) error {
	if dry {
		return nil
	}
	if err := p.guard.Reload(); err != nil {
		return fmt.Errorf("metrics: %w: %w", err, syscall.EINVAL)
	}
	return nil
}
