package carrier

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/bond/netns"
	"github.com/rnbd-go/rnbd/modules/bond/netns/netnstest"
)

// ip runs ip(8), and fails the test if that fails.
func ip(t *testing.T, line string) {
	t.Helper()
	if out, err := exec.Command("ip", strings.Fields(line)...).CombinedOutput(); err != nil {
		t.Fatalf("ip %s: %v: %s", line, err, out)
	}
}

func TestLinkFollowsTheInterface(t *testing.T) {
	netnstest.Need(t)
	ns := fmt.Sprintf("carrier%d", os.Getpid())
	ip(t, "netns add "+ns)
	t.Cleanup(func() { ip(t, "netns del "+ns) })
	ip(t, "-n "+ns+" link add e0 type veth peer name e1")
	ip(t, "-n "+ns+" addr add 10.9.0.1/24 dev e0")
	ip(t, "-n "+ns+" link set e0 up")
	var l *Link
	err := netns.Do("/run/netns/"+ns, func() (err error) {
		if _, err := Open(netip.MustParseAddr("10.9.0.2")); !errors.Is(err, syscall.ENODEV) {
			t.Errorf("an address that no interface has: %v, want ENODEV", err)
		}
		l, err = Open(netip.MustParseAddr("10.9.0.1"))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if l.Name() != "e0" || l.On() {
		t.Errorf("%s is on: %v; want e0, off while its peer is down", l.Name(), l.On())
	}
	heard := make(chan struct{}, 100)
	l.Notify(func() { heard <- struct{}{} })
	for _, step := range []struct {
		peer string
		on   bool
	}{{"up", true}, {"down", false}, {"up", true}} {
		ip(t, "-n "+ns+" link set e1 "+step.peer)
		for end := time.After(20 * time.Second); l.On() != step.on; {
			select {
			case <-heard:
			case <-end:
				t.Fatalf("the peer is %s, and no call came with a carrier that is %v", step.peer, step.on)
			}
		}
	}
}
