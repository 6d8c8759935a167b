package main

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

func deviceChanges() []*verb {
	return []*verb{
		{
			name: "resize", on: onBoth, bare: true, min: 1, max: 2, args: "DEVICE [SIZE[UNIT]]", args0: deviceNames, words: outputWords, run: resizeDevice, interrupted: partLeft,
			short: "Change the size of a mapped device, or look at that of an exported one",
			long: `On the client, with SIZE: change the size that users of a mapped device see, here
only. The server is told nothing, and SIZE is not larger than what it exports.
SIZE is in bytes, or in the unit that stands
behind it: 10G, or 10 G.

On the server, without SIZE: look at the size of the file or device now, and
tell clients. Servers look every second by themselves, but for storage plugins
whose names are no files.`,
			example: "  rnbd client resize rnbd0 10G\n  rnbd server resize disk.img",
		},
		{
			name: "unmap", on: onClient, bare: true, min: 1, max: 1, args: "DEVICE|all [force]", args0: deviceNamesOrAll, words: forceWord, flags: unmapFlags, run: unmapDevice, interrupted: partLeft,
			short:   "Take a mapped device away",
			long:    "Take a mapped device away, or with all every one. That is refused with exit code 5 while a user has\nit open. By force users are disconnected and their requests fail; it ends\nwithin seconds even if the server is dead.",
			example: "  rnbd unmap rnbd0\n  rnbd unmap disk.img force",
		},
		{
			name: "remap", on: onClient, bare: true, min: 1, max: 1, args: "DEVICE [force] [accept-new]", args0: deviceNames, words: forceWord | acceptWord, run: remapDevice, interrupted: partLeft,
			short: "Open a closed device again",
			long: `Open a closed device again. One that is open is left alone with exit code 4;
by force it is unmapped and mapped again, with the same settings. If that is not
done within seconds, as with a disk that hangs, the command ends with exit code 8,
and the daemon goes on to try until the device is there or is unmapped.

A device whose name leads to another volume by now stays closed, unless
accept-new says that this is the right one.`,
			example: "  rnbd remap rnbd0\n  rnbd remap rnbd0 accept-new",
		},
		{
			name: "recover", on: onClient, min: 1, max: 1, args: "DEVICE|all", args0: deviceNamesOrAll, run: recoverDevices, interrupted: partLeft,
			short:   "Open a device again if it is closed",
			long:    "Open a device again if it is closed: connect the paths of its session that\nare not connected, then the device.",
			example: "  rnbd device recover rnbd0\n  rnbd device recover all",
		},
		{
			name: "close", on: onServer, bare: true, min: 1, max: 2, args: "DEVICE [SESSION] [force]", args0: deviceNames, words: forceWord, run: closeDevice, interrupted: partLeft,
			short:   "Close a client's device by force",
			long:    "Close an exported device: requests for it fail from then on. The client is not\nasked. SESSION says whose, if several have it open. That it happens by force\nneed not be said.",
			example: "  rnbd close disk.img\n  rnbd server device close disk.img web1@storage",
		},
	}
}

// onDevice runs f with the device that the first argument names.
func (c *call) onDevice(f func(context.Context, *daemons, *inventory, device) error) error {
	return c.with(func(ctx context.Context, d *daemons) error {
		inv, err := d.look(ctx, true)
		if err != nil {
			return err
		}
		session := ""
		if len(c.args) > 1 && c.name == "close" {
			s, err := inv.session(c.args[1])
			if err != nil {
				return err
			}
			session = s.Name
		}
		dev, err := inv.device(c.args[0], session)
		if err != nil {
			return err
		}
		return f(ctx, d, inv, dev)
	})
}

func resizeDevice(c *call) error {
	switch {
	case len(c.args) == 1 && c.set == onServer:
		return refreshDevice(c)
	case len(c.args) == 1:
		return usageError{fmt.Errorf("write: %s DEVICE SIZE[UNIT]", c.cmd.CommandPath())}
	case c.set&onClient == 0:
		return usageError{fmt.Errorf("the size of an exported device is that of its file; write: %s DEVICE", c.cmd.CommandPath())}
	}
	c.set = onClient
	size, err := report.ParseSize(c.args[1], c.Unit)
	if err != nil {
		return usageError{fmt.Errorf("size %w", err)}
	}
	c.Unit = 0
	if size == 0 {
		return usageError{errors.New("a device of 0 bytes cannot be used; unmap takes it away")}
	}
	return c.onDevice(func(ctx context.Context, d *daemons, _ *inventory, dev device) error {
		after, err := d.client.Resize(ctx, &controlpb.ResizeRequest{Device: dev.name, Size: size})
		if err != nil {
			return err
		}
		if c.chosen == "" && !c.Machine() {
			return c.tell("%s shows %s to its users here; %s on the server keeps its %s",
				after.Name, report.Human(after.Limits.GetSize()), after.Path, report.Human(after.ExportedSize))
		}
		return printDevice(ctx, c, d, mappedDevice(after, dev.hostname))
	})
}

// refreshDevice has the server look at a device's size.
func refreshDevice(c *call) error {
	return c.with(func(ctx context.Context, d *daemons) error {
		l, err := d.server.ResizeDevice(ctx, &controlpb.DeviceRequest{Device: c.args[0]})
		if err != nil {
			return err
		}
		for _, dev := range l.Devices {
			c.say("%s has %d bytes", dev.Path, dev.Limits.Size)
		}
		return nil
	})
}

