package e2e

import (
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

// TestRecoveryTimes measures how long a path of ours needs to come back, for the table
// "Recovery" of the page on operations: after a reset by the server, after the server was
// killed and is ready again, and after a silence.
func TestRecoveryTimes(t *testing.T) {
	const most = 12 * time.Second // the longest pause between two attempts is 5 s, on a busy machine
	for i, fabric := range []string{"iwarp", "rocev2"} {
		t.Run(fabric, func(t *testing.T) {
			l := lab.New(t)
			at := net.JoinHostPort(lab.LoopbackAddr(byte(31+2*i)), "4791")
			s := l.Server(lab.ServerOptions{SearchPath: l.Image("disk.img", 8<<20), Plugins: []string{"fileio"}, Listen: []string{fabric + "://" + at}})
			c := l.Client(lab.ClientOptions{Extra: []string{"--loss", "queue:60s"}})
			l.Map(c, "disk.img", s, func(r *controlpb.MapRequest) {
				r.Session, r.Paths = "demo", []string{lab.LoopbackAddr(byte(32+2*i)) + "@" + at + "%" + fabric}
			})
			path := func() *controlpb.Path {
				list, err := c.API.ListSessions(t.Context(), &controlpb.ListRequest{})
				if err != nil || len(list.Sessions) != 1 {
					t.Fatalf("sessions %v, %v", list, err)
				}
				return list.Sessions[0].Paths[0]
			}
			user := dialNBD(t, c, "rnbd0")
			back := func(what string, since time.Time) {
				t.Helper()
				if _, err := user.WriteAt(make([]byte, 4096), 0); err != nil {
					t.Fatalf("%s: %v", what, err)
				}
				took := time.Since(since)
				t.Logf("%s: a write is answered after %v", what, took.Round(time.Millisecond))
				if took > most {
					t.Errorf("%s: %v", what, took)
				}
			}
			lost := func() time.Time {
				t.Helper()
				began := time.Now()
				eventually(t, "the path is lost", func() bool { return path().State != "connected" })
				return began
			}

			reset := time.Now()
			before := path().Reconnects
			if _, err := s.API.DisconnectSession(t.Context(), &controlpb.SessionRequest{Session: "demo"}); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the path is connected again", func() bool { return path().Reconnects > before })
			back("reset by the server", reset)

			if err := s.Kill(); err != nil {
				t.Fatal(err)
			}
			lost()
			if err := s.Start(); err != nil {
				t.Fatal(err)
			}
			back("killed server that is ready again", time.Now())

			info, err := s.API.Info(t.Context(), &controlpb.InfoRequest{})
			if err != nil {
				t.Fatal(err)
			}
			must := func(err error) {
				if err != nil {
					t.Fatal(err)
				}
			}
			must(syscall.Kill(int(info.Pid), syscall.SIGSTOP))
			defer syscall.Kill(int(info.Pid), syscall.SIGCONT)
			silent := lost()
			t.Logf("a silent server is noticed after %v", time.Since(silent).Round(time.Millisecond))
			must(syscall.Kill(int(info.Pid), syscall.SIGCONT))
			back("silent server that is back", time.Now())
		})
	}
}
