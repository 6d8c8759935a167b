package main

import (
	"context"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/ipoib/dev"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ctltree"
)

// featureFiles are the features of an adapter that ethtool(8) shows and sets.
func featureFiles(i *dev.Interface) ctltree.Fixed {
	onOff := func(get func(f dev.Features) bool, set func(on bool) error) *ctltree.File {
		f := &ctltree.File{Show: func() (string, error) { return map[bool]string{false: "off\n", true: "on\n"}[get(i.Features())], nil }}
		if set == nil {
			return f
		}
		f.Store = func(_ context.Context, data []byte) error {
			switch ctltree.Word(data) {
			case "on":
				return set(true)
			case "off":
				return set(false)
			}
			return unix.EINVAL
		}
		return f
	}
	value := func(get func(c dev.Coalescing) int, set func(n int) error) *ctltree.File {
		return &ctltree.File{
			Show: func() (string, error) { return strconv.Itoa(get(i.RxCoalescing())) + "\n", nil },
			Store: func(_ context.Context, data []byte) error {
				n, err := strconv.ParseUint(ctltree.Word(data), 0, 31)
				if err != nil {
					return unix.EINVAL
				}
				return set(int(n))
			},
		}
	}
	none := func(dev.Coalescing) int { return 0 }
	refused := func(int) error { return unix.EOPNOTSUPP } // sends have no completions that are waited for
	return ctltree.Fixed{
		"address": constantFile(i.Address()),
		"rx_usecs": value(func(c dev.Coalescing) int { return int(c.Wait / time.Microsecond) }, func(n int) error {
			return i.SetRxCoalescing(dev.Coalescing{Frames: i.RxCoalescing().Frames, Wait: time.Duration(n) * time.Microsecond})
		}),
		"rx_frames": value(func(c dev.Coalescing) int { return c.Frames }, func(n int) error {
			return i.SetRxCoalescing(dev.Coalescing{Frames: n, Wait: i.RxCoalescing().Wait})
		}),
		"tx_usecs": value(none, refused), "tx_frames": value(none, refused),
		"features": ctltree.Fixed{
			"tx-checksum": onOff(func(f dev.Features) bool { return f.TxChecksum }, nil),
			"tso":         onOff(func(f dev.Features) bool { return f.LSO }, nil),
			"rx-checksum": onOff(func(f dev.Features) bool { return f.RxChecksum }, i.SetRxChecksum),
			"lro":         onOff(func(f dev.Features) bool { return f.LRO }, i.SetLRO),
		},
	}
}
