package main

import (
	"cmp"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"

	"github.com/spf13/pflag"

	"github.com/rnbd-go/rnbd/modules/rnbd-client"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/audit"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/journal"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rtrs/tlsauth"
)

// nbdOptions are the options of the NBD front end's TLS.
type nbdOptions struct {
	NBDTLS     string `yaml:"nbd-tls"`
	NBDTLSCA   string `yaml:"nbd-tls-ca"`
	NBDTLSCert string `yaml:"nbd-tls-cert"`
	NBDTLSKey  string `yaml:"nbd-tls-key"`
	NBDTLSCRL  string `yaml:"nbd-tls-crl"`

	NBDAccess []plugin.UserRule `yaml:"nbd-access"`
}

func (o *nbdOptions) register(f *pflag.FlagSet) {
	f.StringVar(&o.NBDTLS, "nbd-tls", tlsOff, "TLS of NBD clients: off, allow (clients choose) or require; a listener of --nbd-listen that ends in \""+trusted+"\" serves clients without it all the same")
	f.StringVar(&o.NBDTLSCA, "nbd-tls-ca", "", "PEM file: certificates of those who may sign the certificates of NBD clients, who need one then")
	f.StringVar(&o.NBDTLSCert, "nbd-tls-cert", "", "PEM file: certificate of the NBD front end, and those between it and the CA of its clients")
	f.StringVar(&o.NBDTLSKey, "nbd-tls-key", "", "PEM file: private key of --nbd-tls-cert")
	f.StringVar(&o.NBDTLSCRL, "nbd-tls-crl", "", "PEM file: lists of revoked certificates of NBD clients, signed by a CA of --nbd-tls-ca")
}

// open reads the files. Without TLS it returns nil.
func (o *nbdOptions) open(log *slog.Logger) (*tlsauth.Auth, error) {
	files := tlsauth.Files{CA: o.NBDTLSCA, Cert: o.NBDTLSCert, Key: o.NBDTLSKey, CRL: o.NBDTLSCRL}
	switch o.NBDTLS {
	case tlsOff:
		if files != (tlsauth.Files{}) {
			return nil, usageError{fmt.Errorf("files for the TLS of NBD are named, and --nbd-tls is off: say --nbd-tls %s", tlsRequire)}
		}
		if len(o.NBDAccess) > 0 {
			return nil, usageError{fmt.Errorf("nbd-access has rules, and without TLS NBD clients prove no identity: say --nbd-tls %s", tlsRequire)}
		}
		return nil, nil
	case tlsAllow, tlsRequire:
	default:
		return nil, usageError{fmt.Errorf("--nbd-tls %q: use %s, %s or %s", o.NBDTLS, tlsOff, tlsAllow, tlsRequire)}
	}
	a, err := tlsauth.NewHandover(tlsauth.Config{Files: files, Logger: log})
	if err != nil {
		return nil, usageError{fmt.Errorf("--nbd-tls %s: %w", o.NBDTLS, err)}
	}
	return a, nil
}

// nbdRules are the rules in force.
type nbdRules struct {
	list atomic.Pointer[[]plugin.UserRule]
}

// set takes over rules. They have no error.
func (r *nbdRules) set(list []plugin.UserRule) { r.list.Store(&list) }

// protectNBD gives the NBD front end the means of TLS; a nil: none.
func (o *nbdOptions) protectNBD(cfg *client.Config, a *tlsauth.Auth, rules *nbdRules) {
	if a == nil {
		return
	}
	rules.set(o.NBDAccess)
	required := o.NBDTLS == tlsRequire
	for i := range cfg.Frontends {
		if cfg.Frontends[i].Name == "nbd" {
			cfg.Frontends[i].TLS = func() plugin.TLS {
				h := a.Handover()
				return plugin.TLS{Certificate: h.Cert, PrivateKey: h.Key, ClientCA: h.CA, ClientCRL: h.CRL, Rules: *rules.list.Load(), Required: required}
			}
		}
	}
}

// auditNBD records what NBD clients do, where TLS is on.
func auditNBD(cfg *client.Config, run *daemonRun) {
	for i := range cfg.Frontends {
		if cfg.Frontends[i].TLS == nil {
			continue
		}
		cfg.Frontends[i].Users = func(events []plugin.UserEvent, lost uint64) {
			for _, e := range events {
				run.audit.AddPeer(peerAddr(e.Peer), nbdRecord(e))
				if change, ok := nbdChange(e); ok {
					run.journal.Add(change)
				}
			}
			if lost > 0 {
				run.log.Error("records of NBD clients are lost: there were too many at once", "lost", lost)
			}
		}
	}
}

// peerAddr returns the address of an NBD client, the zero one for a user of this host.
func peerAddr(peer string) netip.Addr {
	if p, err := netip.ParseAddrPort(peer); err == nil {
		return p.Addr()
	}
	addr, _ := netip.ParseAddr(peer) // zero: a socket of this host
	return addr
}

// nbdRecord is the record of an act of an NBD client.
func nbdRecord(e plugin.UserEvent) audit.Record {
	return audit.Record{
		Time: e.Time, Event: e.Event, Result: cmp.Or(e.Error, audit.OK), Client: e.Peer, Server: e.Listener, Fabric: "nbd",
		Identity: e.Identity, Claimed: e.Claimed, Device: e.Device, Mode: e.Mode, Reason: e.Reason, LeftOut: e.LeftOut,
	}
}

// nbdChange is the event of an NBD client that may do less, or more, than before.
func nbdChange(e plugin.UserEvent) (journal.Event, bool) {
	c := journal.Event{Kind: journal.Device, Device: e.Device, Why: strings.TrimSpace(e.Peer+" "+e.Identity) + ": " + e.Reason}
	switch e.Event {
	case plugin.UserForced:
		c.From, c.To = "NBD client connected", "NBD client closed"
	case plugin.UserJudged:
		c.From, c.To = "NBD client connected", "NBD client "+e.Mode
	default:
		return c, false
	}
	return c, true
}

// takeSockets gives the NBD front end the sockets of the service manager. They
// stand for the default one; those of the configuration are made besides.
func takeSockets(cfg *client.Config, held, trusted []*os.File, configured bool) {
	for i := range cfg.Frontends {
		fe := &cfg.Frontends[i]
		if fe.Name != "nbd" || len(held)+len(trusted) == 0 {
			continue
		}
		fe.Sockets, fe.TrustedSockets = held, trusted
		if !configured {
			fe.Listen = nil
		}
	}
}
