// Command demo shows the whole system at work on one machine: it exports a
// file system image, maps it, copies it out, overwrites parts of it while the
// storage plugin is killed, and checks every byte on the server's side.
package main

import (
	"fmt"
	"os"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
)

func main() {
	start := time.Now()
	err := run()
	lab.Cleanup()
	if err != nil {
		fmt.Printf("demo: FAILED: %v\n", err)
		os.Exit(1)
	}
	fmt.Printf("demo: ok (%.1f s)\n", time.Since(start).Seconds())
}

func run() (err error) {
	l, err := lab.Open()
	if err != nil {
		return err
	}
	d := &demo{lab: l}
	defer func() {
		if err != nil {
			d.printLogs()
		}
		if cerr := l.Close(); cerr != nil && err == nil {
			err = fmt.Errorf("clean up: %w", cerr)
		}
	}()
	for _, step := range []struct {
		what string
		do   func() error
	}{
		{"make an ext4 image", d.makeImage},
		{"start server and client", d.start},
		{"map the image over two paths", d.mapDevice},
		{"copy the device out and compare", d.copyOut},
		{"write at random places, kill the storage plugin meanwhile", d.writeAndKill},
		{"read everything back", d.readBack},
		{"unmap and check the file on the server's side", d.unmapAndCheck},
	} {
		if err := step.do(); err != nil {
			return fmt.Errorf("%s: %w", step.what, err)
		}
	}
	return nil
}
