package e2e

import (
	"os/exec"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

// socketsScript runs a server and a client where only /run can be written to. $1 is
// the folder of the programs.
const socketsScript = `
mount -t tmpfs tmpfs /run
mkdir /run/bin
mount --bind $1 /run/bin
for i in /tmp /var/tmp; do mount -t tmpfs -o ro tmpfs $i; done
unset TMPDIR XDG_RUNTIME_DIR
trap 'kill $(jobs -p); wait' EXIT
ip link set lo up
cd /run
mkdir images
truncate -s 1M images/a images/b
wait_for() { for i in $(seq 100); do "$@" && return; sleep 0.1; done; echo "waited for $*"; return 1; }
shows() { bin/rnbd --socket "$1" $2 show > /dev/null 2>&1; }
start() { bin/rnbd $2 run --socket "$1/$2.sock" --config-dir none --sys off "${@:3}" 2> $2.log & wait_for shows "$1/$2.sock" $2 || { cat $2.log; exit 1; }; }
long=/run/$(printf 'l%.0s' $(seq 110))
mkdir server "with a blank" "$long"
start /run/server server --search-path images
for dir in "/run/with a blank" "$long"; do
	case $dir in "$long") umount /tmp;; esac # the sockets of plugins do not fit into that folder
	start "$dir" client --frontend nbd-socket --device-links=
	client=$!
	bin/rnbd --socket "$dir/client.sock" map a from 127.0.0.1 --name d > mapped
	uri=$(sed -n 's/^at *//p' mapped)
	bin/rnbd --socket "$dir/client.sock" bench d --rw randread --bs 4K --depth 1 --time 50ms > bench.log || { cat bench.log; exit 1; }
	case $dir in *blank) nbdinfo --size "$uri"; ls -d server/rnbd-plugin-* "$dir"/rnbd-plugin-* > /dev/null;; esac
	bin/rnbd --socket "$dir/client.sock" unmap "$uri"
	kill $client
	wait $client
done
grep -q 'the path of the socket is too long' client.log
`

// All sockets of a daemon are in its own folder. The name of the folder may have
// blanks, and more bytes than an address holds.
func TestSocketsAreInTheDaemonsFolder(t *testing.T) {
	needRoot(t, "to make file systems read-only")
	for _, tool := range []string{"unshare", "ip", "mount", "nbdinfo"} {
		lab.Tool(t, tool)
	}
	bin, err := lab.Bin()
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), "unshare", "--net", "--mount", "bash", "-euc", socketsScript, "sockets", bin).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}
