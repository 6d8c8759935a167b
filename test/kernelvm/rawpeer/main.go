// Command rawpeer is an end of a RoCEv2 connection that sends given bytes, for
// peers that have to refuse them.
//
//	rawpeer connect SRC DST:PORT HEX   connects with private data, prints the answer's
//	rawpeer listen ADDR:PORT HEX       accepts everybody, with private data
package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/rocev2"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "rawpeer:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	dev, err := rocev2.Open(rocev2.Config{IRD: -1, ORD: -1, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	defer dev.Close()
	switch {
	case len(args) == 4 && args[0] == "connect":
		return connect(dev, args[1], args[2], args[3])
	case len(args) == 3 && args[0] == "listen":
		return listen(dev, args[1], args[2])
	}
	return errors.New("see the package comment")
}

func newQP(dev verbs.Device) (verbs.QP, error) {
	pd, err := dev.AllocPD()
	if err != nil {
		return nil, err
	}
	cq, err := dev.CreateCQ(64)
	if err != nil {
		return nil, err
	}
	go func() {
		for wcs := make([]verbs.WC, 16); ; time.Sleep(time.Millisecond) {
			cq.Poll(wcs)
		}
	}()
	return dev.CreateQP(pd, verbs.QPConfig{CQ: cq, SendQueue: 16, RecvQueue: 16, MaxSGE: 1})
}

// connect prints "accepted HEX" or "refused HEX".
func connect(dev verbs.Device, src, dst, private string) error {
	p, err := params(src, dst, private)
	if err != nil {
		return err
	}
	qp, err := newQP(dev)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	answer, err := dev.Connect(ctx, qp, p)
	var refused *verbs.RejectError
	switch {
	case errors.As(err, &refused):
		fmt.Printf("refused %x\n", refused.Private)
	case err != nil:
		return err
	default:
		fmt.Printf("accepted %x\n", answer)
	}
	return nil
}

func params(src, dst, private string) (p verbs.ConnectParams, err error) {
	if p.Src, err = netip.ParseAddr(src); err != nil {
		return p, err
	}
	if p.Dst, err = netip.ParseAddrPort(dst); err != nil {
		return p, err
	}
	p.Private, err = hex.DecodeString(private)
	return p, err
}

func listen(dev verbs.Device, addr, private string) error {
	at, err := netip.ParseAddrPort(addr)
	if err != nil {
		return err
	}
	answer, err := hex.DecodeString(private)
	if err != nil {
		return err
	}
	l, err := dev.Listen(at)
	if err != nil {
		return err
	}
	fmt.Println("listening")
	for {
		req, err := l.Accept()
		if err != nil {
			return err
		}
		fmt.Printf("request %x\n", req.Private())
		qp, err := newQP(dev)
		if err != nil {
			return err
		}
		go req.Accept(qp, answer)
	}
}
