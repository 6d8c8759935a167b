package control

import (
	"context"
	"fmt"
	"os"
	"os/user"
	"path"
	"slices"
	"strconv"
	"syscall"

	"google.golang.org/grpc"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// Role is what a caller may do with a daemon.
type Role int

const (
	// NoRole has no rights.
	NoRole Role = iota
	// Reader may list, show and count.
	Reader
	// Volumes may also create volumes, and change those that it has created.
	Volumes
	// Admin may do everything.
	Admin
)

// String returns the name of the role in the access rules.
func (r Role) String() string { return [...]string{"none", "read", "volumes", "admin"}[r] }

// Group is a group of users that may read from a control socket. A nil *Group
// has no members.
type Group struct {
	Name string
	ID   int
}

// FindGroup returns the group with a name or a number.
func FindGroup(name string) (*Group, error) {
	g, err := user.LookupGroup(name)
	if err != nil {
		if id, bad := strconv.ParseUint(name, 10, 31); bad == nil {
			return &Group{Name: name, ID: int(id)}, nil
		}
		return nil, fmt.Errorf("group %q: this host has none of that name; make it with groupadd, or give its number: %w", name, syscall.EINVAL)
	}
	id, err := strconv.Atoi(g.Gid)
	if err != nil {
		return nil, fmt.Errorf("group %q: number %q: %w", name, g.Gid, err)
	}
	return &Group{Name: name, ID: id}, nil
}

// forReaders are the calls that change nothing. Every other call, also one that is
// not known, is for admins.
var forReaders = map[string]bool{
	controlpb.ServerDaemon_Info_FullMethodName:         true,
	controlpb.ServerDaemon_ListDevices_FullMethodName:  true,
	controlpb.ServerDaemon_ListSessions_FullMethodName: true,
	controlpb.ServerDaemon_PathStats_FullMethodName:    true,
	controlpb.ServerDaemon_DeviceStats_FullMethodName:  true,
	controlpb.ServerDaemon_LogLevels_FullMethodName:    true,
	controlpb.ServerDaemon_ListAccess_FullMethodName:   true,
	controlpb.ServerDaemon_CheckAccess_FullMethodName:  true,
	controlpb.ServerDaemon_Events_FullMethodName:       true,
	controlpb.ServerDaemon_ListPools_FullMethodName:    true,
	controlpb.ServerDaemon_ListVolumes_FullMethodName:  true,
	controlpb.ClientDaemon_Info_FullMethodName:         true,
	controlpb.ClientDaemon_ListDevices_FullMethodName:  true,
	controlpb.ClientDaemon_ListSessions_FullMethodName: true,
	controlpb.ClientDaemon_PathStats_FullMethodName:    true,
	controlpb.ClientDaemon_DeviceStats_FullMethodName:  true,
	controlpb.ClientDaemon_LogLevels_FullMethodName:    true,
	controlpb.ClientDaemon_Events_FullMethodName:       true,
}

// forVolumes are the calls that change volumes.
var forVolumes = map[string]bool{
	controlpb.ServerDaemon_CreateVolume_FullMethodName:    true,
	controlpb.ServerDaemon_DeleteVolume_FullMethodName:    true,
	controlpb.ServerDaemon_ResizeVolume_FullMethodName:    true,
	controlpb.ServerDaemon_CreateSnapshot_FullMethodName:  true,
	controlpb.ServerDaemon_DeleteSnapshot_FullMethodName:  true,
	controlpb.ServerDaemon_CloneVolume_FullMethodName:     true,
	controlpb.ServerDaemon_PublishVolume_FullMethodName:   true,
	controlpb.ServerDaemon_UnpublishVolume_FullMethodName: true,
}

// RoleFor returns the least role that may call a method, by its full name.
func RoleFor(method string) Role {
	switch {
	case forReaders[method]:
		return Reader
	case forVolumes[method]:
		return Volumes
	}
	return Admin
}

// RoleOf returns the role of a caller at a daemon of this process's user.
func (g *Group) RoleOf(c Caller) Role {
	switch {
	case c.UID == 0, c.UID == os.Geteuid():
		return Admin
	case g != nil && slices.Contains(c.Groups, g.ID):
		return Reader
	}
	return NoRole
}

// Authorize refuses calls that are not for the role of their caller. It belongs
// behind the interceptors that record calls, so that they record refusals, too.
func Authorize(g *Group) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		if err := g.authorize(ctx, info.FullMethod); err != nil {
			return nil, err
		}
		return next(ctx, req)
	}
}

func (g *Group) authorize(ctx context.Context, method string) error {
	c, ok := CallerOf(ctx)
	if !ok {
		return fmt.Errorf("%s: the caller is not known: %w", path.Base(method), syscall.EACCES)
	}
	switch role := g.RoleOf(c); {
	case role >= RoleFor(method):
		return nil
	case role == NoRole:
		return fmt.Errorf("%s: user %d is neither root nor the user of the daemon, and in no group that it lets in: %w", path.Base(method), c.UID, syscall.EACCES)
	}
	return fmt.Errorf("%s: group %s may list, show and read metrics; user %d is neither root nor the user of the daemon: %w", path.Base(method), g.Name, c.UID, syscall.EACCES)
}
