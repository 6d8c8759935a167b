package client

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ctltree"
)

// TestTreeStress: 200 users of the mounted tree at once, while they make
// sessions, devices and paths come and go. The users are another process, this
// program again, for a process must not use the files that it serves.
func TestTreeStress(t *testing.T) {
	if root := os.Getenv("TREE_STRESS_ROOT"); root != "" {
		stressUsers(t, root)
		return
	}
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skip("there is no /dev/fuse")
	}
	s := newTarget(t, 1<<20)
	c := s.newClient()
	root := t.TempDir()
	mounted, err := ctltree.Mount(root, controlTree{c: c, frontend: "none"}.rootNodes(), ctltree.Options{Name: "stress", Logger: slog.New(slog.DiscardHandler)})
	must(t, err)
	defer func() { must(t, mounted.Close()) }()
	users := exec.Command(os.Args[0], "-test.run=^TestTreeStress$", "-test.v")
	users.Env = append(os.Environ(), "TREE_STRESS_ROOT="+root)
	out, err := users.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS") {
		t.Fatalf("the users: %v\n%s", err, out)
	}
	for _, l := range strings.Split(string(out), "\n") {
		if strings.Contains(l, "calls") {
			t.Log(strings.TrimSpace(l))
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for _, d := range c.Devices() {
		must(t, c.Unmap(ctx, d.Name(), true))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.sessions) != 0 {
		t.Errorf("%d sessions are left without a device", len(c.sessions))
	}
}

// expected are the errnos that files of the tree may answer with while
// everything comes and goes.
var expected = []syscall.Errno{
	syscall.EINVAL, syscall.EEXIST, syscall.ENOENT, syscall.ENODEV, syscall.EBUSY, syscall.EALREADY, syscall.ENXIO,
	syscall.ENOTCONN, syscall.ECONNRESET, syscall.ECONNABORTED, syscall.ETIMEDOUT, syscall.EPROTONOSUPPORT, syscall.ERANGE,
	syscall.ESHUTDOWN, syscall.ECANCELED,
}

func stressUsers(t *testing.T, root string) {
	const users, enough = 200, 40
	start := time.Now()
	var calls, changes atomic.Int64
	var wg sync.WaitGroup
	for u := range users {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(u), 1))
			for took := time.Since(start); took < 8*time.Second || took < 60*time.Second && changes.Load() < enough; took = time.Since(start) {
				var err error
				if u%4 == 0 {
					err = walk(root, &calls)
				} else if err = change(root, r); err == nil {
					changes.Add(1)
				}
				calls.Add(1)
				var errno syscall.Errno
				if err != nil && (!errors.As(err, &errno) || !slices.Contains(expected, errno)) {
					t.Errorf("user %d: %v", u, err)
					return
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d calls, %d changes", calls.Load(), changes.Load())
	if changes.Load() < enough {
		t.Errorf("only %d changes worked", changes.Load())
	}
}

// walk reads every file that it finds.
func walk(root string, calls *atomic.Int64) error {
	return filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			return err
		}
		if d.Type().IsRegular() {
			calls.Add(1)
			if _, err = os.ReadFile(path); errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENODEV) {
				return nil
			}
		}
		return err
	})
}

// change writes something to some file.
func change(root string, r *rand.Rand) error {
	pick := func(words ...string) string { return words[r.IntN(len(words))] }
	session := fmt.Sprintf("s%d", r.IntN(6))
	dev := fmt.Sprintf("rnbd%d", r.IntN(20))
	path := fmt.Sprintf("class/rtrs-client/%s/paths/ip:10.0.%d.7@ip:10.0.%d.1", session, r.IntN(2), 0)
	file, text := "", ""
	switch r.IntN(8) {
	case 0, 1:
		file = pick("class/rnbd-client/ctl/map_device", "kernel/ibnbd_client/map_device")
		text = fmt.Sprintf("sessname=%s path=ip:10.0.0.7@ip:10.0.0.1 device_path=d%d", session, r.IntN(8))
	case 2, 3:
		file, text = "block/"+dev+"/"+pick("rnbd", "ibnbd_client")+"/unmap_device", pick("normal", "force")
	case 4:
		file, text = "class/rtrs-client/"+session+"/add_path", "ip:10.0.1.7@ip:10.0.1.1"
	case 5:
		file, text = path+"/"+pick("disconnect", "reconnect", "remove_path", "stats/rdma", "stats/reset_all"), "1"
	case 6:
		file, text = "block/"+dev+"/rnbd/"+pick("remap_device", "resize"), pick("1", "1024", "x")
	case 7:
		junk := make([]byte, 1+r.IntN(5000))
		for i := range junk {
			junk[i] = byte(r.Uint32())
		}
		file, text = pick("class/rnbd-client/ctl/map_device", "class/rtrs-client/"+session+"/mpath_policy", "class/rtrs-client/"+session+"/add_path"), string(junk)
	}
	return os.WriteFile(filepath.Join(root, file), []byte(text), 0)
}
