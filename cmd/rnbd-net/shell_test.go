package main

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// TestShellLines runs shell lines of Linux's documents as they are, in a mount
// namespace where the control files lie over /sys.
func TestShellLines(t *testing.T) {
	if _, err := exec.LookPath("unshare"); err != nil {
		t.Skip("unshare is not installed")
	}
	a, _ := nodes(t)
	cmd := exec.Command("unshare", "-m", "sh", "-ec", `
mount --rbind "$TREE/class/net" /sys/class/net
mount --rbind "$TREE/module" /sys/module
mount --rbind "$TREE/kernel/debug" /sys/kernel/debug
cat /sys/class/net/ib0/type
echo 0x8001 > /sys/class/net/ib0/create_child
cat /sys/class/net/ib0.8001/pkey
cat /sys/class/net/ib0.8001/parent
echo 0x8001 > /sys/class/net/ib0/delete_child
echo connected > /sys/class/net/ib0/mode
cat /sys/class/net/ib0/mode
echo datagram > /sys/class/net/ib0/mode
echo 1 > /sys/module/ib_ipoib/parameters/mcast_debug_level
cat /sys/module/ib_ipoib/parameters/mcast_debug_level
head -n 1 /sys/kernel/debug/ipoib/ib0_mcg
echo +bond0 > /sys/class/net/bonding_masters
echo 100 > /sys/class/net/bond0/bonding/miimon
echo +ib0 > /sys/class/net/bond0/bonding/slaves
cat /sys/class/net/bond0/bonding/slaves
cat /sys/class/net/bond0/bonding/mode
echo -ib0 > /sys/class/net/bond0/bonding/slaves
echo -bond0 > /sys/class/net/bonding_masters
`)
	cmd.Env = append(os.Environ(), "TREE="+a.tree)
	out, err := cmd.CombinedOutput()
	want := []string{"32", "0x8001", "ib0", "connected", "1", "GID: ff12:401b:ffff:0:0:0:ffff:ffff", "ib0", "active-backup 1", ""}
	if err != nil || string(out) != strings.Join(want, "\n") {
		t.Errorf("%v:\n%s\nwant\n%s", err, out, strings.Join(want, "\n"))
	}
}
