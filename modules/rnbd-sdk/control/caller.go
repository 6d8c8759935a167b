package control

import (
	"context"
	"errors"
	"net"
	"path"
	"syscall"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/audit"
)

// Caller is the process at the other end of a control connection, as the kernel
// knew it when it connected.
type Caller struct {
	UID, PID int
	Groups   []int // its group, and the others that it is in
}

// CallerOf returns the caller of a call that a server of NewServer serves. False:
// it came over no unix socket.
func CallerOf(ctx context.Context) (Caller, bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return Caller{}, false
	}
	info, ok := p.AuthInfo.(callerInfo)
	return info.Caller, ok
}

// callerInfo is what the handshake found out.
type callerInfo struct {
	credentials.CommonAuthInfo
	Caller
}

func (callerInfo) AuthType() string { return "unix" }

// callerCredentials asks the kernel who connects. They put nothing on the wire, so
// that clients need not know of them.
type callerCredentials struct{}

func (callerCredentials) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	info := callerInfo{CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.NoSecurity}}
	u, ok := c.(*net.UnixConn)
	if !ok {
		return c, nil, nil
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return nil, nil, err
	}
	var sockErr error
	if err := raw.Control(func(fd uintptr) { info.Caller, sockErr = callerOfSocket(int(fd)) }); err != nil {
		return nil, nil, err
	}
	return c, info, sockErr
}

func (callerCredentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("these credentials are the server's")
}

func (callerCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "unix"}
}
func (c callerCredentials) Clone() credentials.TransportCredentials { return c }
func (callerCredentials) OverrideServerName(string) error           { return nil }

// callerOfSocket asks the kernel.
func callerOfSocket(fd int) (Caller, error) {
	cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return Caller{}, err
	}
	more, err := peerGroups(fd)
	return Caller{UID: int(cred.Uid), PID: int(cred.Pid), Groups: append(more, int(cred.Gid))}, err
}

// AuditCalls records the calls that change something and those that are refused,
// with their callers. A nil log takes none.
func AuditCalls(log *audit.Log) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		call, args := path.Base(info.FullMethod), argsText(req)
		reads := RoleFor(info.FullMethod) == Reader || call == "SetLogLevels" && args == "" // which lists
		var resp any
		err := log.Refusal()
		if reads || err == nil {
			resp, err = next(ctx, req)
		}
		if log == nil || reads && !errors.Is(err, syscall.EACCES) {
			return resp, err
		}
		r := audit.Record{Event: audit.EventCall, Call: call, Args: args, Result: audit.ResultOf(err)}
		if c, ok := CallerOf(ctx); ok {
			r.UID, r.PID = &c.UID, &c.PID
		}
		if p, addr, ok := peerOf(ctx); ok {
			r.Identity, r.Client = p.Identity, addr.String()
			log.AddPeer(addr.Addr(), r)
			return resp, err
		}
		log.Add(r)
		return resp, err
	}
}

// maxArgs is how many bytes of a call's arguments are recorded.
const maxArgs = 1024

func argsText(req any) string {
	m, ok := req.(proto.Message)
	if !ok {
		return ""
	}
	text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(Spelled(m))
	if err != nil || string(text) == "{}" {
		return ""
	}
	return string(text[:min(len(text), maxArgs)])
}
