package metrics

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// Page is the page that Prometheus scrapes.
type Page struct {
	http *http.Server
	addr net.Addr
}

// Limits of a page that anybody in reach may ask for.
const (
	maxScrapes    = 4
	scrapeTimeout = 10 * time.Second
)

// Listen serves c, the metrics of the process, and whether the daemon is healthy
// and ready, on ADDRESS:PORT until Close. g protects the page; nil: nothing does.
// rest, which may be nil, serves all other pages, with the same rights.
func Listen(addr string, c *Daemon, g *Guard, rest http.Handler, log *slog.Logger) (*Page, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	s := &Page{addr: l.Addr()}
	if g != nil && g.tls != nil {
		l = tls.NewListener(l, g.tls.HTTPSConfig())
	}
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(c, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", g.wantToken(promhttp.HandlerFor(reg, promhttp.HandlerOpts{
		ErrorLog: errorLog{log}, MaxRequestsInFlight: maxScrapes, Timeout: scrapeTimeout,
	})))
	mux.HandleFunc("GET /healthz", answerWith(c, func(*controlpb.DaemonInfo) []string { return nil }))
	mux.HandleFunc("GET /readyz", answerWith(c, notReady))
	if rest != nil {
		mux.Handle("GET /", g.wantToken(rest))
	}
	var pages http.Handler = mux
	if g == nil && isLoopback(s.addr) {
		pages = wantLocalHost(s.addr.String(), mux)
	}
	s.http = newServer(pages, scrapeTimeout, log)
	go func() {
		if err := s.http.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			log.Error("metrics are not served any more", "err", err)
		}
	}()
	return s, nil
}

// newServer bounds connections, headers and times. limit is that of a handshake,
// and that of a request on its way here.
func newServer(h http.Handler, limit time.Duration, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler: h, ReadTimeout: limit, WriteTimeout: 2 * limit, IdleTimeout: time.Minute, MaxHeaderBytes: 1 << 14,
		ErrorLog:  slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		ConnState: (&crowd{busy: map[net.Conn]bool{}}).state,
	}
}

// Addr is where it listens, with the port it got.
func (s *Page) Addr() net.Addr { return s.addr }

// Close ends it; scrapes under way are cut off.
func (s *Page) Close() error { return s.http.Close() }

type errorLog struct{ log *slog.Logger }

func (e errorLog) Println(v ...any) { e.log.Warn("scrape failed", "err", fmt.Sprint(v...)) }

// collectTime bounds the questions of a scrape to the daemon.
func collectTime() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), scrapeTimeout/2)
}
