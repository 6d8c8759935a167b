// Command exercise exercises a block device, or an export of an NBD server at a
// unix socket, and prints the sum of the contents.
//
//	exercise --device /dev/rnbd0 | --nbd SOCKET --export NAME  [--for 10s | --until-stopped | --read | --refused]
//	exercise --sum FILE
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/test/kernelvm/exercise"
	"github.com/rnbd-go/rnbd/test/nbdclient"
)

var (
	device  = flag.String("device", "", "block device")
	nbd     = flag.String("nbd", "", "unix socket of an NBD server")
	export  = flag.String("export", "", "name of its export")
	seed    = flag.Uint64("seed", 1, "for the data")
	runtime = flag.Duration("for", 0, "random requests for this time, instead of everything once")
	forever = flag.Bool("until-stopped", false, "random requests until SIGTERM")
	read    = flag.Bool("read", false, "only read, and print the sum")
	refused = flag.Bool("refused", false, "only read and print the sum; a write has to be refused")
	sum     = flag.String("sum", "", "print the sum of a file, and nothing else")
)

func main() {
	flag.Parse()
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "exercise:", err)
		os.Exit(1)
	}
}

func run() error {
	if *sum != "" {
		f, err := os.Open(*sum)
		if err != nil {
			return err
		}
		defer f.Close()
		return printSum(f)
	}
	d, err := open()
	if err != nil {
		return err
	}
	switch {
	case *refused:
		if err := mustRefuse(d); err != nil {
			return err
		}
		fallthrough
	case *read:
		return printSum(io.NewSectionReader(d, 0, d.Size()))
	case *runtime > 0 || *forever:
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		if *runtime > 0 {
			var cancel func()
			ctx, cancel = context.WithTimeout(ctx, *runtime)
			defer cancel()
		}
		n, longest, err := exercise.Until(ctx, d, *seed)
		fmt.Printf("%d requests, longest %s\n", n, longest.Round(time.Millisecond))
		return err
	}
	s, err := exercise.All(d, *seed)
	if err == nil {
		fmt.Println(s)
	}
	return err
}

func printSum(r io.Reader) error {
	s, err := exercise.Sum(r)
	if err == nil {
		fmt.Println(s)
	}
	return err
}

func open() (exercise.Disk, error) {
	if *device != "" {
		return exercise.OpenDevice(*device, *read || *refused)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	c, err := nbdclient.Dial(ctx, "unix", *nbd, nbdclient.Options{Export: *export})
	if err != nil {
		return nil, err
	}
	return nbdExport{c}, nil
}

// mustRefuse writes where that is forbidden.
func mustRefuse(d exercise.Disk) error {
	if *device != "" { // the kernel refuses to open it
		w, err := exercise.OpenDevice(*device, false)
		if err == nil {
			w.Close()
			return errors.New("the device opens for writing")
		}
		return nil
	}
	_, err := d.WriteAt(make([]byte, 4096), 0)
	if !errors.Is(err, syscall.EPERM) && !errors.Is(err, syscall.EROFS) {
		return fmt.Errorf("write: %v, want EPERM", err)
	}
	return nil
}

// nbdExport is an NBD export as a disk.
type nbdExport struct{ *nbdclient.Client }

const fua = 1 // NBD_CMD_FLAG_FUA

func (e nbdExport) WriteFUA(p []byte, off int64) error { _, err := e.Write(p, off, fua); return err }
func (e nbdExport) Discard(off, n int64) error         { return e.Trim(off, n) }
func (e nbdExport) WriteZeroes(off, n int64) error     { return e.Client.WriteZeroes(off, n, 0) }
