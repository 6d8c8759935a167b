package sim

import (
	"math/rand/v2"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
)

// A scene is an ordered combination of several faults, with a topology in which
// they meet: drawn one by one they would come together too rarely. Its times
// and numbers are drawn; ordinary faults may be mixed in.
type scene struct {
	name string
	draw func(s *stage)
}

// stage is where a scene draws.
type stage struct {
	*Schedule
	rnd *rand.Rand
}

var scenes = []scene{
	{"chunks", (*stage).chunks},
	{"unmapped", (*stage).unmapped},
	{"depth-one", (*stage).depthOne},
	{"dead-dial", (*stage).deadDial},
	{"restart-unseen", (*stage).restartUnseen},
	{"ended-session", (*stage).endedSession},
	{"other-server", (*stage).otherServer},
	{"given-up-unmap", (*stage).givenUpUnmap},
	{"hung-neighbour", (*stage).hungNeighbour},
	{"slow-open", (*stage).slowOpen},
	{"stuck", (*stage).stuck},
	{"front", (*stage).front},
	{"storage", (*stage).storage},
}

// between draws a time.
func (s *stage) between(from, to time.Duration) time.Duration {
	return (from + time.Duration(s.rnd.Int64N(int64(to-from)))).Truncate(time.Millisecond)
}

func (s *stage) one(n int) bool { return s.rnd.IntN(n) == 0 }

func pick[T any](s *stage, of ...T) T { return of[s.rnd.IntN(len(of))] }

// add adds a fault; its other numbers are drawn.
func (s *stage) add(kind string, at, length time.Duration, set func(f *Fault)) {
	f := Fault{Kind: kind, At: max(at, 0), For: length, Server: s.rnd.IntN(s.Servers), Path: s.rnd.IntN(s.Paths),
		Device: s.rnd.IntN(s.Servers * s.Devices), N: s.rnd.IntN(100)}
	if set != nil {
		set(&f)
	}
	s.Faults = append(s.Faults, f)
}

// of sets server, path and device of a fault.
func of(server, path, device int) func(f *Fault) {
	return func(f *Fault) { f.Server, f.Path, f.Device = server, path, device }
}

// paths gives each session so many.
func (s *stage) paths(n int) {
	s.Paths = n
	s.Resets = nil
	for range n {
		s.Resets = append(s.Resets, s.one(2))
	}
}

// chunks: a disk hangs with requests of a path that is lost, or that nobody waits for any
// more, and another path connects before the server goes without them.
func (s *stage) chunks() {
	s.Servers = 1
	s.paths(2 + s.rnd.IntN(2))
	s.Devices, s.QueueDepth, s.Slots, s.Users = max(s.Devices, 2), pick(s, 4, 8, 16), 16, 4+s.rnd.IntN(12)
	s.Queue = 2 * time.Minute
	hang := s.between(time.Second, 4*time.Second)
	device, path := s.rnd.IntN(s.Devices), s.rnd.IntN(s.Paths)
	s.add("hang-disk", hang, s.between(7*time.Second, 25*time.Second), of(0, 0, device))
	lost := hang + s.between(100*time.Millisecond, 3*time.Second)
	if s.one(2) { // it was the only one, for a moment
		joins := lost + s.between(0, 5*time.Second)
		for p := range s.Paths {
			if p != path {
				at := s.between(0, hang)
				s.add(pick(s, "stall", "disconnect-path"), at, joins-at, of(0, p, 0))
				s.add("cut", at+time.Millisecond, 0, of(0, p, 0))
			}
		}
	}
	if s.one(2) {
		s.add("stall", lost, s.between(5*time.Second, 15*time.Second), of(0, path, 0))
	}
	s.add("cut", lost+time.Millisecond, 0, of(0, path, 0))
	if s.one(2) {
		s.add(pick(s, "remap", "hasty-remap"), lost+s.between(-time.Second, 3*time.Second), s.between(0, 2*time.Second), of(0, 0, device))
	}
	for range s.rnd.IntN(3) {
		s.add("cut", hang+s.between(0, 8*time.Second), 0, nil)
	}
}

