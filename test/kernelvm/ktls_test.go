package kernelvm

import (
	"testing"

	"github.com/rnbd-go/rnbd/test/kernelvm/vm"
)

// The record layer of our TLS against that of the kernel.
func TestKernelTLS(t *testing.T) {
	g := vm.Boot(t, vm.Config{MemMiB: 1024})
	g.Modprobe(t, "tls")
	passOn(t, g.GoTest(t, "modules/rtrs/internal/tlsrecord", "-test.v", "-test.run=TestKernel", "-test.timeout=9m"))
}
