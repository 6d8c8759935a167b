package plugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"

	"google.golang.org/grpc"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/pluginpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// server is the plugin's end of the control path: the part that both kinds
// share.
type server struct {
	pluginpb.UnimplementedPluginServer

	info        Info
	author      any // the Backend or Frontend
	kind        kindServer
	fds         *fdReceiver
	ringVersion uint32
	log         *slog.Logger
	fail        func(error)            // the process cannot go on
	local       func(uint64) *shm.Ring // rings that need no descriptors; nil in real processes
	procs       func(pumps int)        // sets GOMAXPROCS; nil where the process is not ours
	direct      bool                   // part of a simulation: its queues need no threads
	arenas      table[mapping]

	mu         sync.Mutex
	configured bool
	crash      CrashClass // it may depend on the settings
	pumps      int        // number of queues, from Configure
	detached   bool
	ended      bool // a plugin within the host's process has been killed
	workers    map[uint32]*worker
}

// kindServer is the part that differs between kinds of plugin.
type kindServer interface {
	register(grpc.ServiceRegistrar)
	newWorker(pump int, ring *shm.Ring) *worker
	arenaBusy(id uint32) error
	eachStats(func(device uint32, d deviceStats))
	closeAll(context.Context) error
}

// worker is a queue and the thread that serves it.
type worker struct {
	asks  *asks
	idle  func() bool         // both are called on the queue's thread
	uses  func(*mapping) bool // nil: does not look into arenas
	disk  func(*root) bool    // as uses, for a disk; io plugins only
	serve func() error
	ring  *shm.Ring
}

func newServer(author any, info Info, log *slog.Logger, fds *fdReceiver) *server {
	s := &server{author: author, info: info, crash: info.Crash, log: log, fds: fds, ringVersion: RingVersion, workers: map[uint32]*worker{}}
	switch a := author.(type) {
	case Backend:
		s.info.Kind = KindIO
		_, s.info.ListsNames = author.(Lister)
		s.kind = &ioServer{server: s, b: a}
	case Frontend:
		s.info.Kind = KindFrontend
		s.kind = &frontServer{server: s, f: a, devices: map[uint32]uint32{}}
	}
	return s
}

// newGRPC makes the gRPC server that carries errnos.
func newGRPC(opts []grpc.ServerOption) *grpc.Server {
	return grpc.NewServer(append(opts, grpc.UnaryInterceptor(encodeErrors))...)
}

func (s *server) register(g grpc.ServiceRegistrar) {
	pluginpb.RegisterPluginServer(g, s)
	s.kind.register(g)
}

func (s *server) Describe(context.Context, *pluginpb.DescribeRequest) (*pluginpb.DescribeResponse, error) {
	s.mu.Lock()
	info := s.info
	info.Crash = s.crash
	s.mu.Unlock()
	return &pluginpb.DescribeResponse{Info: infoToPB(info), RingVersion: s.ringVersion}, nil
}

func (s *server) Configure(_ context.Context, r *pluginpb.ConfigureRequest) (*pluginpb.ConfigureResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.configured {
		return nil, fmt.Errorf("configure a second time: %w", blk.EBUSY)
	}
	if err := s.configure(r.GetSettings()); err != nil {
		return nil, fmt.Errorf("configure: %w", err)
	}
	s.pumps = min(int(r.GetPumps()), maxPumps)
	if s.procs != nil {
		s.procs(int(r.GetPumps()))
	}
	s.configured = true
	if info, err := describe(s.author); err == nil {
		s.crash = info.Crash
	}
	return &pluginpb.ConfigureResponse{}, nil
}

func (s *server) configure(settings map[string]string) error {
	if c, ok := s.author.(Configurer); ok {
		return c.Configure(settings)
	}
	for k := range settings {
		return fmt.Errorf("%s takes no settings, so no %q: %w", s.info.Name, k, blk.EINVAL)
	}
	return nil
}

func (s *server) AttachQueue(ctx context.Context, r *pluginpb.AttachQueueRequest) (*pluginpb.AttachQueueResponse, error) {
	ring, err := s.takeRing(ctx, r.GetToken())
	if err != nil {
		return nil, fmt.Errorf("attach queue %d: %w", r.GetPump(), err)
	}
	w := s.kind.newWorker(int(r.GetPump()), ring)
	w.ring = ring
	if err := s.start(r.GetPump(), w); err != nil {
		w.closeRing()
		return nil, fmt.Errorf("attach queue %d: %w", r.GetPump(), err)
	}
	return &pluginpb.AttachQueueResponse{}, nil
}

func (s *server) takeRing(ctx context.Context, token uint64) (*shm.Ring, error) {
	if s.local != nil {
		if ring := s.local(token); ring != nil {
			return ring, nil
		}
	}
	fds, err := s.fds.take(ctx, token, 3)
	if err != nil {
		return nil, err
	}
	return shm.OpenRing(fds[0], fds[1], fds[2])
}

func (s *server) start(pump uint32, w *worker) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case !s.configured:
		return fmt.Errorf("before configure: %w", blk.EINVAL)
	case s.detached, s.ended:
		return fmt.Errorf("after detach: %w", blk.ENODEV)
	case s.workers[pump] != nil:
		return fmt.Errorf("in use: %w", blk.EEXIST)
	}
	s.workers[pump] = w
	go s.run(pump, w)
	return nil
}

