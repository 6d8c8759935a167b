package kernelvm

import (
	"testing"

	"github.com/rnbd-go/rnbd/test/kernelvm/vm"
)

// The provider over libibverbs passes the suite that all providers pass, on
// software RDMA devices.
func TestIBVerbs_Provider(t *testing.T) {
	g := vm.Boot(t, vm.Config{})
	g.RXE(t, "rxe0", "10.1.0.1/24", "fd00:1::1/64")
	t.Setenv("CGO_ENABLED", "1")
	t.Setenv("GOFLAGS", "-tags=ibverbs")
	g.GoTest(t, "modules/rtrs/provider/ibverbs", "-test.v", "-test.timeout=8m")
}
