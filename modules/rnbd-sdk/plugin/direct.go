package plugin

import (
	"context"
	"fmt"
	"path"
	"sync"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// LaunchDirect is LaunchInProcess without sockets: calls are function calls, and
// descriptors are handed over. Nothing of it waits for the system, so it runs in a
// bubble of testing/synctest; there the author's Serve must wait on Go's timers
// and channels only. It is for simulations.
func LaunchDirect(ctx context.Context, c Config, author any) (*Process, error) {
	c = c.withDefaults()
	info, err := describe(author)
	if err != nil {
		return nil, err
	}
	fds := newFDReceiver(nil)
	in := newInProcess(c, author, info, fds)
	in.server.direct = true
	sender := &directSender{to: fds, ended: make(chan struct{})}
	link := &directLink{services: map[string]*directService{}, ended: sender.ended}
	in.server.register(link)
	in.hangUp, in.closeLink = sender.close, func() {}
	go func() {
		sender.waitEnd()
		fds.closeAll()
		in.end()
	}()
	p, err := in.start(ctx, newProcess(c, sender, link))
	if err != nil {
		return nil, fmt.Errorf("start %s %q: %w", c.Kind, c.Name, err)
	}
	return p, nil
}

// directSender hands descriptors over within the process.
type directSender struct {
	to    *fdReceiver
	ended chan struct{}
	once  sync.Once

	mu   sync.Mutex
	last uint64
}

func (s *directSender) send(fds ...int) (uint64, error) {
	var copies []int
	for _, fd := range fds {
		n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			closeFDs(copies)
			return 0, fmt.Errorf("pass descriptors: %w", err)
		}
		copies = append(copies, n)
	}
	token := s.skip()
	s.to.put(token, copies)
	return token, nil
}

func (s *directSender) skip() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last++
	return s.last
}

func (s *directSender) close()   { s.once.Do(func() { close(s.ended) }) }
func (s *directSender) waitEnd() { <-s.ended }

// directLink calls the methods of registered services.
type directLink struct {
	services map[string]*directService // by full name
	ended    chan struct{}
}

type directService struct {
	desc *grpc.ServiceDesc
	impl any
}

func (l *directLink) RegisterService(desc *grpc.ServiceDesc, impl any) {
	l.services[desc.ServiceName] = &directService{desc: desc, impl: impl}
}

// Invoke returns when the method has, or ctx is done, or the plugin has ended; the
// method may go on then, as in another process.
func (l *directLink) Invoke(ctx context.Context, method string, args, reply any, _ ...grpc.CallOption) error {
	call, err := l.find(method)
	if err != nil {
		return err
	}
	type result struct {
		resp any
		err  error
	}
	done := make(chan result, 1)
	go func() {
		resp, err := call(ctx, args)
		done <- result{resp, err}
	}()
	select {
	case r := <-done:
		if r.err == nil {
			proto.Merge(reply.(proto.Message), r.resp.(proto.Message))
		}
		return r.err
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	case <-l.ended:
		return status.Error(codes.Unavailable, "the plugin has ended")
	}
}

func (l *directLink) find(method string) (func(context.Context, any) (any, error), error) {
	s := l.services[path.Base(path.Dir(method))]
	if s == nil {
		return nil, status.Errorf(codes.Unimplemented, "no service for %s", method)
	}
	for i := range s.desc.Methods {
		if m := &s.desc.Methods[i]; m.MethodName == path.Base(method) {
			return func(ctx context.Context, args any) (any, error) {
				decode := func(in any) error { proto.Merge(in.(proto.Message), args.(proto.Message)); return nil }
				return m.Handler(s.impl, ctx, decode, encodeErrors)
			}, nil
		}
	}
	return nil, status.Errorf(codes.Unimplemented, "no method %s", method)
}

// NewStream refuses: the plugin protocol has no streams.
func (l *directLink) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (grpc.ClientStream, error) {
	return nil, status.Error(codes.Unimplemented, "streams")
}
