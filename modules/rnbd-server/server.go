package server

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// New starts plugins and pumps and listens. On an error it undoes all of it.
func New(ctx context.Context, cfg Config) (_ *Server, err error) {
	if err := cfg.checkValues(); err != nil {
		return nil, fmt.Errorf("%w: %w", err, syscall.EINVAL)
	}
	cfg.nameLoggers()
	if cfg.BootID == "" {
		cfg.BootID = readBootID()
	}
	s := &Server{
		cfg: cfg, log: cfg.subsystemLogger("server"), jail: jail{searchPath: cfg.SearchPath, devices: cfg.BlockDevices},
		writers: writerCounts{}, histories: map[nodeID]*writerHistory{}, number: max(rand.Uint64(), 1), devices: map[deviceKey]*device{}, guards: map[deviceKey]*guard{}, nodeOpened: make(chan struct{}, 1),
		lookUps: make(chan struct{}, maxLookUps), lists: make(chan struct{}, maxLists), fdatasync: unix.Fdatasync,
	}
	s.incarnation = incarnation{path: cfg.IncarnationFile, boot: cfg.BootID, flush: flushNode}
	if s.jail.pools, err = newPools(cfg.Pools, s); err != nil {
		return nil, err
	}
	s.rules.Store(newRuleSet(cfg.Access))
	if cfg.BootID == "" {
		s.log.Warn("clients are not told of a power cut of this host: its boot id is not readable", "file", bootIDFile)
	}
	s.admins, s.stopAdmins = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			s.Close(context.WithoutCancel(ctx))
		}
	}()
	if err := s.startPumps(); err != nil {
		return nil, err
	}
	if err := s.startPlugins(ctx); err != nil {
		return nil, err
	}
	if !cfg.Standby {
		if err := s.Serve(cfg.Listen); err != nil {
			return nil, err
		}
	}
	s.startWatch()
	s.startWatchdog()
	return s, nil
}

