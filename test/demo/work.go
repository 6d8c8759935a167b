package main

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/nbdclient"
)

const (
	blockSize = 4096
	writers   = 16   // requests in flight
	perWriter = 1500 // blocks each writes
)

type demo struct {
	lab    *lab.Lab
	server *lab.Server
	client *lab.Client
	device *controlpb.ClientDevice

	image string
	size  int64
	// written[block] is the present contents of a block; blocks that are not
	// in it have the contents of the image.
	written  map[int64]uint64
	original []byte
}

func (d *demo) start() (err error) {
	d.server, err = d.lab.StartServer(lab.ServerOptions{
		SearchPath: filepath.Dir(d.image), Addrs: []string{"127.0.0.1", "127.0.0.2"}, Plugins: []string{"fileio"},
	})
	if err != nil {
		return err
	}
	if d.client, err = d.lab.StartClient(lab.ClientOptions{}); err != nil {
		return err
	}
	d.printProcesses()
	return nil
}

func (d *demo) mapDevice() (err error) {
	d.device, err = d.client.Map(filepath.Base(d.image), d.server)
	if err != nil {
		return err
	}
	if got := int64(d.device.Limits.Size); got != d.size {
		return fmt.Errorf("the device has %d bytes, the image %d", got, d.size)
	}
	say("mapped    %s as %s", d.device.Path, d.device.Endpoint)
	return d.printPaths()
}

func (d *demo) dial() (*nbdclient.Client, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return nbdclient.Dial(ctx, "unix", d.client.NBD, nbdclient.Options{Export: d.device.Name})
}

// copyOut reads the whole device and compares it with the image.
func (d *demo) copyOut() (err error) {
	if d.original, err = os.ReadFile(d.image); err != nil {
		return err
	}
	start := time.Now()
	sum, err := d.hashDevice()
	if err != nil {
		return err
	}
	took := time.Since(start)
	if want := sha256.Sum256(d.original); sum != want {
		return fmt.Errorf("SHA-256 of the device is %x, of the image %x", sum, want)
	}
	say("copied    %s in %.2f s (%.0f MB/s), SHA-256 %x... matches", bytesOf(d.size), took.Seconds(), float64(d.size)/1e6/took.Seconds(), sum[:6])
	return nil
}

// hashDevice reads the device with several requests in flight.
func (d *demo) hashDevice() (sum [32]byte, err error) {
	content, err := d.readDevice()
	return sha256.Sum256(content), err
}

func (d *demo) readDevice() ([]byte, error) {
	c, err := d.dial()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	const piece = 1 << 20
	content := make([]byte, d.size)
	err = inParallel(4, func(worker int) error {
		for off := int64(worker) * piece; off < d.size; off += 4 * piece {
			n := min(piece, d.size-off)
			if _, err := c.ReadAt(content[off:off+n], off); err != nil && !errors.Is(err, io.EOF) {
				return fmt.Errorf("read at %d: %w", off, err)
			}
		}
		return nil
	})
	return content, err
}

// writeAndKill writes blocks at random places and kills the storage plugin
// when half of them are written.
func (d *demo) writeAndKill() error {
	c, err := d.dial()
	if err != nil {
		return err
	}
	defer c.Close()
	before, err := d.server.Plugin("fileio")
	if err != nil {
		return err
	}
	seed := uint64(time.Now().UnixNano())
	latencies := make([][]time.Duration, writers)
	d.written = map[int64]uint64{}
	var mu sync.Mutex
	var once sync.Once
	var killErr error
	err = inParallel(writers, func(w int) error {
		rnd := rand.New(rand.NewPCG(seed, uint64(w)))
		buf := make([]byte, blockSize)
		for i := range perWriter {
			if w == 0 && i == perWriter/2 {
				once.Do(func() { killErr = d.server.KillPlugin("fileio") })
			}
			block := rnd.Int64N(d.size/blockSize/writers)*writers + int64(w) // each writer its own
			stamp := uint64(w)<<32 | uint64(i)
			fill(buf, block, stamp)
			t := time.Now()
			if _, err := c.WriteAt(buf, block*blockSize); err != nil {
				return fmt.Errorf("write of block %d: %w", block, err)
			}
			latencies[w] = append(latencies[w], time.Since(t))
			mu.Lock()
			d.written[block] = stamp
			mu.Unlock()
		}
		return nil
	})
	if err := errors.Join(err, killErr, c.Flush()); err != nil {
		return err
	}
	return d.reportWrites(slices.Concat(latencies...), seed, before)
}

func (d *demo) reportWrites(all []time.Duration, seed uint64, before *controlpb.Plugin) error {
	after, err := d.server.Plugin("fileio")
	if err != nil {
		return err
	}
	if after.Restarts != before.Restarts+1 || after.Pid == before.Pid {
		return fmt.Errorf("the storage plugin was not restarted: %v, then %v", before, after)
	}
	slices.Sort(all)
	say("wrote     %d blocks of %d bytes at random places, %d in flight (seed %d)", len(all), blockSize, writers, seed)
	say("latency   p50 %s, p99 %s, longest %s (the kill)", all[len(all)/2].Round(time.Microsecond), all[len(all)*99/100].Round(time.Microsecond), all[len(all)-1].Round(time.Millisecond))
	say("survived  SIGKILL of the storage plugin: pid %d -> %d, no request failed", before.Pid, after.Pid)
	return nil
}

// fill writes a pattern that names the block and the write.
func fill(buf []byte, block int64, stamp uint64) {
	for i := 0; i < len(buf); i += 16 {
		binary.LittleEndian.PutUint64(buf[i:], uint64(block)^uint64(i))
		binary.LittleEndian.PutUint64(buf[i+8:], stamp)
	}
}

func (d *demo) readBack() error {
	content, err := d.readDevice()
	if err != nil {
		return err
	}
	if err := d.check(content); err != nil {
		return err
	}
	say("verified  %d overwritten and %d untouched blocks through the device", len(d.written), d.size/blockSize-int64(len(d.written)))
	return nil
}

// check compares content with the expected contents of every block.
func (d *demo) check(content []byte) error {
	want := make([]byte, blockSize)
	for block := int64(0); block < d.size/blockSize; block++ {
		off := block * blockSize
		expect := d.original[off : off+blockSize]
		if stamp, ok := d.written[block]; ok {
			fill(want, block, stamp)
			expect = want
		}
		if string(content[off:off+blockSize]) != string(expect) {
			return fmt.Errorf("block %d is wrong", block)
		}
	}
	return nil
}

func (d *demo) unmapAndCheck() error {
	if err := d.unmap(); err != nil {
		return err
	}
	content, err := os.ReadFile(d.image)
	if err != nil {
		return err
	}
	if err := d.check(content); err != nil {
		return fmt.Errorf("on the server's side: %w", err)
	}
	say("unmapped  the server's file holds every byte")
	return nil
}

// unmap takes the device away, once the front end has noticed that its last
// user has gone.
func (d *demo) unmap() (err error) {
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		err = d.client.Unmap(d.device.Name, false)
		if !errors.Is(err, syscall.EBUSY) || time.Now().After(end) {
			return err
		}
	}
}

// inParallel runs n workers and returns their errors.
func inParallel(n int, work func(worker int) error) error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = work(i) })
	}
	wg.Wait()
	return errors.Join(errs...)
}
