package e2e

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

// addressScript runs a server and a client in a network of its own. $1 is the
// folder of the programs, $2 an empty folder.
const addressScript = `
ip link set lo up
ip link add d0 type veth peer name d1 || exit 77
ip link set d0 up
ip link set d1 up
ip addr add fe80::77/64 dev d0 nodad
ip addr add fe80::78/64 dev d0 nodad
mkdir $2/images
truncate -s 1M $2/images/a $2/images/b $2/images/c $2/images/d
printf '::1 dual.test\n127.0.0.1 dual.test\n' > $2/hosts
mount --bind $2/hosts /etc/hosts
run() { "$1/rnbd" "$3" run --socket "$2/$3.sock" --config-dir none --sys off "${@:4}" 2> "$2/$3.log" & pids="$pids $!"; }
run "$1" "$2" server --search-path "$2/images" --listen 127.0.0.1:1234 --listen "[fe80::77%d0]:1234" --listen "rocev2://[fe80::77%d0]:1234"
run "$1" "$2" client --frontend nbd-socket --device-links=
trap 'kill $pids; wait' EXIT
rnbd() { "$1/rnbd" --socket "$2" "${@:3}"; }
for i in $(seq 100); do rnbd $1 $2 server show && rnbd $1 $2 client show && break; sleep 0.1; done > /dev/null 2>&1
$1/rnbd discover dual.test
$1/rnbd discover "[fe80::77%d0]"
rnbd $1 $2 map a from dual.test --session names
rnbd $1 $2 map b from "[fe80::77%d0]" --session zone
rnbd $1 $2 map c from "[fe80::78%d0]@[fe80::77%d0]:1234%rocev2" --session udp
rnbd $1 $2 client path readd udp 1
rnbd $1 $2 client path add names "127.0.0.2@dual.test:1234%iwarp"
if rnbd $1 $2 map d from fe80::77 2> $2/refused; then exit 1; fi
grep -q 'write its interface too, as \[fe80::77%eth0\]' $2/refused
rnbd $1 $2 client path list sessname,dst_addr,state
`

// The name of a host has an address at which nobody listens, and IPv6 addresses
// belong to an interface.
func TestNamesWithSeveralAddressesAndZones(t *testing.T) {
	needRoot(t, "to make a network namespace")
	for _, tool := range []string{"unshare", "ip", "mount"} {
		lab.Tool(t, tool)
	}
	bin, err := lab.Bin()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "unshare", "--net", "--mount", "bash", "-euc", "pids=; "+addressScript, "addresses", bin, shortDir(t))
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState != nil && cmd.ProcessState.ExitCode() == 77 {
		t.Skipf("no pair of virtual network devices here: %s", out)
	}
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	want := "" +
		"names     127.0.0.1:1234      connected\n" +
		"names     127.0.0.1:1234      connected\n" +
		"udp       [fe80::77%d0]:1234  connected\n" +
		"zone      [fe80::77%d0]:1234  connected\n"
	if !strings.Contains(string(out), want) {
		t.Errorf("paths are missing:\n%s", out)
	}
}
