package plugin

import (
	"context"
	"fmt"
	"os"
	"sync"

	"google.golang.org/grpc"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/pluginpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// frontServer is the control path of a front-end plugin.
type frontServer struct {
	pluginpb.UnimplementedFrontendServer
	*server
	f Frontend

	devMu   sync.Mutex
	devices map[uint32]uint32 // index -> arena id
	stats   table[deviceStats]
}

func (s *frontServer) register(g grpc.ServiceRegistrar) { pluginpb.RegisterFrontendServer(g, s) }

func (s *frontServer) newWorker(pump int, ring *shm.Ring) *worker {
	q := newFrontQueue(pump, ring, &s.stats)
	return &worker{asks: &q.asks, idle: q.idle, serve: func() error { return s.f.Serve(q) }}
}

func (s *frontServer) arenaBusy(id uint32) error {
	s.devMu.Lock()
	defer s.devMu.Unlock()
	for index, arena := range s.devices {
		if arena == id {
			return fmt.Errorf("device %d uses it: %w", index, blk.EBUSY)
		}
	}
	return nil
}

func (s *frontServer) eachStats(f func(uint32, deviceStats)) {
	s.stats.each(func(index uint32, d *deviceStats) { f(index, *d) })
}

// closeAll does nothing: the host removes the devices. They are not served any
// more.
func (s *frontServer) closeAll(context.Context) error { return nil }

func (s *frontServer) AddDevice(ctx context.Context, r *pluginpb.AddDeviceRequest) (*pluginpb.AddDeviceResponse, error) {
	if err := s.add(ctx, r); err != nil {
		return nil, fmt.Errorf("add device %q: %w", r.GetName(), err)
	}
	return &pluginpb.AddDeviceResponse{}, nil
}

func (s *frontServer) add(ctx context.Context, r *pluginpb.AddDeviceRequest) (err error) {
	channel, err := s.takeChannel(ctx, r)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil && channel != nil {
			_ = channel.Close()
		}
	}()
	m := s.arenas.get(r.GetArena())
	if m == nil {
		return fmt.Errorf("arena %d is not attached: %w", r.GetArena(), blk.EINVAL)
	}
	if need := uint64(r.GetSlotSize()) * uint64(r.GetSlots()); need == 0 || need > uint64(len(m.mem)) {
		return fmt.Errorf("%d slots of %d bytes in an arena of %d: %w", r.GetSlots(), r.GetSlotSize(), len(m.mem), blk.EINVAL)
	}
	if !s.addIndex(r.GetIndex(), r.GetArena()) {
		return fmt.Errorf("index %d is in use: %w", r.GetIndex(), blk.EEXIST)
	}
	_ = s.stats.add(r.GetIndex(), new(s.newStats())) // refused: the device is not counted
	err = s.f.AddDevice(ctx, DeviceSpec{
		Index: r.GetIndex(), Name: r.GetName(), Limits: limitsFromPB(r.GetLimits()),
		ArenaID: r.GetArena(), Arena: m.mem, ArenaFD: m.fd, SlotSize: int(r.GetSlotSize()), Slots: int(r.GetSlots()),
		Generation: r.GetGeneration(), Queues: len(s.queues()), Config: r.GetSettings(),
		Identity: r.GetIdentity(), Location: r.GetLocation(), Channel: channel,
	})
	if err != nil {
		s.removeIndex(r.GetIndex())
	}
	return err
}

