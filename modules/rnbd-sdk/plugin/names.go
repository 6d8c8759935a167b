package plugin

import (
	"context"
	"fmt"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/pluginpb"
)

// ListNames asks the plugin for names of its disks, at most most of them. The error is
// EOPNOTSUPP if it cannot list them, EIO if it lists more. Io plugins only.
func (p *Process) ListNames(ctx context.Context, most int) ([]ListedName, error) {
	const what = "list names"
	if !p.info.ListsNames {
		return nil, fmt.Errorf("%s: %s %q cannot: %w", what, p.c.Kind, p.c.Name, blk.EOPNOTSUPP)
	}
	resp, err := p.disks.ListNames(ctx, &pluginpb.ListNamesRequest{Most: uint32(most)})
	if err != nil {
		return nil, p.failed(what, err)
	}
	if n := len(resp.GetNames()); n > most {
		return nil, fmt.Errorf("%s: %s %q gives %d, at most %d were asked for: %w", what, p.c.Kind, p.c.Name, n, most, blk.EIO)
	}
	var all []ListedName
	for _, n := range resp.GetNames() {
		all = append(all, ListedName{Name: n.GetName(), Size: n.GetSize()})
	}
	return all, nil
}

// ListNames is the plugin's side.
func (s *ioServer) ListNames(ctx context.Context, r *pluginpb.ListNamesRequest) (*pluginpb.ListNamesResponse, error) {
	l, ok := s.author.(Lister)
	if !ok {
		return nil, fmt.Errorf("%s lists no names: %w", s.info.Name, blk.EOPNOTSUPP)
	}
	names, err := l.ListNames(ctx, int(r.GetMost()))
	if err != nil {
		return nil, fmt.Errorf("list names: %w", err)
	}
	resp := &pluginpb.ListNamesResponse{}
	for _, n := range names {
		resp.Names = append(resp.Names, &pluginpb.ListedName{Name: n.Name, Size: n.Size})
	}
	return resp, nil
}
