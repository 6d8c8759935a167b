// Command netpeer has the ends of the benchmark of networks: devices of
// wireguard-go, a server that echoes, and a client that counts round trips.
//
//	netpeer wireguard NAME MTU    a device, configured by standard input, until SIGTERM
//	netpeer echo ADDRESS          sends back what comes by TCP and UDP
//	netpeer ping tcp|udp ADDRESS DURATION
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "netpeer:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 3 && args[0] == "wireguard":
		mtu, err := strconv.Atoi(args[2])
		if err != nil {
			return err
		}
		return wireguard(args[1], mtu)
	case len(args) == 2 && args[0] == "echo":
		return echo(args[1])
	case len(args) == 4 && args[0] == "ping":
		d, err := time.ParseDuration(args[3])
		if err != nil {
			return err
		}
		return ping(args[1], args[2], d, os.Stdout)
	}
	return errors.New("usage: netpeer wireguard NAME MTU | echo ADDRESS | ping tcp|udp ADDRESS DURATION")
}

// wireguard runs a device. Standard input has its configuration in the form of
// WireGuard's configuration protocol.
func wireguard(name string, mtu int) error {
	config, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	t, err := tun.CreateTUN(name, mtu)
	if err != nil {
		return err
	}
	d := device.NewDevice(t, conn.NewDefaultBind(), device.NewLogger(device.LogLevelError, name+": "))
	defer d.Close()
	if err := d.IpcSet(string(config)); err != nil {
		return err
	}
	if err := d.Up(); err != nil {
		return err
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, os.Interrupt)
	<-stop
	return nil
}
