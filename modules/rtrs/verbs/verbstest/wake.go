package verbstest

import (
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// sleep waits for FD as an owner does and reports whether Poll is to be
// called. It fails after Patience.
func sleep(cq verbs.CQ) error {
	if !cq.Arm() {
		return nil
	}
	fds := []unix.PollFd{{Fd: int32(cq.FD()), Events: unix.POLLIN}}
	for end := time.Now().Add(Patience); ; {
		n, err := unix.Poll(fds, int(time.Until(end).Milliseconds()))
		switch {
		case err == unix.EINTR:
		case err != nil:
			return fmt.Errorf("poll of the queue's descriptor: %w", err)
		case n == 0:
			return fmt.Errorf("nothing woke the queue's owner")
		default:
			return nil
		}
	}
}

// sleepUntil sleeps and polls until a completion matches.
func (o *owner) sleepUntil(match func(*verbs.WC) bool) error {
	for {
		var wcs [4]verbs.WC
		for n := o.cq.Poll(wcs[:]); n > 0; n = o.cq.Poll(wcs[:]) {
			for i := range wcs[:n] {
				if match(&wcs[i]) {
					return nil
				}
			}
		}
		if err := sleep(o.cq); err != nil {
			return err
		}
	}
}

// newOwners is a connection with receives at both ends.
func newOwners(t *testing.T, f Fabric) (client, server *owner) {
	client, server = newOwner(newEnd(t, f.Client)), newOwner(newEnd(t, f.Server))
	for i := range queueDepth {
		client.end.recv(client.qp, uint64(i), 0, 8)
		server.end.recv(server.qp, uint64(i), 0, 8)
	}
	dial(t, f.Client, f.Server, f.Addr, client.qp, server.qp)
	return client, server
}

func wakeMessages(t *testing.T, f Fabric) {
	client, server := newOwners(t, f)
	const rounds = queueDepth / 2
	isMessage := func(wc *verbs.WC) bool { return wc.Op == verbs.OpRecv && wc.Status == verbs.StatusOK }
	isEnd := func(wc *verbs.WC) bool { return wc.Op == verbs.OpDisconnected }
	answer := make(chan error, 1)
	go func() { // the passive end answers each message
		for i := range rounds {
			if err := server.sleepUntil(isMessage); err != nil {
				answer <- fmt.Errorf("passive end, message %d: %w", i, err)
				return
			}
			server.qp.PostSend([]verbs.SendWR{{Op: verbs.OpSend, Signaled: true}})
		}
		answer <- server.sleepUntil(isEnd)
	}()
	for i := range rounds {
		client.end.send(client.qp, verbs.SendWR{Op: verbs.OpSend, Signaled: true})
		if err := client.sleepUntil(isMessage); err != nil {
			t.Fatalf("active end, answer %d: %v", i, err)
		}
	}
	client.qp.Disconnect()
	check(t, client.sleepUntil(isEnd))
	check(t, <-answer)
}

func wakeDisconnect(t *testing.T, f Fabric) {
	client, server := newOwners(t, f)
	isEnd := func(wc *verbs.WC) bool { return wc.Op == verbs.OpDisconnected }
	ended := make(chan error, 2)
	go func() { ended <- client.sleepUntil(isEnd) }()
	go func() { ended <- server.sleepUntil(isEnd) }()
	client.qp.Disconnect() // from neither owner
	check(t, <-ended)
	check(t, <-ended)
}

// armRefuses takes one completion at a time and sleeps after each: an owner
// that may sleep while others wait inside the queue misses them.
func armRefuses(t *testing.T, f Fabric) {
	client, server := newOwners(t, f)
	const messages = 12
	for range messages {
		client.end.send(client.qp, verbs.SendWR{Op: verbs.OpSend, Signaled: true})
	}
	isEnd := func(wc *verbs.WC) bool { return wc.Op == verbs.OpDisconnected }
	ended := make(chan error, 1)
	go func() { ended <- client.sleepUntil(isEnd) }()
	var wcs [1]verbs.WC
	for got := 0; got < messages; {
		check(t, sleep(server.cq))
		got += server.cq.Poll(wcs[:])
	}
	client.qp.Disconnect()
	check(t, <-ended)
	check(t, server.sleepUntil(isEnd))
}
