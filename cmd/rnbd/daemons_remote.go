package main

import (
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/grpc/credentials"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rtrs/tlsauth"
)

// Names of the flags for a server daemon of another host.
const (
	flagServer     = "server"
	flagServerTLS  = "server-tls"
	flagServerName = "server-name"
)

// remoteFlags registers the flags for a server daemon of another host.
func remoteFlags(f *pflag.FlagSet) {
	f.String(flagServer, "", "server daemon of another host, tls://ADDRESS:PORT, in place of the control socket (default $RNBD_SERVER)")
	f.String(flagServerTLS, "", "folder with ca.crt, tls.crt and tls.key for --server (default $RNBD_SERVER_TLS, else "+systemConfig+"/tls)")
	f.String(flagServerName, "", "what the daemon of --server must prove to be: a host name, an IP address or a SPIFFE ID (default its address)")
}

// remoteServer returns the address of the server daemon of another host, empty for none.
func remoteServer(cmd *cobra.Command) (string, error) {
	url := flagOrEnv(cmd, flagServer, "RNBD_SERVER")
	if url == "" {
		return "", nil
	}
	address, ok := strings.CutPrefix(url, "tls://")
	if _, _, err := net.SplitHostPort(address); !ok || err != nil {
		return "", usageError{fmt.Errorf("--%s %q: write tls://ADDRESS:PORT", flagServer, url)}
	}
	return address, nil
}

// flagOrEnv is the value of a flag, or of a variable of the environment without it.
func flagOrEnv(cmd *cobra.Command, flag, env string) string {
	if f := cmd.InheritedFlags().Lookup(flag); f != nil && f.Value.String() != "" { // rnbd bench has a flag of its own of that name
		return f.Value.String()
	}
	return os.Getenv(env)
}

// dialRemote connects to the server daemon of another host.
func (d *daemons) dialRemote(cmd *cobra.Command, address string) error {
	folder := flagOrEnv(cmd, flagServerTLS, "RNBD_SERVER_TLS")
	if folder == "" {
		folder = filepath.Join(systemConfig, "tls")
	}
	file := func(name string) string { return filepath.Join(folder, name) }
	auth, err := tlsauth.New(tlsauth.Config{
		Files:  tlsauth.Files{CA: file("ca.crt"), Cert: file("tls.crt"), Key: file("tls.key")},
		Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return usageError{fmt.Errorf("--%s: %w", flagServerTLS, err)}
	}
	cfg, err := auth.MutualClient(adminProtocol, address, flagOrEnv(cmd, flagServerName, "RNBD_SERVER_NAME"))
	if err != nil {
		return usageError{fmt.Errorf("--%s: %w", flagServer, err)}
	}
	api, conn, err := control.DialRemote(address, credentials.NewTLS(cfg))
	if err != nil {
		return err
	}
	d.server, d.conns = api, append(d.conns, conn)
	return nil
}
