package plugin

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/pluginpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// Descriptors whose call never comes, since its caller has given up, are closed after a
// time, though no other message arrives. Those of a call that comes in time are not.
func TestFDReceiver_CallThatNeverComes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newFDReceiver(nil)
		open := func() int {
			fd, err := unix.Dup(int(os.Stderr.Fd()))
			if err != nil {
				t.Fatal(err)
			}
			return fd
		}
		isOpen := func(fd int) bool { _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); return err == nil }
		never, late := open(), open()
		r.put(1, []int{never})
		time.Sleep(pendingFor / 2)
		r.put(2, []int{late})
		time.Sleep(pendingFor/2 + time.Second)
		if isOpen(never) {
			t.Error("the descriptor is open")
		}
		if _, err := r.take(t.Context(), 1, 1); !errors.Is(err, unix.ENOBUFS) {
			t.Errorf("its call: %v", err)
		}
		if fds, err := r.take(t.Context(), 2, 1); err != nil || fds[0] != late || !isOpen(late) {
			t.Errorf("the call of the other one: %v, %v", fds, err)
		}
		time.Sleep(2 * pendingFor)
		if !isOpen(late) {
			t.Error("a descriptor that was taken is closed")
		}
		closeFDs([]int{late})
		r.put(3, []int{open()})
		r.closeAll()
	})
}

// An arena that is attached after its caller has given up is let go of: nobody would
// detach it.
func TestServer_ArenaOfACallerThatIsGone(t *testing.T) {
	a, err := shm.NewArena("test", 1<<16)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	fd, err := unix.FcntlInt(uintptr(a.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	s := &server{fds: newFDReceiver(nil), author: newMemory(), log: slog.New(slog.DiscardHandler)}
	s.fds.put(1, []int{fd})
	defer s.fds.closeAll()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = s.AttachArena(ctx, &pluginpb.AttachArenaRequest{Token: 1, Id: 7, Size: 1 << 16})
	if !errors.Is(err, context.Canceled) || s.arenas.get(7) != nil {
		t.Errorf("%v, attached: %t", err, s.arenas.get(7) != nil)
	}
}
