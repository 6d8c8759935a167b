package control

import (
	"context"
	"fmt"
	"net/netip"
	"path"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// Peer is the proved identity at the other end of a remote control connection. It is the
// AuthInfo of the credentials that are given to NewRemoteServer.
type Peer struct {
	credentials.CommonAuthInfo
	Identity string
	// Holds returns an error if the identity could not be proved any more.
	Holds func() error
}

// AuthType implements credentials.AuthInfo.
func (Peer) AuthType() string { return "rnbd-tls" }

// peerOf returns the peer of a call of a server of NewRemoteServer, and its address.
func peerOf(ctx context.Context) (Peer, netip.AddrPort, bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return Peer{}, netip.AddrPort{}, false
	}
	info, ok := p.AuthInfo.(Peer)
	addr, _ := netip.ParseAddrPort(p.Addr.String()) // the zero one matches no rule
	return info, addr, ok
}

// Actor is the administrator on whose behalf a call runs.
type Actor struct {
	Identity string // empty: an administrator of the host
	Role     Role
	Quota    uint64 // sum of the sizes of its volumes in bytes; 0: no limit
}

type actorKey struct{}

// ActorOf returns the actor of a call. A call that did not come over TLS is that of an
// administrator of the host: Authorize has let it in.
func ActorOf(ctx context.Context) Actor {
	if a, ok := ctx.Value(actorKey{}).(Actor); ok {
		return a
	}
	return Actor{Role: Admin}
}

// Bounds of a remote control connection.
const (
	handshakeTime = 5 * time.Second
	remoteStreams = 16      // calls at a time
	remoteMessage = 1 << 20 // bytes of a request
)

// NewRemoteServer is NewServer for connections over a network. creds have Peer as their
// AuthInfo. A connection has 16 calls at a time and requests of at most 1 MiB.
func NewRemoteServer(creds credentials.TransportCredentials, around ...grpc.UnaryServerInterceptor) *grpc.Server {
	return grpc.NewServer(grpc.Creds(creds), grpc.ConnectionTimeout(handshakeTime), grpc.MaxConcurrentStreams(remoteStreams), grpc.MaxRecvMsgSize(remoteMessage),
		grpc.ChainUnaryInterceptor(append([]grpc.UnaryServerInterceptor{keepErrno, spellNames}, around...)...))
}

// AuthorizeRemote refuses calls of a server of NewRemoteServer that the role of their
// caller does not allow, and those of an identity that does not hold any more. roleOf
// returns what an identity may do; NoRole: nothing.
func AuthorizeRemote(roleOf func(identity string, addr netip.Addr) Actor) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		call := path.Base(info.FullMethod)
		p, addr, ok := peerOf(ctx)
		if !ok {
			return nil, fmt.Errorf("%s: the caller is not known: %w", call, syscall.EACCES)
		}
		if err := p.Holds(); err != nil {
			return nil, fmt.Errorf("%s: the identity %q does not hold any more: %w: %w", call, p.Identity, err, syscall.EACCES)
		}
		a := roleOf(p.Identity, addr.Addr())
		if a.Role < RoleFor(info.FullMethod) {
			return nil, fmt.Errorf("%s: the access rules give %q no role that may: it is for the role %s: %w", call, p.Identity, RoleFor(info.FullMethod), syscall.EACCES)
		}
		a.Identity = p.Identity
		return next(context.WithValue(ctx, actorKey{}, a), req)
	}
}

// DialRemote connects to a server daemon at address, HOST:PORT. The caller closes the
// connection.
func DialRemote(address string, creds credentials.TransportCredentials) (controlpb.ServerDaemonClient, *grpc.ClientConn, error) {
	c, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(creds), grpc.WithChainUnaryInterceptor(restoreErrno, sendValid))
	if err != nil {
		return nil, nil, err
	}
	return controlpb.NewServerDaemonClient(c), c, nil
}
