package loopback_test

import (
	"net/netip"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs/verbstest"
)

func TestConformance(t *testing.T) {
	tests := []struct {
		name string
		opts []loopback.Option
	}{
		{"all abilities", nil},
		{"no abilities", []loopback.Option{loopback.WithCaps(0)}},
		{"no key rotation", []loopback.Option{loopback.WithCaps(loopback.AllCaps &^ verbs.CapKeyRotation)}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			verbstest.Run(t, func(t *testing.T) verbstest.Fabric {
				n := loopback.New(tt.opts...)
				return verbstest.Fabric{
					Client: n.Device("client"), Server: n.Device("server"),
					Addr:  netip.MustParseAddrPort("127.0.0.1:0"),
					Addr6: netip.MustParseAddrPort("[::1]:0"),
				}
			})
		})
	}
}
