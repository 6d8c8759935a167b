package kernelvm

import (
	"testing"

	"github.com/rnbd-go/rnbd/test/kernelvm/vm"
)

// The skeleton that the rows of ublk are compared with keeps what is written.
func TestSkeletonOfUblk(t *testing.T) {
	g := vm.Boot(t, vm.Config{MemMiB: 1024, Modules: []string{"ublk_drv"}})
	passOn(t, g.GoTest(t, "test/bench/floor", "-test.v", "-test.run=TestServesADiskOfUblk", "-test.timeout=5m"))
}
