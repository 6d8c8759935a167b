package sim

import (
	"encoding/json"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
)

// Schedule describes one run. The same seed draws the same.
type Schedule struct {
	Seed       uint64
	Scene      string // where the faults come from first; "": they are drawn one by one
	Servers    int
	Devices    int // of each server
	Sessions   int // with each server; they divide its devices
	Paths      int // of each session
	Pumps      int // of each daemon
	QueueDepth int
	ChunkSize  int
	Slots      int // of each device
	Users      int // of each device
	Blocks     int // of each disk
	Cache      bool
	Queue      time.Duration     // loss=queue:T; 0: loss=fail
	Policy     rtrs.Policy       // chooses the path of a request
	Resets     []bool            // by path: its fabric tells peers of a dead process
	Fabrics    []loopback.Fabric // by path
	Length     time.Duration
	Soon       time.Duration // in which each request is answered, whatever the faults; 0: see isolation.go
	Faults     []Fault
}

// Fault is one thing that goes wrong, and when.
type Fault struct {
	Kind string
	At   time.Duration
	For  time.Duration // 0: it is over at once
	// The kind of the fault decides which of these it uses.
	Server, Path, Device, N int
}

func (f Fault) String() string {
	return fmt.Sprintf("%8v +%-8v %-16s server %d path %d device %d n %d", f.At, f.For, f.Kind, f.Server, f.Path, f.Device, f.N)
}

func (s *Schedule) sizes() sizes { return sizes{depth: s.QueueDepth, chunk: s.ChunkSize} }

// frontRing is how many entries the rings of front ends have: one for each slot, or
// devices that hang would take them all.
func (s *Schedule) frontRing() int {
	return 1 << bits.Len(uint(max(64, s.Servers*s.Devices*s.Slots)-1))
}

// has reports whether faults of a kind are in the schedule.
func (s *Schedule) has(kind string) bool {
	return slices.ContainsFunc(s.Faults, func(f Fault) bool { return f.Kind == kind })
}

// end is when the last fault ends.
func (s *Schedule) end() (end time.Duration) {
	for _, f := range s.Faults {
		end = max(end, f.At+f.For)
	}
	return max(end, s.Length)
}

// crashes is how often storage plugins die at most.
func (s *Schedule) crashes() (n int) {
	for _, f := range s.Faults {
		if strings.HasSuffix(f.Kind, "-storage") || f.Kind == "swap-cache" {
			n++
		}
	}
	return n
}

// resets reports whether the fabric of a path tells peers of a dead process, as that
// of a stream does.
func (s *Schedule) resets(path int) bool {
	return s.Resets[path%len(s.Resets)] || s.fabric(path) == loopback.Stream
}

// fabric is that of a path.
func (s *Schedule) fabric(path int) loopback.Fabric {
	if len(s.Fabrics) == 0 {
		return loopback.Plain
	}
	return s.Fabrics[path%len(s.Fabrics)]
}

func (s *Schedule) String() string {
	var b strings.Builder
	head := *s
	head.Faults = nil
	j, _ := json.Marshal(head)
	fmt.Fprintf(&b, "%s\n", j)
	for _, f := range s.Faults {
		fmt.Fprintf(&b, "  %s\n", f)
	}
	return b.String()
}

var pathPolicies = []rtrs.Policy{rtrs.MinInflight, rtrs.RoundRobin, rtrs.MinLatency}

// onlyScene has each schedule begin with the scene of that name; "": any, or none.
var onlyScene = os.Getenv("SIM_SCENE")

// drawScene draws a scene, or returns the one that is named only.
func drawScene(rnd *rand.Rand, only string) scene {
	i := rnd.IntN(len(scenes))
	if only != "" {
		if i = slices.IndexFunc(scenes, func(s scene) bool { return s.name == only }); i < 0 {
			panic("SIM_SCENE: there is no scene " + only)
		}
	}
	return scenes[i]
}

// drawFabrics draws one for each path that a scene may want.
func drawFabrics(seed uint64) (all []loopback.Fabric) {
	rnd := rand.New(rand.NewPCG(seed, 15))
	for range mostPaths {
		all = append(all, []loopback.Fabric{loopback.Stream, loopback.Datagrams}[rnd.IntN(2)])
	}
	return all
}

const mostPaths = 3 // of a session

// Draw makes the schedule of a seed.
func Draw(seed uint64) *Schedule { return drawWithScene(seed, onlyScene) }

