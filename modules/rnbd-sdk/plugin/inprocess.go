package plugin

import (
	"context"
	"fmt"
	"net"
	"sync"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sockpair"
)

// LaunchInProcess runs a Backend or Frontend in this process, behind the same
// gRPC, descriptor passing and rings as a process of its own. It is for tests
// of plugins, and of hosts. The two ends share the memory of a heap ring.
//
// It has two limits: Kill closes the control socket and ends the queues, but
// goroutines that do not return live on.
func LaunchInProcess(ctx context.Context, c Config, author any) (*Process, error) {
	if c.Name == "" {
		c.Name = "in-process"
	}
	if c.Path == "" {
		c.Path = "in process"
	}
	c = c.withDefaults()
	p, err := launchInProcess(ctx, c, author)
	if err != nil {
		return nil, fmt.Errorf("start %s %q (%s): %w", c.Kind, c.Name, c.Path, err)
	}
	return p, nil
}

func launchInProcess(ctx context.Context, c Config, author any) (*Process, error) {
	info, err := describe(author)
	if err != nil {
		return nil, err
	}
	conn, peerFile, err := socketPair()
	if err != nil {
		return nil, err
	}
	peer, err := sockpair.Conn(peerFile)
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	fds := newFDReceiver(peer)
	in := newInProcess(c, author, info, fds)
	in.hangUp = func() { _ = peer.Close() }
	link, err := in.serve()
	if err != nil {
		_, _ = conn.Close(), peer.Close()
		return nil, err
	}
	in.closeLink = func() {
		_ = link.Close()
		in.grpc.Stop()
	}
	go func() { // as server.watch for a real process
		_ = fds.run()
		in.end()
	}()
	return in.start(ctx, newProcess(c, &connSender{conn: conn}, link))
}

// start has the plugin introduce itself to the host's end of it.
func (in *inProcess) start(ctx context.Context, p *Process) (*Process, error) {
	p.kill = in.end
	p.handOver = in.put
	p.cleanup = in.close
	go p.supervise()
	if err := p.introduce(ctx); err != nil {
		p.quietly.Store(true)
		p.Kill()
		<-p.cleaned
		return nil, err
	}
	return p, nil
}

func describe(author any) (Info, error) {
	switch a := author.(type) {
	case Backend:
		return a.Describe(), nil
	case Frontend:
		return a.Describe(), nil
	}
	return Info{}, fmt.Errorf("%T is neither a Backend nor a Frontend: %w", author, blk.EINVAL)
}

// inProcess is the plugin's end.
type inProcess struct {
	server    *server
	hangUp    func() // closes the plugin's end of the control socket
	closeLink func()
	grpc      *grpc.Server // nil: calls come directly
	once      sync.Once

	mu    sync.Mutex
	rings map[uint64]*shm.Ring
}

func newInProcess(c Config, author any, info Info, fds *fdReceiver) *inProcess {
	in := &inProcess{server: newServer(author, info, c.Logger, fds)}
	in.server.fail = func(err error) {
		c.Logger.Error("plugin cannot go on", "plugin", c.Name, "err", err)
		in.end()
	}
	in.server.local = in.take
	return in
}

// serve starts gRPC over a socket pair of its own.
func (in *inProcess) serve() (*grpc.ClientConn, error) {
	a, file, err := sockpair.New(unix.SOCK_STREAM, "plugin grpc")
	if err != nil {
		return nil, err
	}
	b, err := sockpair.Conn(file)
	if err != nil {
		_ = a.Close()
		return nil, err
	}
	in.grpc = newGRPC(nil)
	in.server.register(in.grpc)
	go func() { _ = in.grpc.Serve(newOneConn(a)) }()
	return grpc.NewClient("passthrough:plugin",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return b, nil }))
}

// end is the plugin's death.
func (in *inProcess) end() {
	in.once.Do(func() {
		in.hangUp()
		in.server.mu.Lock()
		in.server.ended = true // calls still come, and a queue that started now would live on
		in.server.mu.Unlock()
		for _, w := range in.server.queues() {
			w.asks.close()
		}
	})
}

func (in *inProcess) close() {
	ctx, cancel := context.WithTimeout(context.Background(), abandonTime)
	defer cancel()
	_ = in.server.detach(ctx)
	in.closeLink()
	in.mu.Lock()
	defer in.mu.Unlock()
	for token, r := range in.rings { // left untaken
		_ = r.Close()
		delete(in.rings, token)
	}
}

func (in *inProcess) put(token uint64, r *shm.Ring) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.rings == nil {
		in.rings = map[uint64]*shm.Ring{}
	}
	in.rings[token] = r
}

func (in *inProcess) take(token uint64) *shm.Ring {
	in.mu.Lock()
	defer in.mu.Unlock()
	r := in.rings[token]
	delete(in.rings, token)
	return r
}
