package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"golang.org/x/net/netutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/access"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rtrs/tlsauth"
)

// adminConnections bounds the connections of remote administrators.
const adminConnections = 64

// adminProtocol is the application protocol (ALPN) of gRPC.
const adminProtocol = "h2"

// serveAdmin serves the control API of a server over TLS until the function that it returns
// is called. Without --admin-listen it does nothing.
func (o *serverOptions) serveAdmin(run *daemonRun, daemon controlpb.ServerDaemonServer, rules func() *access.Rules) (stop func(), err error) {
	if o.AdminListen == "" {
		return func() {}, nil
	}
	l, err := listenAdmin(run.cmd.Context(), o.AdminListen, run.pre != nil)
	if err != nil {
		return nil, usageError{fmt.Errorf("--admin-listen %s: %w", o.AdminListen, err)}
	}
	creds := &adminCredentials{credentials.NewTLS(run.tls.MutualServer(adminProtocol)), run.tls}
	api := control.NewRemoteServer(creds, control.LogCalls(run.logs.Logger("control")), control.AuditCalls(run.audit),
		control.AuthorizeRemote(func(identity string, addr netip.Addr) control.Actor { return actorOf(rules(), identity, addr) }))
	controlpb.RegisterServerDaemonServer(api, daemon)
	var served sync.WaitGroup
	served.Go(func() {
		if err := api.Serve(netutil.LimitListener(l, adminConnections)); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			run.log.Error("remote administration has ended", "err", err)
		}
	})
	run.log.Info("administrators are served by TLS", "address", l.Addr().String())
	return func() { stopGracefully(api); served.Wait() }, nil
}

// listenAdmin opens the socket. After a hand-over it waits until the process that hands
// over has closed its own.
func listenAdmin(ctx context.Context, address string, wait bool) (net.Listener, error) {
	for end := time.Now().Add(shutdownLimit); ; {
		l, err := net.Listen("tcp", address)
		if err == nil || !wait || !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(end) {
			return l, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// actorOf returns what the access rules allow an identity.
func actorOf(rules *access.Rules, identity string, addr netip.Addr) control.Actor {
	a, ok := rules.Administrator(identity, addr)
	if !ok {
		return control.Actor{}
	}
	roles := map[string]control.Role{access.RoleRead: control.Reader, access.RoleVolumes: control.Volumes, access.RoleAdmin: control.Admin}
	return control.Actor{Identity: identity, Role: roles[a.Role], Quota: uint64(min(max(a.QuotaBytes, 0), math.MaxInt64))}
}

// adminCredentials are those of TLS, and tell the identity of the client.
type adminCredentials struct {
	credentials.TransportCredentials
	auth *tlsauth.Auth
}

// ServerHandshake implements credentials.TransportCredentials.
func (c *adminCredentials) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := c.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		return nil, nil, err
	}
	tlsInfo, ok := info.(credentials.TLSInfo)
	if !ok {
		return nil, nil, errors.Join(fmt.Errorf("the handshake tells %T", info), conn.Close())
	}
	identity, holds, err := c.auth.MutualPeer(tlsInfo.State)
	if err != nil {
		return nil, nil, errors.Join(err, conn.Close())
	}
	return conn, control.Peer{CommonAuthInfo: tlsInfo.CommonAuthInfo, Identity: identity, Holds: holds}, nil
}

// Clone implements credentials.TransportCredentials.
func (c *adminCredentials) Clone() credentials.TransportCredentials {
	return &adminCredentials{c.TransportCredentials.Clone(), c.auth}
}