// drawWithScene makes the schedule of a seed that begins with the scene only; if only
// is empty, with any scene or with none.
func drawWithScene(seed uint64, only string) *Schedule {
	rnd := rand.New(rand.NewPCG(seed, 14))
	s := &Schedule{
		Seed: seed, Servers: 1 + rnd.IntN(2), Devices: 1 + rnd.IntN(3), Paths: 1 + rnd.IntN(mostPaths), Pumps: 1 + rnd.IntN(2),
		QueueDepth: []int{1, 2, 4, 16, 64}[rnd.IntN(5)], ChunkSize: []int{32768, 65536, 131072}[rnd.IntN(3)],
		Slots: []int{2, 8, 16}[rnd.IntN(3)], Users: 1 + rnd.IntN(6), Blocks: 8 + rnd.IntN(25), Cache: rnd.IntN(2) == 0,
		Length: 10 * time.Second, Sessions: 1, Policy: rtrs.MinInflight,
	}
	if rnd.IntN(4) > 0 {
		s.Queue = 2 * time.Minute
	}
	if rnd.IntN(3) == 0 {
		s.Policy = pathPolicies[rnd.IntN(len(pathPolicies))]
	}
	for range s.Paths {
		s.Resets = append(s.Resets, rnd.IntN(2) == 0)
	}
	s.Fabrics = drawFabrics(seed)
	if s.Devices > 1 && rnd.IntN(3) == 0 {
		s.Sessions = 2
	}
	switch rnd.IntN(64) {
	case 0: // many devices
		s.Servers, s.Devices, s.QueueDepth, s.Slots, s.Users, s.Blocks = 1, 70+rnd.IntN(30), 256, 2, 1, 8
	case 1, 2, 3, 4, 5, 6, 7, 8: // many users of each
		s.Users, s.Slots, s.QueueDepth = 16+rnd.IntN(80), 64, []int{16, 64, 256}[rnd.IntN(3)]
	}
	n := 2 + rnd.IntN(10)
	if rnd.IntN(4) == 0 { // few leave times without other faults, in which only requests to a hanging disk may wait
		n = 1 + rnd.IntN(3)
	}
	if rnd.IntN(2) == 0 || only != "" {
		scene := drawScene(rnd, only)
		s.Scene = scene.name
		scene.draw(&stage{s, rnd})
		if n = max(0, rnd.IntN(6)-3); s.Soon > 0 { // other faults
			n = 0
		}
	}
	kinds := slices.Clone(faultKinds)
	rnd.Shuffle(len(kinds), func(i, j int) { kinds[i], kinds[j] = kinds[j], kinds[i] })
	kinds = kinds[:1+rnd.IntN(5)] // few kinds at a time meet more often
	if !slices.Contains(kinds, "hang-disk") && rnd.IntN(2) == 0 {
		kinds = append(kinds, "hang-disk") // most failures found so far involved a hanging disk
	}
	for range n {
		s.Faults = append(s.Faults, s.draw(rnd, kinds[rnd.IntN(len(kinds))]))
	}
	s.Fabrics = s.Fabrics[:s.Paths]
	slices.SortFunc(s.Faults, func(a, b Fault) int { return int(a.At - b.At) })
	return s
}

func (s *Schedule) draw(rnd *rand.Rand, kind string) Fault {
	f := Fault{Kind: kind, At: time.Duration(rnd.Int64N(int64(s.Length))), Server: rnd.IntN(s.Servers), Path: rnd.IntN(s.Paths),
		Device: rnd.IntN(s.Servers * s.Devices), N: rnd.IntN(100)}
	f.For = time.Duration(rnd.Int64N(int64(3 * time.Second)))
	if rnd.IntN(3) == 0 {
		f.For = 3*time.Second + time.Duration(rnd.Int64N(int64(9*time.Second)))
	}
	if kind == "hang-disk" && rnd.IntN(2) == 0 { // longer than a path waits for it
		f.For = 6*time.Second + time.Duration(rnd.Int64N(int64(14*time.Second)))
	}
	if rnd.IntN(20) == 0 || reaches[kind] == reachWay && rnd.IntN(6) == 0 { // longer than the effects take to pass
		f.For = 12*time.Second + time.Duration(rnd.Int64N(int64(38*time.Second)))
	}
	f.At, f.For = f.At.Truncate(time.Millisecond), f.For.Truncate(time.Millisecond)
	return f
}