// Alive reports whether the server's pumps make turns. The error is that of
// ctx: it hangs.
func (s *Server) Alive(ctx context.Context) error {
	for _, p := range s.pumps {
		if err := p.pump.Ping(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (s *Server) startWatch() {
	if s.cfg.SizePoll <= 0 {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { s.watchSizes(ctx, s.cfg.SizePoll) })
	s.stopWatch = func() { cancel(); wg.Wait() }
}

func (s *Server) startPumps() error {
	for i := range s.cfg.Pumps {
		poller, err := rtrs.NewPoller(i)
		if err != nil {
			return fmt.Errorf("pump %d: %w", i, err)
		}
		p, err := pump.New(pump.Config{Name: "srv" + strconv.Itoa(i), Spin: s.cfg.Spin, CPU: -1, Logger: s.log, Virtual: s.cfg.Virtual})
		if err != nil {
			poller.Close()
			return fmt.Errorf("pump %d: %w", i, err)
		}
		pace, err := newPacer(s.cfg.Virtual)
		if err != nil {
			poller.Close()
			return fmt.Errorf("pump %d: %w", i, err)
		}
		poller.UseClock(p.Now)
		s.pumps = append(s.pumps, &pumpShare{pump: p, poller: poller, pacer: pace})
		p.Start()
		p.Add(poller)
		p.Add(pace)
	}
	return nil
}

// Serve makes the server listen. It follows New with Config.Standby, and HandOver.
func (s *Server) Serve(listen []Listen) error {
	var pollers []*rtrs.Poller
	for _, p := range s.pumps {
		pollers = append(pollers, p.poller)
	}
	cfg := rtrs.DefaultServerConfig()
	cfg.Pollers = pollers
	cfg.QueueDepth = s.cfg.QueueDepth
	cfg.ChunkSize = s.cfg.ChunkSize
	cfg.AlwaysInvalidate = s.cfg.AlwaysInvalidate
	cfg.Timing = s.cfg.Timing
	cfg.Logger = s.cfg.subsystemLogger("rtrs")
	cfg.Alloc = func(size int) (rtrs.Memory, error) { return shm.NewArena("rnbd-chunks", size) }
	cfg.Handler = (*rtrsHandler)(s)
	cfg.RetireAfter = s.cfg.RetireAfter
	cfg.Limits, cfg.InfoTimeout = s.cfg.Limits, s.cfg.InfoTimeout
	cfg.Auth = s.cfg.Auth
	r, err := rtrs.NewServer(cfg)
	if err != nil {
		return err
	}
	if err := s.incarnation.begin(); err != nil {
		s.log.Warn("an orderly stop of this host will be told to clients as a power cut: its record cannot be kept", "err", err)
	}
	s.leaving.Store(false)
	f := &listeners{rtrs: r, listen: listen}
	s.front.Store(&listeners{rtrs: r}) // for Close, and for clients that come at once
	for _, l := range listen {
		addr, err := r.ListenAuth(l.Device, l.Addr, l.Auth)
		if err != nil {
			return fmt.Errorf("listen on %s://%s: %w", l.Device.Info().Fabric, l.Addr, err)
		}
		f.bound = append(f.bound, l.Device.Info().Fabric+"://"+addr.String())
	}
	s.front.Store(f)
	return nil
}

// boundAddresses returns fabric://addr:port of each listener.
func (s *Server) boundAddresses() []string {
	if f := s.front.Load(); f != nil {
		return f.bound
	}
	return nil
}

// listenDevices returns the devices that the server listens on.
func (s *Server) listenDevices() (out []verbs.Device) {
	f := s.front.Load()
	if f == nil {
		return nil
	}
	for _, l := range f.listen {
		if !slices.Contains(out, l.Device) {
			out = append(out, l.Device)
		}
	}
	return out
}

// Addr returns the address of the i-th listener, with its real port.
func (s *Server) Addr(i int) netip.AddrPort {
	_, addr, _ := cutFabric(s.boundAddresses()[i])
	return netip.MustParseAddrPort(addr)
}

// Close disconnects all clients, waits for requests in flight and stops the
// plugins. When ctx ends it stops them without waiting for requests. It
// returns within two seconds of the end of ctx, even if a disk hangs.
func (s *Server) Close(ctx context.Context) error {
	var errs []error
	if s.stopWatch != nil {
		s.stopWatch()
	}
	s.notifyDrain()
	for _, p := range s.pumps {
		errs = append(errs, p.poller.Call(ctx, func() {})) // events for clients were sent before
	}
	s.stopAdmins()
	if f := s.front.Load(); f != nil {
		errs = append(errs, f.rtrs.Close(ctx))
	}
	answered := s.adminAnswered()
	select {
	case <-answered:
	case <-ctx.Done(): // a CLOSE may wait for a disk that hangs
	}
	errs = append(errs, s.stopPlugins(ctx))
	s.stopped.Store(true)
	if errors.Join(errs...) == nil { // no write is under way
		if err := s.incarnation.end(ctx); err != nil {
			s.log.Warn("the stop is not recorded as an orderly one", "err", err)
		}
	} else {
		s.incarnation.abandon()
	}
	select {
	case <-answered: // on the pumps
	case <-time.After(closeGrace):
		return errors.Join(append(errs, errors.New("an OPEN or CLOSE does not end; the pumps that would answer it are left"))...)
	}
	if s.stopWatchdog != nil {
		s.stopWatchdog()
	}
	for _, p := range s.pumps {
		p.pump.Stop()
		p.pacer.close()
		errs = append(errs, p.poller.Close())
	}
	return errors.Join(errs...)
}

// closeGrace is the time for an OPEN or CLOSE to end after the end of its
// plugin.
const closeGrace = time.Second

// drainTime is the least time for a plugin to end in order: requests of another plugin
// that hang may have used up that of Close.
const drainTime = 500 * time.Millisecond

// stopPlugins stops all plugins at the same time.
func (s *Server) stopPlugins(ctx context.Context) error {
	if end, ok := ctx.Deadline(); ctx.Err() != nil || ok && time.Until(end) < drainTime {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), drainTime)
		defer cancel()
	}
	errs := make([]error, len(s.plugins))
	var wg sync.WaitGroup
	for i, p := range s.plugins {
		wg.Go(func() { errs[i] = p.stopProcess(ctx) })
	}
	wg.Wait()
	return errors.Join(errs...)
}