// run is the life of a queue's thread. The thread ends with it.
func (s *server) run(pump uint32, w *worker) {
	if !s.direct {
		runtime.LockOSThread()
	}
	err := w.serve()
	asked := w.asks.closed.Load()
	close(w.asks.done)
	if asked {
		if err != nil {
			s.log.Error("queue ended", "queue", pump, "err", err)
		}
		return
	}
	if err == nil {
		err = errors.New("returned while the queue was open")
		if w.asks.broken.Load() {
			err = fmt.Errorf("the host broke the ring: %w", shm.ErrCorrupt)
		}
	}
	s.fail(fmt.Errorf("serve queue %d: %w", pump, err))
}

func (w *worker) closeRing() {
	w.asks.removeEvent()
	_ = w.ring.Close()
}

func (s *server) AttachArena(ctx context.Context, r *pluginpb.AttachArenaRequest) (*pluginpb.AttachArenaResponse, error) {
	fds, err := s.fds.take(ctx, r.GetToken(), 1)
	if err != nil {
		return nil, fmt.Errorf("attach arena %d: %w", r.GetId(), err)
	}
	m, err := s.mapArena(r.GetId(), fds[0], r.GetSize())
	if err != nil {
		return nil, fmt.Errorf("attach arena %d: %w", r.GetId(), err)
	}
	if ctx.Err() != nil && s.arenas.swap(r.GetId(), m, nil) { // the caller is gone, and may have detached it before it was there
		s.unmap(r.GetId(), m)
		return nil, fmt.Errorf("attach arena %d: %w", r.GetId(), context.Cause(ctx))
	}
	return &pluginpb.AttachArenaResponse{}, nil
}

func (s *server) mapArena(id uint32, fd int, size uint64) (*mapping, error) {
	if size > 1<<46 {
		closeFDs([]int{fd})
		return nil, fmt.Errorf("%d bytes: %w", size, blk.EINVAL)
	}
	a, err := shm.OpenArena(fd, int(size))
	if err != nil {
		return nil, err
	}
	m := &mapping{mem: a.Bytes(), fd: a.FD(), close: a.Close}
	if s.arenas.get(id) != nil {
		_ = a.Close()
		return nil, fmt.Errorf("in use: %w", blk.EEXIST)
	}
	user, _ := s.author.(ArenaUser)
	if user != nil {
		if err := user.AttachArena(id, m.mem); err != nil {
			_ = a.Close()
			return nil, err
		}
	}
	if err := s.arenas.add(id, m); err != nil {
		if user != nil {
			user.DetachArena(id)
		}
		_ = a.Close()
		return nil, err
	}
	return m, nil
}

func (s *server) DetachArena(ctx context.Context, r *pluginpb.DetachArenaRequest) (*pluginpb.DetachArenaResponse, error) {
	id := r.GetId()
	if err := s.kind.arenaBusy(id); err != nil {
		return nil, fmt.Errorf("detach arena %d: %w", id, err)
	}
	m := s.arenas.get(id)
	if m == nil || !s.arenas.swap(id, m, nil) {
		return nil, fmt.Errorf("detach arena %d: not attached: %w", id, blk.ENOENT)
	}
	for _, w := range s.queues() {
		if w.uses == nil {
			continue
		}
		if err := w.asks.wait(ctx, func() bool { return !w.uses(m) }); err != nil {
			_ = s.arenas.add(id, m)
			return nil, fmt.Errorf("detach arena %d: requests in flight: %w", id, err)
		}
	}
	s.unmap(id, m)
	return &pluginpb.DetachArenaResponse{}, nil
}

func (s *server) unmap(id uint32, m *mapping) {
	if user, ok := s.author.(ArenaUser); ok {
		user.DetachArena(id)
	}
	if err := m.close(); err != nil {
		s.log.Error("unmap arena", "arena", id, "err", err)
	}
}

func (s *server) queues() []*worker {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []*worker
	for _, w := range s.workers {
		out = append(out, w)
	}
	return out
}

func (s *server) Drain(ctx context.Context, _ *pluginpb.DrainRequest) (*pluginpb.DrainResponse, error) {
	for _, w := range s.queues() {
		if err := w.asks.wait(ctx, w.idle); err != nil {
			return nil, fmt.Errorf("drain: requests in flight: %w", err)
		}
	}
	return &pluginpb.DrainResponse{}, nil
}

func (s *server) Detach(ctx context.Context, _ *pluginpb.DetachRequest) (*pluginpb.DetachResponse, error) {
	if err := s.detach(ctx); err != nil {
		return nil, fmt.Errorf("detach: %w", err)
	}
	return &pluginpb.DetachResponse{}, nil
}

// detach ends everything in order; nothing of shared memory is touched after
// it. A second call does nothing.
func (s *server) detach(ctx context.Context) error {
	s.mu.Lock()
	if s.detached {
		s.mu.Unlock()
		return nil
	}
	s.detached = true
	s.mu.Unlock()
	workers := s.queues()
	for _, w := range workers {
		w.asks.close()
	}
	for _, w := range workers {
		select {
		case <-w.asks.done:
		case <-ctx.Done():
			return fmt.Errorf("plugin's Serve has not returned: %w", context.Cause(ctx))
		}
	}
	err := s.kind.closeAll(ctx)
	for id, m := range s.arenas.take() {
		s.unmap(id, m)
	}
	for _, w := range workers {
		w.closeRing()
	}
	return err
}

// setProcs is for real processes.
func setProcs(pumps int) {
	if pumps > 0 {
		pump.SetProcs(pumps)
	}
}
