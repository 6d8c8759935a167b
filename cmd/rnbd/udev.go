package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

func udevVerb() *verb {
	return &verb{
		name: "udev", on: onClient, min: 1, max: 1, args: "NODE", args0: deviceNames, run: udevDevice,
		short: "Tell a udev rule whose disk a node is",
		long: `Print what is known about the disk at a node, for IMPORT{program} of udev: lines
of KEY=value. NODE is as udev names it: ublkb0, or /dev/ublkb0. Nothing is printed
for a disk that is not the daemon's. With exit code 0 that is the daemon's word;
without a daemon the command fails.

  RNBD_DEVICE    its name, as rnbd0
  RNBD_SESSION   its session
  RNBD_PATH      its name on the server
  RNBD_LINK      SESSION/PATH with "!" for the slashes of both

What udev would change in the name of a link, and what would end a line, is \xNN.`,
		example: "  rnbd client device udev ublkb0",
	}
}

func udevDevice(c *call) error {
	return c.with(func(ctx context.Context, d *daemons) error {
		l, err := d.client.ListDevices(ctx, &controlpb.ListRequest{Brief: true})
		if err != nil {
			return err
		}
		for _, dev := range l.Devices {
			if dev.Endpoint == "/dev/"+nodeName(c.arg(0)) {
				return printUdev(c.cmd.OutOrStdout(), dev)
			}
		}
		return nil
	})
}

func printUdev(w io.Writer, d *controlpb.ClientDevice) error {
	slashes := strings.NewReplacer("/", "!")
	_, err := fmt.Fprintf(w, "RNBD_DEVICE=%s\nRNBD_SESSION=%s\nRNBD_PATH=%s\nRNBD_LINK=%s/%s\n",
		udevValue(d.Name), udevValue(d.Session), udevValue(d.Path), udevValue(slashes.Replace(d.Session)), udevValue(slashes.Replace(d.Path)))
	return err
}

// udevValue keeps the characters that udev takes in a link's name, "!" and "/"
// too, and writes the bytes of the rest as udev itself does.
func udevValue(s string) string {
	const fine = "#+-.:=@_!/"
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		switch {
		case r >= '0' && r <= '9', r >= 'A' && r <= 'Z', r >= 'a' && r <= 'z', strings.ContainsRune(fine, r), r >= utf8.RuneSelf && n > 1:
			b.WriteString(s[:n])
		default:
			for i := range n {
				fmt.Fprintf(&b, `\x%02x`, s[i])
			}
		}
		s = s[n:]
	}
	return b.String()
}