// takeChannel returns the descriptor of DeviceSpec.Channel, or nil if the request has
// none.
func (s *frontServer) takeChannel(ctx context.Context, r *pluginpb.AddDeviceRequest) (*os.File, error) {
	if r.GetChannel() == 0 {
		return nil, nil
	}
	fds, err := s.fds.take(ctx, r.GetChannel(), 1)
	if err != nil {
		return nil, fmt.Errorf("channel: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "channel of "+r.GetName()), nil
}

func (s *frontServer) addIndex(index, arena uint32) bool {
	s.devMu.Lock()
	defer s.devMu.Unlock()
	if _, taken := s.devices[index]; taken {
		return false
	}
	s.devices[index] = arena
	return true
}

func (s *frontServer) removeIndex(index uint32) {
	s.devMu.Lock()
	defer s.devMu.Unlock()
	delete(s.devices, index)
	s.stats.swap(index, s.stats.get(index), nil)
}

// known refuses an index that was not added.
func (s *frontServer) known(index uint32) error {
	s.devMu.Lock()
	defer s.devMu.Unlock()
	if _, ok := s.devices[index]; !ok {
		return fmt.Errorf("no such device: %w", blk.ENODEV)
	}
	return nil
}

func (s *frontServer) RemoveDevice(ctx context.Context, r *pluginpb.RemoveDeviceRequest) (*pluginpb.RemoveDeviceResponse, error) {
	err := s.known(r.GetIndex())
	if err == nil {
		err = s.f.RemoveDevice(ctx, r.GetIndex(), r.GetForce())
	}
	if err != nil {
		return nil, fmt.Errorf("remove device %d: %w", r.GetIndex(), err)
	}
	s.removeIndex(r.GetIndex())
	return &pluginpb.RemoveDeviceResponse{}, nil
}

func (s *frontServer) ResizeDevice(ctx context.Context, r *pluginpb.ResizeDeviceRequest) (*pluginpb.ResizeDeviceResponse, error) {
	err := s.known(r.GetIndex())
	if err == nil {
		err = s.f.ResizeDevice(ctx, r.GetIndex(), limitsFromPB(r.GetLimits()))
	}
	if err != nil {
		return nil, fmt.Errorf("resize device %d: %w", r.GetIndex(), err)
	}
	return &pluginpb.ResizeDeviceResponse{}, nil
}

func (s *frontServer) AddListener(ctx context.Context, r *pluginpb.AddListenerRequest) (*pluginpb.AddListenerResponse, error) {
	fds, err := s.fds.take(ctx, r.GetToken(), 1)
	if err != nil {
		return nil, fmt.Errorf("add listener %q: %w", r.GetName(), err)
	}
	l := os.NewFile(uintptr(fds[0]), r.GetName())
	if err := s.f.AddListener(ctx, r.GetName(), l); err != nil {
		_ = l.Close()
		return nil, fmt.Errorf("add listener %q: %w", r.GetName(), err)
	}
	return &pluginpb.AddListenerResponse{}, nil
}

func (s *frontServer) SetTLS(ctx context.Context, r *pluginpb.SetTLSRequest) (*pluginpb.SetTLSResponse, error) {
	p, ok := s.f.(Protector)
	if !ok {
		return nil, fmt.Errorf("set TLS: the plugin serves no user by TLS: %w", blk.EOPNOTSUPP)
	}
	t := TLS{
		Certificate: r.GetCertificate(), PrivateKey: r.GetPrivateKey(), ClientCA: r.GetClientCa(),
		Required: r.GetRequired(), Plain: r.GetPlain(), ClientCRL: r.GetClientCrl(),
	}
	for _, rule := range r.GetRules() {
		t.Rules = append(t.Rules, UserRule{Identity: rule.GetIdentity(), Device: rule.GetDevice(), Allow: rule.GetAllow()})
	}
	_, checks := p.(checksUsers)
	if t.picky() && !checks {
		return nil, fmt.Errorf("set TLS: %w", errNoChecks)
	}
	if err := p.SetTLS(ctx, t); err != nil {
		return nil, fmt.Errorf("set TLS: %w", err)
	}
	return &pluginpb.SetTLSResponse{ChecksUsers: checks}, nil
}

func (s *frontServer) DeviceStatus(_ context.Context, r *pluginpb.DeviceStatusRequest) (*pluginpb.DeviceStatusResponse, error) {
	if err := s.known(r.GetIndex()); err != nil {
		return nil, fmt.Errorf("status of device %d: %w", r.GetIndex(), err)
	}
	resp := &pluginpb.DeviceStatusResponse{Openers: uint32(s.f.Openers(r.GetIndex()))}
	if l, ok := s.f.(Locator); ok {
		resp.Location = l.Location(r.GetIndex())
	}
	return resp, nil
}
