package rtrs_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"

	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
)

// echo is a server's consumer: it keeps one block.
type echo struct{ block [512]byte }

func (e *echo) SessionUp(s *rtrs.SrvSession) error {
	fmt.Println("server: session", s.Name())
	return nil
}
func (e *echo) SessionDown(s *rtrs.SrvSession) { fmt.Println("server: session is gone") }

func (e *echo) Request(op *rtrs.Op) {
	fmt.Printf("server: %s\n", op.User())
	if op.IsRead() {
		copy(op.Data(), e.block[:])
	} else {
		copy(e.block[:], op.Data())
	}
	op.Respond(0)
}

// chunks is chunk memory on the heap.
type chunks []byte

func (c chunks) Bytes() []byte { return c }
func (c chunks) Close() error  { return nil }

// runPoller makes a poller and a goroutine that owns it.
func runPoller() (p *rtrs.Poller, stop func()) {
	p, err := rtrs.NewPoller(0)
	if err != nil {
		panic(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var owner sync.WaitGroup
	owner.Go(func() { p.Run(ctx) })
	return p, func() { cancel(); owner.Wait(); p.Close() }
}

// A server and a client in one process, over the loopback fabric.
func Example() {
	ctx, quiet := context.Background(), slog.New(slog.DiscardHandler)
	fabric := loopback.New()

	srvPoller, stopServer := runPoller()
	defer stopServer()
	cfg := rtrs.DefaultServerConfig()
	cfg.Pollers = []*rtrs.Poller{srvPoller}
	cfg.Logger = quiet
	cfg.Handler = &echo{}
	cfg.Alloc = func(size int) (rtrs.Memory, error) { return make(chunks, size), nil }
	srv, err := rtrs.NewServer(cfg)
	if err != nil {
		panic(err)
	}
	defer srv.Close(ctx)
	addr, err := srv.Listen(fabric.Device("server"), netip.MustParseAddrPort("10.0.0.1:1234"))
	if err != nil {
		panic(err)
	}

	poller, stopClient := runPoller()
	defer stopClient()
	done := make(chan int, 1)
	session, err := rtrs.Open(ctx, "example", []rtrs.PathAddr{{Device: fabric.Device("client"), Dst: addr}}, rtrs.ClientConfig{
		Pollers: []*rtrs.Poller{poller},
		Logger:  quiet,
		OnDone:  func(queue int, tag uint64, errno int) { done <- errno },
	})
	if err != nil {
		panic(err)
	}
	defer session.Close(ctx)

	memory := make([]byte, 1024)
	region, err := session.Register(memory)
	if err != nil {
		panic(err)
	}
	copy(memory, "hello over there")
	poller.Do(func() { // requests are the owner's business
		if err := session.Queue(0).Write(1, rtrs.Data{Region: region, Off: 0, Len: 512}, []byte("please keep this")); err != nil {
			panic(err)
		}
	})
	fmt.Println("client: write ended with", <-done)
	poller.Do(func() {
		if err := session.Queue(0).Read(2, rtrs.Data{Region: region, Off: 512, Len: 512}, []byte("please return it")); err != nil {
			panic(err)
		}
	})
	fmt.Println("client: read ended with", <-done)
	fmt.Printf("client: %s\n", memory[512:528])

	// Output:
	// server: session example
	// server: please keep this
	// client: write ended with 0
	// server: please return it
	// client: read ended with 0
	// client: hello over there
	// server: session is gone
}