func unmapFlags(f *pflag.FlagSet) {
	f.Bool("persist", false, "also at the next start: remove what map --persist has written")
}

func unmapDevice(c *call) error {
	return c.with(func(ctx context.Context, d *daemons) error {
		if c.args[0] != report.All {
			return c.unmapOne(ctx, d, c.args[0])
		}
		inv, err := d.look(ctx, true)
		if err != nil {
			return err
		}
		if _, err := inv.device(report.All, ""); !isNotFound(err) {
			return errAllIsOne("device")
		}
		var errs []error
		for _, dev := range inv.devices {
			errs = append(errs, c.unmapOne(ctx, d, dev.name))
		}
		return errors.Join(errs...)
	})
}

func (c *call) unmapOne(ctx context.Context, d *daemons, id string) error {
	name, err := c.unmap(ctx, d, id)
	if err != nil {
		return err
	}
	c.say("unmapped %s", name)
	if c.text("persist") != "true" {
		return nil
	}
	file, err := persistFile(ctx, d.client, name)
	if err == nil {
		err = forget(file)
	}
	if err != nil {
		return fmt.Errorf("%s is unmapped: %w", name, err)
	}
	c.say("removed %s", file)
	return nil
}

// unmap asks the daemon at once: a list of all would only delay it. Only a name
// that the daemon does not know, as that of an endpoint, is looked up.
func (c *call) unmap(ctx context.Context, d *daemons, id string) (name string, err error) {
	name = nodeName(id)
	if c.text("persist") == "true" { // its file has its own name
		inv, err := d.look(ctx, true)
		if err != nil {
			return name, err
		}
		dev, err := inv.device(id, "")
		if err != nil {
			return name, err
		}
		name = dev.name
	}
	_, err = d.client.Unmap(ctx, &controlpb.UnmapRequest{Device: name, Force: c.force})
	if !isNotFound(err) {
		return name, err
	}
	inv, err := d.look(ctx, true)
	if err != nil {
		return name, err
	}
	dev, err := inv.device(id, "")
	if err != nil {
		return name, err
	}
	_, err = d.client.Unmap(ctx, &controlpb.UnmapRequest{Device: dev.name, Force: c.force})
	return dev.name, err
}

func remapDevice(c *call) error {
	return c.onDevice(func(ctx context.Context, d *daemons, _ *inventory, dev device) error {
		return c.remap(ctx, d.client, dev)
	})
}

func (c *call) remap(ctx context.Context, client controlpb.ClientDaemonClient, dev device) error {
	if _, err := client.Remap(ctx, &controlpb.RemapRequest{Device: dev.name, AcceptNew: c.accept, Force: c.force}); err != nil {
		return err
	}
	if c.force {
		c.say("mapped %s again", dev.name)
		return nil
	}
	c.say("remapped %s", dev.name)
	return nil
}

func recoverDevices(c *call) error {
	return c.with(func(ctx context.Context, d *daemons) error {
		inv, err := d.look(ctx, true)
		if err != nil {
			return err
		}
		if c.args[0] == report.All {
			return c.recoverDevices(ctx, d.client, inv, inv.devices)
		}
		dev, err := inv.device(c.args[0], "")
		if err != nil {
			return err
		}
		return c.recoverDevices(ctx, d.client, inv, []device{dev})
	})
}

// recoverDevices opens those that are closed or have failed on their server. All are
// tried.
func (c *call) recoverDevices(ctx context.Context, client controlpb.ClientDaemonClient, inv *inventory, devices []device) error {
	var errs []error
	done := map[string]bool{} // sessions
	for _, dev := range devices {
		if dev.state == "open" && dev.mapped != nil && dev.mapped.LastError != "" {
			errs = append(errs, c.recoverDevice(ctx, client, dev))
		}
		if dev.state != "closed" {
			continue
		}
		if s, err := inv.session(dev.session); err == nil && !done[dev.session] {
			done[dev.session] = true
			errs = append(errs, c.recoverPaths(ctx, client, s.Paths))
		}
		errs = append(errs, c.recoverDevice(ctx, client, dev))
	}
	return errors.Join(errs...)
}

// reopens is the time for a device to open by itself after its session is
// back. After it the command asks for that.
const reopens = time.Second

func (c *call) recoverDevice(ctx context.Context, daemon controlpb.ClientDaemonClient, dev device) error {
	for end := time.Now().Add(reopens); time.Now().Before(end) && dev.mapped.OpensAgain; time.Sleep(20 * time.Millisecond) {
		inv, err := (&daemons{client: daemon}).look(ctx, true)
		if err != nil {
			return err
		}
		if dev, err = inv.device(dev.name, ""); err != nil {
			return err
		}
		if dev.state == "open" {
			c.say("%s is open", dev.name)
			return nil
		}
	}
	_, err := daemon.Remap(ctx, &controlpb.RemapRequest{Device: dev.name})
	if err != nil && !errors.Is(err, syscall.EALREADY) {
		return err
	}
	c.say("remapped %s", dev.name)
	return nil
}

func closeDevice(c *call) error {
	return c.onDevice(func(ctx context.Context, d *daemons, _ *inventory, dev device) error {
		_, err := d.server.CloseDevice(ctx, &controlpb.CloseDeviceRequest{Session: dev.session, DeviceId: dev.use.DeviceId})
		if err == nil {
			c.say("closed %s of session %s", dev.path, dev.session)
		}
		return err
	})
}
