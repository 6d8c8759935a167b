package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rnbd-go/rnbd/test/nbdclient"
)

// nbd makes load with a plain Go NBD client over one connection.
type nbd struct {
	client *nbdclient.Client
	next   atomic.Int64
}

func openNBD(ctx context.Context, c workerConfig) (*nbd, error) {
	network := "tcp"
	if strings.HasPrefix(c.addrs[0], "/") {
		network = "unix"
	}
	client, err := nbdclient.Dial(ctx, network, c.addrs[0], nbdclient.Options{Export: c.device})
	if err != nil {
		return nil, err
	}
	return &nbd{client: client}, nil
}

func (n *nbd) close() error { return n.client.Close() }

func (n *nbd) run(o order) (s sample, err error) {
	w, d := *o.Workload, o.Duration
	hists, errs := make([]histogram, w.Depth), make([]error, w.Depth)
	var wg sync.WaitGroup
	start := time.Now()
	for i := range w.Depth {
		wg.Go(func() { errs[i] = n.loop(w, start.Add(d), &hists[i]) })
	}
	wg.Wait()
	s.Elapsed = time.Since(start).Seconds()
	for i := range hists {
		if errs[i] != nil {
			return s, fmt.Errorf("%s: %w", w.Name, errs[i])
		}
		if i > 0 {
			hists[0].merge(&hists[i])
		}
	}
	hists[0].fill(&s)
	s.Bytes = s.IOs * uint64(w.Block)
	return s, nil
}

// loop has one request in flight until end.
func (n *nbd) loop(w workload, end time.Time, h *histogram) error {
	buf := make([]byte, w.Block)
	noise(buf, 1)
	for now := time.Now(); now.Before(end); {
		var err error
		if off := n.place(w); w.Write {
			_, err = n.client.WriteAt(buf, off)
		} else {
			_, err = n.client.ReadAt(buf, off)
		}
		if err != nil {
			return err
		}
		then := now
		now = time.Now()
		h.add(now.Sub(then))
	}
	return nil
}

func (n *nbd) place(w workload) int64 {
	blocks := n.client.Size() / int64(w.Block)
	if !w.Seq {
		return rand.Int64N(blocks) * int64(w.Block)
	}
	return n.next.Add(1) % blocks * int64(w.Block)
}

func (n *nbd) fill() error {
	buf := make([]byte, 1<<20)
	for off := int64(0); off < n.client.Size(); off += int64(len(buf)) {
		noise(buf, uint64(off>>20))
		if _, err := n.client.WriteAt(buf[:min(int64(len(buf)), n.client.Size()-off)], off); err != nil {
			return fmt.Errorf("fill at %d: %w", off, err)
		}
	}
	return nil
}

// fillExport fills the export of an NBD server at addr. A path is a unix
// socket.
func fillExport(ctx context.Context, addr, export string) error {
	n, err := openNBD(ctx, workerConfig{addrs: []string{addr}, device: export})
	if err != nil {
		return err
	}
	defer n.close()
	return n.fill()
}

// fillFile makes a file with every byte written.
func fillFile(path string, size int64) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	buf := make([]byte, 1<<20)
	for off := int64(0); off < size; off += int64(len(buf)) {
		noise(buf, uint64(off>>20))
		if _, err := f.Write(buf); err != nil {
			return fmt.Errorf("fill: %w", err)
		}
	}
	return f.Sync()
}

func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, err
}