// unmapped: devices are unmapped while answers to their requests are on the way.
func (s *stage) unmapped() {
	s.paths(1 + s.rnd.IntN(3))
	s.Slots, s.Users, s.QueueDepth = 16, 8+s.rnd.IntN(16), pick(s, 16, 64)
	for range 2 + s.rnd.IntN(4) {
		at, device := s.between(500*time.Millisecond, 8*time.Second), s.rnd.IntN(s.Servers*s.Devices)
		s.add(pick(s, "hang-disk", "slow-disk"), at, s.between(100*time.Millisecond, 4*time.Second), of(0, 0, device))
		s.add(pick(s, "delay", "stall-answers", "jitter"), at, s.between(100*time.Millisecond, 4*time.Second), nil)
		s.add(pick(s, "remap", "hasty-remap"), at+s.between(0, time.Second), s.between(0, 4*time.Second), of(0, 0, device))
	}
}

// depthOne: with hardly any permits the fence, the reconnect and requests want the same.
func (s *stage) depthOne() {
	s.paths(2 + s.rnd.IntN(2))
	s.QueueDepth = pick(s, 1, 1, 2, 3)
	server, begin := s.rnd.IntN(s.Servers), s.between(500*time.Millisecond, 6*time.Second)
	if s.one(2) { // the path that carries the fence of another is lost too
		s.paths(3)
		s.QueueDepth, s.Users, s.Policy = pick(s, 2, 3, 4, 8), 8+s.rnd.IntN(8), rtrs.RoundRobin
		for i, p := range s.rnd.Perm(3)[:2] {
			at := begin + time.Duration(i)*s.between(100*time.Millisecond, 5*time.Second)
			s.add("stall", at, s.between(6*time.Second, 15*time.Second), of(server, p, 0))
			if i == 1 && s.one(2) {
				s.add("cut", at+time.Millisecond, 0, of(server, p, 0))
			}
		}
		return
	}
	for range 3 + s.rnd.IntN(6) {
		kind := pick(s, "cut", "cut", "stall", "stall-answers", "stall-requests", "cut-connection", "black-hole", "delay")
		s.add(kind, begin+s.between(0, 5*time.Second), s.between(0, 9*time.Second), func(f *Fault) { f.Server = server })
	}
	if s.one(3) {
		s.add("hang-disk", begin+s.between(-time.Second, time.Second), s.between(time.Second, 12*time.Second), nil)
	}
}

// deadDial: one path is dead for long, and is dialled in vain, while others come and go or
// the server is started anew; or nothing else is wrong, and everything has to go on.
func (s *stage) deadDial() {
	s.paths(2 + s.rnd.IntN(2))
	server, dead, at := s.rnd.IntN(s.Servers), s.rnd.IntN(s.Paths), s.between(0, 6*time.Second)
	if s.one(3) {
		s.oneComesBack(server, at)
		return
	}
	s.QueueDepth, s.Users = pick(s, 16, 64), min(s.Users, 4)
	s.add("stall", at, s.between(15*time.Second, 30*time.Second), of(server, dead, 0))
	kinds := []string{"cut", "reconnect-path"}
	if s.one(2) {
		kinds = append(kinds, "cut-other", "kill-server")
	}
	for range s.rnd.IntN(4) {
		when := at + s.between(0, 12*time.Second)
		switch kind := pick(s, kinds...); kind {
		case "kill-server":
			s.add(kind, when, s.between(50*time.Millisecond, 2*time.Second), of(server, 0, 0))
		case "cut-other":
			s.add("cut", when, 0, func(f *Fault) { f.Server = server })
		default:
			s.add(kind, when, 0, of(server, dead, 0))
		}
	}
}

