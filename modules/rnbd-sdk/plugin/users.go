package plugin

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/names"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/pluginpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ratelimit"
)

// UserReporter is a Frontend that reports what its users do.
type UserReporter interface {
	// TakeUsers returns the events since the last call, and the number of those
	// that had no room.
	TakeUsers() (events []UserEvent, lost uint64)
}

// UserEvent is an act of a user of a front end.
type UserEvent struct {
	Time     time.Time
	Event    string // one of the constants below
	Error    string // why it was refused; empty: it was not
	Peer     string // address
	Listener string // its name
	Identity string // that the user has proved
	Device   string
	Mode     string // ro or rw
	Reason   string // of a close, or of what is not allowed any more
	Claimed  string // identity that the user claims, and has not proved
	LeftOut  uint64 // the event stands for so many refusals of Peer; set by UserEvents
}

// Values of UserEvent.Event.
const (
	UserConnects   = "connect"
	UserHandshakes = "handshake" // of TLS fails, or none is begun where it must be
	UserOpens      = "open"
	UserJudged     = "rules" // may do less with the device than before
	UserCloses     = "close"
	UserForced     = "force-close" // is closed, because it would not be served any more
)

// maxUserEvents bounds the events that wait for the host.
const maxUserEvents = 2048

// UserEvents keeps events for TakeUsers. Any goroutine may call it.
type UserEvents struct {
	mu       sync.Mutex
	list     []UserEvent
	lost     uint64
	refusals *ratelimit.Limiter[netip.Addr, UserEvent] // nil: none was refused yet
}

// Add keeps e, with the time of now if it has none, unless too many wait.
func (u *UserEvents) Add(e UserEvent) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.list) == maxUserEvents {
		u.lost++
		return
	}
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	u.list = append(u.list, e)
}

// AddRefused keeps e about a user at from who is refused. Of many in a short time it
// keeps a few, and how many more there were.
func (u *UserEvents) AddRefused(from netip.Addr, e UserEvent) {
	u.mu.Lock()
	if u.refusals == nil {
		u.refusals = ratelimit.New(ratelimit.Refusals, u.addSome)
	}
	refusals := u.refusals
	u.mu.Unlock()
	e.Time, e.Error, e.Claimed, e.Device = time.Now(), names.Line(e.Error), names.Line(e.Claimed), names.Line(e.Device)
	refusals.Add(ratelimit.Host(from), e)
}

func (u *UserEvents) addSome(from netip.Addr, e UserEvent, leftOut uint64) {
	if leftOut > 0 {
		e.LeftOut, e.Claimed, e.Device, e.Peer = leftOut, "", "", ""
		if from.IsValid() {
			e.Peer = from.String()
		}
	}
	u.Add(e)
}

// TakeUsers implements UserReporter.
func (u *UserEvents) TakeUsers() ([]UserEvent, uint64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	list, lost := slices.Clone(u.list), u.lost
	u.list, u.lost = u.list[:0], 0
	return list, lost
}

func (s *frontServer) TakeUsers(context.Context, *pluginpb.TakeUsersRequest) (*pluginpb.TakeUsersResponse, error) {
	r, ok := s.f.(UserReporter)
	if !ok {
		return nil, status.Error(codes.Unimplemented, "the plugin reports no users")
	}
	events, lost := r.TakeUsers()
	out := &pluginpb.TakeUsersResponse{Lost: lost}
	for _, e := range events {
		out.Events = append(out.Events, &pluginpb.UserEvent{
			TimeNs: e.Time.UnixNano(), Event: e.Event, Error: e.Error, Peer: e.Peer, Listener: e.Listener,
			Identity: e.Identity, Device: e.Device, Mode: e.Mode, Reason: e.Reason,
			Claimed: e.Claimed, LeftOut: e.LeftOut,
		})
	}
	return out, nil
}

// TakeUsers returns what users of the front end have done since the last call, and
// how many events are lost. A plugin without that call reports none.
func (p *Process) TakeUsers(ctx context.Context) (events []UserEvent, lost uint64, err error) {
	r, err := p.front.TakeUsers(ctx, &pluginpb.TakeUsersRequest{})
	if status.Code(err) == codes.Unimplemented {
		return nil, 0, nil
	}
	for _, e := range r.GetEvents() {
		events = append(events, UserEvent{
			Time: time.Unix(0, e.TimeNs), Event: e.Event, Error: e.Error, Peer: e.Peer, Listener: e.Listener,
			Identity: e.Identity, Device: e.Device, Mode: e.Mode, Reason: e.Reason,
			Claimed: e.Claimed, LeftOut: e.LeftOut,
		})
	}
	return events, r.GetLost(), p.failed("take users", err)
}
