package rocev2

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// A connection by service ID has all of the private data, and the partition in its packets.
func TestService(t *testing.T) {
	const id = 0x1000000000abcdef
	c, s := newEnd(t, Config{}, addrA), newEnd(t, Config{}, addrB)
	at := verbs.Service{Local: addrB, ID: id, PKey: 0x8001}
	l := must(s.dev.ListenService(at))(t)
	defer l.Close()
	if _, err := s.dev.ListenService(at); err == nil {
		t.Error("a second listener got the service")
	}
	other := must(s.dev.ListenService(verbs.Service{Local: addrB, ID: id, PKey: 0x8002}))(t) // another partition
	other.Close()

	question, answer := bytes.Repeat([]byte{1}, reqPrivateLen), bytes.Repeat([]byte{2}, 8)
	accepted := make(chan error, 1)
	go func() {
		r, err := l.Accept()
		if err == nil && !bytes.Equal(r.Private(), question) {
			err = errors.New("other private data came")
		}
		if err == nil {
			err = r.Accept(s.qp, answer)
		}
		accepted <- err
	}()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	got := must(c.dev.ConnectService(ctx, c.qp, verbs.Service{Local: addrA, ID: id, PKey: 0x8001}, addrB, question))(t)
	if err := <-accepted; err != nil {
		t.Fatal(err)
	}
	if !bytes.HasPrefix(got, answer) {
		t.Errorf("answer %x", got)
	}
	if c.qp.pkey != 0x8001 || s.qp.pkey != 0x8001 {
		t.Errorf("partitions %#x and %#x", c.qp.pkey, s.qp.pkey)
	}
	mem, mr := s.region(100, 0)
	s.recv(verbs.RecvWR{ID: 7, Buf: mem, LKey: mr.LKey()})
	from, fromMR := c.region(100, 0)
	c.send(verbs.SendWR{ID: 8, Op: verbs.OpSend, Signaled: true, SGEs: []verbs.SGE{{Buf: from, LKey: fromMR.LKey()}}})
	if wc := s.next(c); wc.Op != verbs.OpRecv || wc.Status != verbs.StatusOK || wc.ByteLen != 100 {
		t.Errorf("completion %+v", wc)
	}
}

func TestService_IsRefused(t *testing.T) {
	c, s := newEnd(t, Config{}, addrA), newEnd(t, Config{}, addrB)
	l := must(s.dev.ListenService(verbs.Service{Local: addrB, ID: 5, PKey: 0x8001}))(t)
	defer l.Close()
	for _, tt := range []struct {
		name string
		to   verbs.Service
		want error
	}{
		{"another service", verbs.Service{Local: addrA, ID: 6, PKey: 0x8001}, verbs.ErrNoService},
		{"another partition", verbs.Service{Local: addrA, ID: 5, PKey: 0x8002}, verbs.ErrNoService},
		{"limited members of one partition", verbs.Service{Local: addrA, ID: 6, PKey: 1}, verbs.ErrNoService},
		{"no partition", verbs.Service{Local: addrA, ID: 5, PKey: 0x8000}, nil},
		{"of rdma_cm", verbs.Service{Local: addrA, ID: servicePortSpace | 5}, errOfRDMACM},
	} {
		t.Run(tt.name, func(t *testing.T) {
			q := c.newQP(9)
			defer q.Destroy()
			_, err := c.dev.ConnectService(t.Context(), q, tt.to, addrB, nil)
			if err == nil || tt.want != nil && !errors.Is(err, tt.want) {
				t.Errorf("error %v, want %v", err, tt.want)
			}
		})
	}
}