// oneComesBack: a client ends a dead path, which the server believes in, while its other
// one is lost for a moment. That one fences it, and serves, whatever becomes of the attempt
// to make the dead one again; the server may have to notice first that it is dead.
func (s *stage) oneComesBack(server int, at time.Duration) {
	s.paths(2)
	s.QueueDepth, s.Users, s.Queue, s.Soon = pick(s, 16, 64), 4+s.rnd.IntN(6), 2*time.Minute, 15*time.Second
	s.Policy, s.Sessions = rtrs.RoundRobin, 1
	dead := s.rnd.IntN(2)
	at += time.Second
	s.add("delay", at-time.Second, time.Second, func(f *Fault) { f.Server, f.Path, f.N = server, dead, 20+s.rnd.IntN(60) })
	s.add("stall", at, s.between(24*time.Second, 30*time.Second), of(server, dead, 0))
	s.add("cut", at+s.between(0, 12*time.Millisecond), 0, of(server, 1-dead, 0))
	s.add("reconnect-path", at+12*time.Millisecond, 0, of(server, dead, 0))
}

// restartUnseen: a server is restarted at once without notice to its clients.
// Their paths notice it one after the other, or while they connect.
func (s *stage) restartUnseen() {
	s.paths(2 + s.rnd.IntN(2))
	s.Queue, s.Sessions, s.Devices = 2*time.Minute, 1, max(s.Devices, 2)
	server, at := s.rnd.IntN(s.Servers), s.between(time.Second, 8*time.Second)
	late := s.rnd.IntN(s.Paths)
	if s.one(2) { // nothing else is wrong; some devices have requests on the late path only, others have none
		s.paths(2)
		s.Devices, s.Users, s.QueueDepth, late = 6+s.rnd.IntN(3), 2, pick(s, 16, 64), s.rnd.IntN(2)
		s.Resets[late], s.Resets[1-late] = false, true
		s.Fabrics[late] = loopback.Datagrams // a stream would tell
		s.add("kill-server", at, s.between(time.Millisecond, 300*time.Millisecond), of(server, 0, 0))
		return
	}
	if !s.one(4) {
		s.Fabrics[late] = loopback.Datagrams
	}
	for p := range s.Paths {
		s.Resets[p] = p != late && !s.one(4)
		if s.one(3) {
			s.add("delay", at-s.between(0, time.Second), s.between(time.Second, 8*time.Second), of(server, p, 0))
		}
	}
	if s.one(2) { // it was lost before, and comes back to the next server
		s.add("stall", at-s.between(0, 6*time.Second), s.between(3*time.Second, 12*time.Second), of(server, late, 0))
	}
	s.add(pick(s, "kill-server", "power-cut"), at, s.between(time.Millisecond, 1500*time.Millisecond), of(server, 0, 0))
	for range s.rnd.IntN(3) {
		s.add(pick(s, "cut", "reconnect-path"), at+s.between(0, 4*time.Second), 0, func(f *Fault) { f.Server = server })
	}
	if s.one(3) {
		s.add("kill-server", at+s.between(time.Second, 6*time.Second), s.between(time.Millisecond, time.Second), of(server, 0, 0))
	}
}

// endedSession: all paths are lost while some connect, slowly, and a disk holds requests.
func (s *stage) endedSession() {
	s.paths(2 + s.rnd.IntN(2))
	s.Queue = 2 * time.Minute
	server, begin := s.rnd.IntN(s.Servers), s.between(time.Second, 5*time.Second)
	s.Sessions, s.Devices = 1, max(s.Devices, 2)
	switch s.rnd.IntN(3) {
	case 0:
		s.endedBefore(server, begin+2*time.Second)
		return
	case 1:
		s.joinsAtLoss(server)
		return
	}
	if s.one(2) {
		s.add("hang-disk", begin-s.between(0, time.Second), s.between(3*time.Second, 15*time.Second), nil)
	}
	for p := range s.Paths {
		if s.one(2) {
			s.add("delay", begin-s.between(0, time.Second), s.between(time.Second, 8*time.Second), of(server, p, 0))
		}
	}
	for range 2 + s.rnd.IntN(3) {
		at := begin + s.between(0, 3*time.Second)
		for p := range s.Paths {
			s.add("cut", at+s.between(0, 200*time.Millisecond), 0, of(server, p, 0))
		}
	}
}

