package kernelvm

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/kernelvm/vm"
)

// benchPair is a client, a server and how the load reaches the device: fio with
// the arguments of target, or our own command with those of library.
type benchPair struct {
	name, what      string
	target, library []string
}

// peerBench is one guest with everybody that is compared. Each pair has a
// RAM disk of its own, except nbdkit, whose memory is its own.
type peerBench struct {
	t     *testing.T
	g     *vm.Guest
	pairs []benchPair // the others are compared with the first
}

const benchAddr = "10.1.0.1"

func newPeerBench(t *testing.T) *peerBench {
	g := vm.Boot(t, vm.Config{MemMiB: 3072, Parallel: true, Modules: []string{"ublk_drv", "nbd"}, Cmdline: countCalls})
	b := &peerBench{t: t, g: g}
	b.withoutTraces()
	g.RXE(t, "rxe0", benchAddr+"/24")
	g.Modprobe(t, "brd", "rd_nr=9", "rd_size=65536")
	g.Modprobe(t, "rnbd-server")
	g.Modprobe(t, "rnbd-client")
	b.startOurs()
	b.kernelMap(kernelPair, "rnbd.ko over rxe to rnbd-server.ko", 0, 1234)
	b.kernelMap(kernelOurs, "rnbd.ko over rxe to our server", 1, 1235)
	b.ourMap("ours-kernel", "our client over ibverbs on rxe, NBD front end on a unix socket, to rnbd-server.ko", 2, "nbd-socket", "1234%ibverbs")
	b.ourMap("ours-ours", "our client over ibverbs on rxe, NBD front end on a unix socket, to our server", 3, "nbd-socket", "1235%ibverbs")
	b.ourMap(ublkVerbs, "our client over ibverbs on rxe, ublk, to our server", 4, "ublk", "1235%ibverbs")
	b.ourMap(ublkTCP, "our client over iwarp, ublk, to our server", 5, "ublk", "1236%iwarp")
	b.library("library, ibverbs", "rnbd bench with the client library over ibverbs on rxe, to our server", 6, "1235%ibverbs")
	b.library("library, iwarp", "rnbd bench with the client library over iwarp, to our server", 7, "1236%iwarp")
	b.skeleton(8)
	b.nbdkit()
	return b
}

// startOurs starts our server on two fabrics and our client, from copies in
// the guest's memory: reading programs over 9p again would be measured, too.
func (b *peerBench) startOurs() {
	at := residentPlace{guestPlace{b.g}}
	run(b.t, at, rnbdPath, "version") // settles the programs
	for _, plugin := range []string{"io-blockio", "frontend-ublk"} {
		run(b.t, at, "cp", filepath.Join(filepath.Dir(rnbdPath), plugin), residentDir)
	}
	rnbd := residentDir + "/rnbd"
	server := b.g.Start(b.t, rnbd, "server", "run", "--socket", "/run/s.sock", "--io-plugin", "blockio="+residentDir+"/io-blockio",
		"--block-devices", "/dev/*", "--listen", "ibverbs://"+benchAddr+":1235", "--listen", "iwarp://"+benchAddr+":1236")
	up(b.t, at, server, "server", "/run/s.sock")
	client := b.g.Start(b.t, rnbd, "client", "run", "--socket", "/run/c.sock", "--nbd-listen", "unix:/run/nbd.sock",
		"--frontend-plugin", "nbd="+residentDir+"/frontend-nbd", "--frontend-plugin", "ublk="+residentDir+"/frontend-ublk")
	up(b.t, at, client, "client", "/run/c.sock")
	b.t.Cleanup(func() {
		for i := range 2 {
			b.g.Write(fmt.Sprintf("/sys/block/rnbd%d/rnbd/unmap_device", i), "force")
		}
		client.Stop()
		server.Stop()
	})
}

func (b *peerBench) kernelMap(name, what string, disk, port int) {
	b.g.WriteFile(b.t, "/sys/class/rnbd-client/ctl/map_device",
		fmt.Sprintf("dest_port=%d sessname=%s path=ip:%[3]s@ip:%[3]s device_path=/dev/ram%d", port, name, benchAddr, disk))
	b.device(name, what, fmt.Sprintf("/dev/rnbd%d", len(b.pairs)))
}

func (b *peerBench) ourMap(name, what string, disk int, frontend, port string) {
	out := b.g.Run(b.t, residentDir+"/rnbd", "--socket", "/run/c.sock", "-o", "json", "client", "device", "map", fmt.Sprintf("/dev/ram%d", disk),
		"from", fmt.Sprintf("%[1]s@%[1]s:%[2]s", benchAddr, port), "--session", fmt.Sprint("s", disk), "--frontend", frontend, "-f", "all")
	var d struct {
		Name     string `json:"devname"`
		Endpoint string `json:"endpoint"`
	}
	if err := json.Unmarshal([]byte(out), &d); err != nil || d.Name == "" {
		b.t.Fatalf("map: %v: %s", err, out)
	}
	if frontend == "ublk" {
		b.device(name, what, d.Endpoint)
		return
	}
	b.pairs = append(b.pairs, benchPair{name: name, what: what, target: []string{"--ioengine=nbd", "--uri=nbd+unix:///" + d.Name + "?socket=/run/nbd.sock"}})
}

// library is the load in the process of the client.
func (b *peerBench) library(name, what string, disk int, port string) {
	b.pairs = append(b.pairs, benchPair{name: name, what: what, library: []string{residentDir + "/rnbd", "bench", fmt.Sprintf("/dev/ram%d", disk),
		"--server", fmt.Sprintf("%[1]s@%[1]s:%[2]s", benchAddr, port), "--write", "--yes", "json"}})
}

// skeleton has the processes, hand-overs and checksums of ublk over iwarp, and no protocol.
func (b *peerBench) skeleton(disk int) {
	b.t.Helper()
	built := filepath.Join(filepath.Dir(exercisePath), "floor")
	cmd := exec.Command("go", "build", "-o", built, "../bench/floor")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		b.t.Fatalf("build the skeleton: %v\n%s", err, out)
	}
	b.g.Run(b.t, "cp", built, residentDir)
	p := b.g.Start(b.t, residentDir+"/floor", "-ublk", "-sums", "-size", "67108864", "-file", fmt.Sprintf("/dev/ram%d", disk), "-direct")
	for end := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		if node := strings.TrimSpace(p.Output()); strings.HasPrefix(node, "/dev/ublkb") {
			b.device(ublkFloor, "a skeleton of ublk, iwarp: its processes, hand-overs and checksums, no protocol", node)
			return
		}
		if time.Now().After(end) {
			b.t.Fatalf("the skeleton has no disk: %s", p.Output())
		}
	}
}

// nbdkit is reached by the kernel's NBD client.
func (b *peerBench) nbdkit() {
	b.g.Start(b.t, "nbdkit", "-f", "-i", benchAddr, "-p", "10809", "memory", "64M")
	b.g.Run(b.t, "sh", "-c", "for i in $(seq 100); do nbd-client "+benchAddr+" 10809 /dev/nbd0 -b 4096 && exit; sleep 0.2; done; exit 1")
	b.t.Cleanup(func() { b.g.Run(b.t, "nbd-client", "-d", "/dev/nbd0") })
	b.device(nbdModule, "nbd-client over TCP to nbdkit memory", "/dev/nbd0")
}

func (b *peerBench) device(name, what, node string) {
	b.pairs = append(b.pairs, benchPair{name: name, what: what, target: []string{"--ioengine=libaio", "--direct=1", "--filename=" + node}})
}
