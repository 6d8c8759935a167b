package devices

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sdktest"
	"github.com/rnbd-go/rnbd/test/lab"
)

// stack is a server and a client in this guest, and the exports of the
// server: a RAM disk by io-blockio, images on ext4 by io-fileio.
type stack struct {
	t        *testing.T
	frontend string
	lab      *lab.T
	server   *lab.Server
	client   *lab.Client
	ram      string // a block device
	images   string // a folder on ext4
	n        int
}

// ramDiskSize is the most that each RAM disk may grow to: memory is taken
// when it is written.
const ramDiskSize = 640 << 20

// quick: an emulated machine has no time to spin.
var quick = []string{"--spin", "0s"}

func newStack(t *testing.T, frontend string) *stack {
	s := &stack{t: t, frontend: frontend, lab: lab.New(t), ram: "/dev/ram0"}
	if _, err := os.Stat(s.ram); err != nil { // ram0 is exported, ram1 has the images, the others are for power cuts
		run(t, "modprobe", "brd", "rd_nr=4", fmt.Sprintf("rd_size=%d", ramDiskSize>>10))
	}
	s.images = filepath.Join(s.lab.Dir, "images")
	must(t, os.Mkdir(s.images, 0o755))
	run(t, "mkfs.ext4", "-q", "-F", "/dev/ram1")
	run(t, "mount", "/dev/ram1", s.images)
	t.Cleanup(func() { exec.Command("umount", "-l", s.images).Run() })
	s.server = s.lab.Server(lab.ServerOptions{SearchPath: "/", Extra: quick})
	s.client = s.lab.Client(lab.ClientOptions{Frontend: frontend,
		Extra: append([]string{"--frontend-plugin", frontend + "=" + filepath.Join(s.lab.Bin, "frontend-"+frontend)}, quick...)})
	return s
}

// image makes a sparse file that fileio serves.
func (s *stack) image(t *testing.T, size int64) string {
	t.Helper()
	s.n++
	path := filepath.Join(s.images, fmt.Sprintf("image%d", s.n))
	f, err := os.Create(path)
	must(t, err)
	must(t, f.Truncate(size))
	must(t, f.Close())
	t.Cleanup(func() { os.Remove(path) })
	return path
}

type change = func(*controlpb.MapRequest)

func readOnly(r *controlpb.MapRequest) { r.AccessMode = "ro" }

// options are words of the front end, in pairs.
func options(words ...string) change {
	return func(r *controlpb.MapRequest) {
		r.Options = map[string]string{}
		for i := 0; i < len(words); i += 2 {
			r.Options[words[i]] = words[i+1]
		}
	}
}

// queueing: requests wait for a server that is gone.
func queueing(r *controlpb.MapRequest) { r.Loss = "queue:2m" }

// pick chooses by the form of the test.
func pick[T any](short, longForm T) T {
	if *long {
		return longForm
	}
	return short
}

// disk maps path until the end of the test and returns the device and its node.
func (s *stack) disk(t *testing.T, path string, with ...change) (*controlpb.ClientDevice, string) {
	t.Helper()
	if s.frontend == "nbd" { // until the kernel sends the requests of a dead process again
		with = append([]change{options("timeout", "5")}, with...)
	}
	d, err := s.client.Map(path, s.server, with...)
	for end := time.Now().Add(lab.Patience); errors.Is(err, syscall.ECONNRESET) && time.Now().Before(end); { // a guest that stood still
		time.Sleep(time.Second)
		d, err = s.client.Map(path, s.server, with...)
	}
	if err != nil {
		t.Fatalf("map %s: %v\n%s", path, err, s.client.Log())
	}
	t.Cleanup(func() {
		if _, err := s.client.Device(d.Name); err == nil {
			if err := s.client.Unmap(d.Name, false); err != nil {
				t.Errorf("unmap %s: %v", d.Name, err)
				s.client.Unmap(d.Name, true)
			}
		}
		s.leftOver(t, d.Endpoint)
	})
	if !strings.HasPrefix(d.Endpoint, "/dev/"+s.frontend) {
		t.Fatalf("endpoint %q is no node of %s", d.Endpoint, s.frontend)
	}
	return d, d.Endpoint
}

// leftOver fails if the disk at node still exists.
func (s *stack) leftOver(t *testing.T, node string) {
	t.Helper()
	eventually(t, "the end of "+node, func() bool { // the kernel may still be at it
		size := strings.TrimSpace(readFile("/sys/block/" + filepath.Base(node) + "/size"))
		return size == "" || size == "0" // /dev/nbdN itself stays
	})
}

func readFile(path string) string {
	b, _ := os.ReadFile(path)
	return string(b)
}

// queue reads an attribute of a disk's queue.
func queue(node, name string) string {
	return strings.TrimSpace(readFile("/sys/block/" + filepath.Base(node) + "/queue/" + name))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

const commandTime = 3 * time.Minute

// attempt runs a command, bounded in time.
func attempt(argv ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), commandTime)
	defer cancel()
	return attemptIn(ctx, argv...)
}

// attemptIn runs a command. The command ends with ctx.
func attemptIn(ctx context.Context, argv ...string) (string, error) {
	out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s: %w\n%s", strings.Join(argv, " "), err, out)
	}
	return string(out), err
}

func run(t *testing.T, argv ...string) string {
	t.Helper()
	out, err := attempt(argv...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// fio verifies its own writes. args come after the common ones.
func fio(node string, args ...string) []string {
	return append([]string{"fio", "--name=v", "--filename=" + node, "--direct=1", "--ioengine=libaio", "--iodepth=16",
		"--verify=crc32c", "--verify_fatal=1", "--group_reporting", "--minimal"}, args...)
}

// eventually waits until a condition holds.
var eventually = sdktest.Eventually