// endedBefore: the server loses the only path of a session, and ends it, before the client
// notices. Another path was being made, and waits for the operations of the lost one.
func (s *stage) endedBefore(server int, at time.Duration) {
	s.paths(2)
	s.QueueDepth, s.Users = pick(s, 16, 64), 4+s.rnd.IntN(8)
	lost := s.rnd.IntN(2)
	device := server*s.Devices + s.rnd.IntN(s.Devices)
	away := at - s.between(time.Second, 2*time.Second)
	s.add("disconnect-path", away, at+s.between(500*time.Millisecond, 5*time.Second)-away, of(server, 1-lost, 0))
	hangs := at - s.between(50*time.Millisecond, 500*time.Millisecond)
	s.add("hang-disk", hangs, at+s.between(4500*time.Millisecond, 6500*time.Millisecond)-hangs, of(server, 0, device))
	s.add("stall-requests", at, 15*time.Second, of(server, lost, 0))
	s.add("stall", at+s.between(2200*time.Millisecond, 5*time.Second), 15*time.Second, of(server, lost, 0))
}

// joinsAtLoss: again and again a path is lost while another one is being made.
func (s *stage) joinsAtLoss(server int) {
	s.paths(2)
	s.QueueDepth, s.Users = pick(s, 4, 16, 64), 4+s.rnd.IntN(4)
	slow, delay := s.rnd.IntN(2), 5+s.rnd.IntN(30)
	s.add("delay", 500*time.Millisecond, 12*time.Second, func(f *Fault) { f.Server, f.Path, f.N = server, slow, delay-1 })
	for i := range 16 {
		at := time.Second + time.Duration(i)*s.between(500*time.Millisecond, 600*time.Millisecond)
		s.add("cut", at, 0, of(server, slow, 0))
		made := time.Duration(delay) * s.between(2500*time.Millisecond, 4500*time.Millisecond) / 1000
		s.add("cut", at+made, 0, of(server, 1-slow, 0))
	}
}

// otherServer: a server, or its plugin, comes back with other properties while
// requests wait, and acknowledged writes are verified.
func (s *stage) otherServer() {
	server, at := s.rnd.IntN(s.Servers), s.between(time.Second, 6*time.Second)
	s.Cache, s.Queue = s.one(4), 2*time.Minute
	length := s.between(3*time.Second, 12*time.Second)
	if s.one(2) {
		for p := range s.Paths {
			s.add("stall", at-s.between(0, 2*time.Second), s.between(time.Second, 5*time.Second), of(server, p, 0))
		}
	}
	s.add(pick(s, "other-cache", "other-cache", "swap-cache", "swap-cache", "other-sizes"), at, length, of(server, 0, 0))
	for range s.rnd.IntN(3) {
		s.add("power-cut", at+s.between(time.Second, length), s.between(time.Millisecond, time.Second), of(server, 0, 0))
	}
}

// givenUpUnmap: the answer to an unmap is lost, it is given up, and the device is mapped
// again before the path is lost, so that the server has another device of that number.
func (s *stage) givenUpUnmap() {
	s.paths(2 + s.rnd.IntN(2))
	s.Sessions, s.Devices, s.Users = 1, max(s.Devices, 2), 1+s.rnd.IntN(2)
	s.Policy = pick(s, pathPolicies...)
	for range 1 + s.rnd.IntN(2) {
		at, device := s.between(time.Second, 8*time.Second), s.rnd.IntN(s.Servers*s.Devices)
		server := device / s.Devices
		for range 1 + s.rnd.IntN(s.Paths-1) {
			s.add("stall-answers", at, s.between(4*time.Second, 15*time.Second), func(f *Fault) { f.Server = server })
		}
		s.add(pick(s, "remap", "hasty-remap"), at+s.between(-5*time.Millisecond, 200*time.Millisecond), s.between(0, time.Second), of(server, 0, device))
	}
}

