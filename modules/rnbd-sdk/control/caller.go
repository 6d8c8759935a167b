package control

import (
	"context"
	"errors"
	"net"
	"path"
	"strings"

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
type Caller struct{ UID, PID int }

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
	var cred *unix.Ucred
	var sockErr error
	if err := raw.Control(func(fd uintptr) {
		cred, sockErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return nil, nil, err
	}
	if sockErr != nil {
		return nil, nil, sockErr
	}
	info.Caller = Caller{UID: int(cred.Uid), PID: int(cred.Pid)}
	return c, info, nil
}

func (callerCredentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("these credentials are the server's")
}

func (callerCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "unix"}
}
func (c callerCredentials) Clone() credentials.TransportCredentials { return c }
func (callerCredentials) OverrideServerName(string) error           { return nil }

// reading are the calls that change nothing, by the beginning of their names.
var reading = []string{"Info", "List", "PathStats", "DeviceStats", "LogLevels", "Check"}

// AuditCalls records the calls that change something, with who made them. A nil log
// takes none.
func AuditCalls(log *audit.Log) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		resp, err := next(ctx, req)
		call, args := path.Base(info.FullMethod), argsText(req)
		if log == nil || OnlyReads(call) || call == "SetLogLevels" && args == "" { // which lists

			return resp, err
		}
		r := audit.Record{Event: audit.EventCall, Call: call, Args: args, Result: audit.ResultOf(err)}
		if c, ok := CallerOf(ctx); ok {
			r.UID, r.PID = &c.UID, &c.PID
		}
		log.Add(r)
		return resp, err
	}
}

// OnlyReads reports whether the call with this name changes nothing.
func OnlyReads(call string) bool {
	for _, prefix := range reading {
		if strings.HasPrefix(call, prefix) {
			return true
		}
	}
	return false
}

// maxArgs is how many bytes of a call's arguments are recorded.
const maxArgs = 1024

func argsText(req any) string {
	m, ok := req.(proto.Message)
	if !ok {
		return ""
	}
	text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
	if err != nil || string(text) == "{}" {
		return ""
	}
	return string(text[:min(len(text), maxArgs)])
}
