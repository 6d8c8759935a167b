package kernelvm

import (
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

// IPoIB and bonding with Linux as the other side: its bonding driver over our
// interfaces, and UD queue pairs of its software RoCE.
func TestNetGuest(t *testing.T) {
	g := guest(t)
	peer := filepath.Join(t.TempDir(), "udpeer")
	source := filepath.Join(repositoryRoot(), "test/kernelvm/netguest/testdata/udpeer.c")
	if out, err := exec.Command("gcc", "-Wall", "-o", peer, source, "-libverbs").CombinedOutput(); err != nil {
		t.Fatalf("build udpeer: %v: %s", err, out)
	}
	bin, err := lab.Bin()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range []string{"tun", "veth", "bridge"} {
		g.Modprobe(t, m)
	}
	g.Modprobe(t, "bonding", "max_bonds=0")
	passOn(t, g.GoTest(t, "test/kernelvm/netguest", "-test.v", "-test.timeout=9m", "-root="+repositoryRoot(), "-rnbd-net="+filepath.Join(bin, "rnbd-net"), "-udpeer="+peer))
	g.Rmmod(t, "bonding")
}