// hungNeighbour: of many devices some hang, and the others have much to do.
func (s *stage) hungNeighbour() {
	s.Servers, s.Devices = 1+s.rnd.IntN(2), 2+s.rnd.IntN(4)
	s.QueueDepth, s.Slots, s.Users = pick(s, 16, 64, 256), 64, 16+s.rnd.IntN(32)
	at := s.between(500*time.Millisecond, 6*time.Second)
	for range 1 + s.rnd.IntN(2) {
		s.add("hang-disk", at+s.between(0, 2*time.Second), s.between(8*time.Second, 20*time.Second), nil)
	}
}

// slowOpen: devices are opened while one cannot be: its disk hangs with operations of the
// server before.
func (s *stage) slowOpen() {
	s.Devices, s.Users, s.Queue = max(s.Devices, 2), min(s.Users, 4), 2*time.Minute
	s.QueueDepth = pick(s, 16, 64)
	device := s.rnd.IntN(s.Servers * s.Devices)
	server, at := device/s.Devices, s.between(500*time.Millisecond, 2*time.Second)
	s.add("hang-disk", at, s.between(42*time.Second, 55*time.Second), of(server, 0, device))
	s.add("kill-server", at+s.between(100*time.Millisecond, time.Second), s.between(10*time.Millisecond, time.Second), of(server, 0, device))
	for range 2 + s.rnd.IntN(3) {
		s.add("remap", at+s.between(33*time.Second, 40*time.Second), s.between(0, 500*time.Millisecond), of(server, 0, server*s.Devices+s.rnd.IntN(s.Devices)))
	}
}

// stuck: a session with devices on hanging disks is lost, and one of the disks
// recovers.
func (s *stage) stuck() {
	s.Servers, s.Sessions, s.Devices, s.Users, s.Queue = 1, 1, 2+s.rnd.IntN(2), min(s.Users, 4), 2*time.Minute
	s.QueueDepth = pick(s, 16, 64)
	at, devices := s.between(500*time.Millisecond, 2*time.Second), s.rnd.Perm(s.Devices)
	s.add("hang-disk", at, s.between(44*time.Second, 55*time.Second), of(0, 0, devices[0]))
	s.add("hang-disk", at, s.between(7*time.Second, 14*time.Second), of(0, 0, devices[1]))
	lost := at + s.between(500*time.Millisecond, 2*time.Second)
	for p := range s.Paths {
		s.add("cut", lost+s.between(0, 5*time.Millisecond), 0, of(0, p, 0))
	}
}

// front: the front end dies with a request that hangs.
func (s *stage) front() {
	at := s.between(500*time.Millisecond, 6*time.Second)
	s.add("hang-disk", at, s.between(6*time.Second, 20*time.Second), nil)
	for range 1 + s.rnd.IntN(3) {
		s.add(pick(s, "kill-front", "kill-front", "late-front", "slow-start-front"), at+s.between(0, 5*time.Second), s.between(0, 2*time.Second), nil)
	}
	if s.one(3) {
		s.add("remap", at+s.between(0, 5*time.Second), s.between(0, 2*time.Second), nil)
	}
}

// storage: a plugin dies with requests, and its next process cannot open all of them at
// once, or loses its paths meanwhile.
func (s *stage) storage() {
	if s.one(8) {
		s.Servers, s.Devices, s.QueueDepth, s.Slots, s.Users, s.Blocks = 1, 70+s.rnd.IntN(30), 256, 2, 1, 8
	}
	server, at := s.rnd.IntN(s.Servers), s.between(500*time.Millisecond, 6*time.Second)
	if s.one(2) {
		s.add("hang-disk", at-s.between(0, time.Second), s.between(time.Second, 20*time.Second), nil)
	}
	s.add(pick(s, "slow-disk", "refuse-opens", "slow-start-storage"), at-s.between(0, time.Second), s.between(time.Second, 6*time.Second), of(server, 0, 0))
	for range 1 + s.rnd.IntN(2) {
		s.add(pick(s, "kill-storage", "late-storage"), at+s.between(0, 2*time.Second), s.between(0, 2*time.Second), of(server, 0, 0))
	}
	for range s.rnd.IntN(4) {
		s.add("cut", at+s.between(0, 3*time.Second), 0, func(f *Fault) { f.Server = server })
	}
}
