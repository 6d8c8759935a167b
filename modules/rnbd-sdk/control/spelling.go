package control

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/names"
)

// Strings of the API are spelled as package names says: a peer chooses names of any
// bytes, and a gRPC string is UTF-8. The spelling is made and read here, at the edge
// of a daemon. Behind the edge a name has the bytes that the peer has sent.

// texts are the fields that are shown only, or that name files of this host. All other
// strings are names.
var texts = map[protoreflect.Name]bool{
	"why": true, "error": true, "detail": true, "text": true, "last_error": true, "state": true, "version": true,
	"confined": true, "config_problems": true, "config_dir": true, "endpoint": true, "binary": true,
}

// spelled returns the spelling of a string in a reply.
func spelled(field protoreflect.Name, s string) string {
	if texts[field] {
		return names.Text(s)
	}
	return names.Spell(s)
}

// parsed returns the string that stands for a spelling in a request.
func parsed(field protoreflect.Name, s string) string {
	if texts[field] {
		return s
	}
	return names.Parse(s)
}

// valid returns a string of a caller as gRPC carries it.
func valid(_ protoreflect.Name, s string) string { return names.Valid(s) }

// Spelled returns m with its strings spelled: m itself if that changes nothing, else a
// copy, since m may share memory with the daemon.
func Spelled[M proto.Message](m M) M { return convert(m, spelled) }

// convert returns m with each string converted by f, m itself if f changes none.
func convert[M proto.Message](m M, f func(protoreflect.Name, string) string) M {
	r := m.ProtoReflect()
	if !r.IsValid() || !eachString(r, f, false) {
		return m
	}
	out := proto.Clone(m)
	eachString(out.ProtoReflect(), f, true)
	return out.(M)
}

// eachString reports whether f changes a string of m, or of a message in m. It stores
// the results of f if set is true.
func eachString(m protoreflect.Message, f func(protoreflect.Name, string) string, set bool) (changed bool) {
	m.Range(func(d protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		one := func(v protoreflect.Value, store func(protoreflect.Value)) {
			switch d := elementOf(d); d.Kind() {
			case protoreflect.MessageKind:
				changed = eachString(v.Message(), f, set) || changed
			case protoreflect.StringKind:
				if s := f(d.Name(), v.String()); s != v.String() {
					changed = true
					if set {
						store(protoreflect.ValueOfString(s))
					}
				}
			}
		}
		switch {
		case d.IsList():
			for i := range v.List().Len() {
				one(v.List().Get(i), func(to protoreflect.Value) { v.List().Set(i, to) })
			}
		case d.IsMap():
			v.Map().Range(func(k protoreflect.MapKey, at protoreflect.Value) bool {
				one(at, func(to protoreflect.Value) { v.Map().Set(k, to) })
				return true
			})
		default:
			one(v, func(to protoreflect.Value) { m.Set(d, to) })
		}
		return true
	})
	return changed
}

// elementOf returns the descriptor of the values of a map, and d for other fields.
func elementOf(d protoreflect.FieldDescriptor) protoreflect.FieldDescriptor {
	if d.IsMap() {
		return d.MapValue()
	}
	return d
}

// spellNames is the server's half: names of a request are parsed, those of the reply
// are spelled.
func spellNames(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	if m, ok := req.(proto.Message); ok {
		req = convert(m, parsed)
	}
	resp, err := handle(ctx, req)
	if m, ok := resp.(proto.Message); ok && err == nil {
		resp = convert(m, spelled)
	}
	return resp, err
}

// sendValid is the caller's half: a name that is not UTF-8 may be given as its bytes.
func sendValid(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	if m, ok := req.(proto.Message); ok {
		req = convert(m, valid)
	}
	return invoke(ctx, method, req, reply, cc, opts...)
}

// The views of a daemon for callers in its process: the
// calls that only read have spelled replies, and take spelled names.

type clientView struct{ controlpb.ClientDaemonServer }

// ViewClient returns a client daemon as its callers on the control socket see it.
func ViewClient(c controlpb.ClientDaemonServer) controlpb.ClientDaemonServer { return clientView{c} }

type serverView struct{ controlpb.ServerDaemonServer }

// ViewServer returns a server daemon as its callers on the control socket see it.
func ViewServer(s controlpb.ServerDaemonServer) controlpb.ServerDaemonServer { return serverView{s} }

// view makes a call from within the process.
func view[Q, A proto.Message](ctx context.Context, q Q, call func(context.Context, Q) (A, error)) (A, error) {
	a, err := call(ctx, convert(q, parsed))
	if err != nil {
		return a, err
	}
	return Spelled(a), nil
}

func (v clientView) Info(ctx context.Context, r *controlpb.InfoRequest) (*controlpb.DaemonInfo, error) {
	return view(ctx, r, v.ClientDaemonServer.Info)
}

func (v clientView) ListDevices(ctx context.Context, r *controlpb.ListRequest) (*controlpb.ClientDeviceList, error) {
	return view(ctx, r, v.ClientDaemonServer.ListDevices)
}

func (v clientView) ListSessions(ctx context.Context, r *controlpb.ListRequest) (*controlpb.SessionList, error) {
	return view(ctx, r, v.ClientDaemonServer.ListSessions)
}

func (v clientView) PathStats(ctx context.Context, r *controlpb.PathRequest) (*controlpb.PathStatsReply, error) {
	return view(ctx, r, v.ClientDaemonServer.PathStats)
}

func (v clientView) DeviceStats(ctx context.Context, r *controlpb.DeviceRequest) (*controlpb.DeviceStatsList, error) {
	return view(ctx, r, v.ClientDaemonServer.DeviceStats)
}

func (v clientView) Events(ctx context.Context, r *controlpb.EventsRequest) (*controlpb.EventList, error) {
	return view(ctx, r, v.ClientDaemonServer.Events)
}

func (v serverView) Info(ctx context.Context, r *controlpb.InfoRequest) (*controlpb.DaemonInfo, error) {
	return view(ctx, r, v.ServerDaemonServer.Info)
}

func (v serverView) ListDevices(ctx context.Context, r *controlpb.ListRequest) (*controlpb.ServerDeviceList, error) {
	return view(ctx, r, v.ServerDaemonServer.ListDevices)
}

func (v serverView) ListSessions(ctx context.Context, r *controlpb.ListRequest) (*controlpb.SessionList, error) {
	return view(ctx, r, v.ServerDaemonServer.ListSessions)
}

func (v serverView) PathStats(ctx context.Context, r *controlpb.PathRequest) (*controlpb.PathStatsReply, error) {
	return view(ctx, r, v.ServerDaemonServer.PathStats)
}

func (v serverView) DeviceStats(ctx context.Context, r *controlpb.DeviceRequest) (*controlpb.DeviceStatsList, error) {
	return view(ctx, r, v.ServerDaemonServer.DeviceStats)
}

func (v serverView) Events(ctx context.Context, r *controlpb.EventsRequest) (*controlpb.EventList, error) {
	return view(ctx, r, v.ServerDaemonServer.Events)
}
