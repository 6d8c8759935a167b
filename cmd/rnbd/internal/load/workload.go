package load

import (
	"fmt"
	"slices"
	"strings"
)

// Workload is one way to use a device.
type Workload struct {
	Name   string
	Reads  int     // percent of the requests; the rest are writes
	Random bool    // places are drawn; else each request follows the one before
	Zipf   float64 // exponent of the popularity of places, above 1; 0: all alike
	InRow  int     // requests that follow each other before a new place is drawn; 0: 1
	Blocks []Block
	Depth  int // requests in flight per job
	Jobs   int // per device
}

// Block is a size of requests, in bytes, and how often it comes in proportion
// to the others.
type Block struct{ Bytes, Weight int }

// Writes reports whether data are lost.
func (w Workload) Writes() bool { return w.Reads < 100 }

// Kind describes the requests, without their number: "4k-randread".
func (w Workload) Kind() string {
	if len(w.Blocks) > 1 {
		return "mixed"
	}
	op := "rw"
	switch w.Reads {
	case 100:
		op = "read"
	case 0:
		op = "write"
	}
	if w.Random {
		op = "rand" + op
	} else {
		op = "seq" + op
	}
	return shortSize(w.Blocks[0].Bytes) + "-" + op
}

// named gives w a name from its values.
func (w Workload) named() Workload {
	w.Name = fmt.Sprintf("%s-d%d", w.Kind(), w.Depth)
	return w
}

func shortSize(n int) string {
	for i, unit := range []string{"m", "k"} {
		if size := 1 << (20 - 10*i); n%size == 0 && n > 0 {
			return fmt.Sprint(n/size) + unit
		}
	}
	return fmt.Sprint(n)
}

// Memory returns the memory of the requests in flight of one device, in bytes.
func (w Workload) Memory() int { return w.Jobs * w.Depth * w.largest() }

// largest is the size of the largest requests, smallest that of the smallest.
func (w Workload) largest() int  { return slices.MaxFunc(w.Blocks, bySize).Bytes }
func (w Workload) smallest() int { return slices.MinFunc(w.Blocks, bySize).Bytes }

func bySize(a, b Block) int { return a.Bytes - b.Bytes }

// usualDepths are those of the curves of Usual.
var usualDepths = []int{1, 4, 16, 64}

// Usual are the workloads that are compared everywhere: 4 KiB at random places
// and 1 MiB in sequence; with write also those that write, and Mixed.
func Usual(write bool, jobs int) (ws []Workload) {
	add := func(reads int) {
		for _, depth := range usualDepths {
			ws = append(ws, Workload{Reads: reads, Random: true, Blocks: []Block{{4 << 10, 1}}, Depth: depth, Jobs: jobs}.named())
		}
		ws = append(ws, Workload{Reads: reads, Blocks: []Block{{1 << 20, 1}}, Depth: 8, Jobs: jobs}.named())
	}
	add(100)
	if write {
		add(0)
		ws = append(ws, Mixed(mixedDepth, jobs))
	}
	return ws
}

const mixedDepth = 129

// Mixed is the load of a storage server as the authors of the kernel's RNBD
// emulate it in their reports: as many reads as writes, requests of 512 bytes
// to 64 KiB in pairs that follow each other, a few places far more popular than
// the rest.
func Mixed(depth, jobs int) Workload {
	return Workload{
		Reads: 50, Random: true, Zipf: 1.2, InRow: 2, Depth: depth, Jobs: jobs,
		Blocks: []Block{{512, 20}, {1 << 10, 16}, {2 << 10, 9}, {4 << 10, 12}, {8 << 10, 19}, {16 << 10, 10}, {32 << 10, 8}, {64 << 10, 4}},
	}.named()
}

// kind is a named load.
type kind struct {
	name   string
	reads  int
	random bool
}

var kinds = []kind{
	{"read", 100, false}, {"write", 0, false}, {"randread", 100, true}, {"randwrite", 0, true}, {"randrw", 50, true},
}

// KindNames returns the words that Custom accepts.
func KindNames() string {
	var names []string
	for _, k := range kinds {
		names = append(names, k.name)
	}
	return strings.Join(append(names, "mixed"), ", ")
}

// Custom makes a workload for each depth; none: those that suit the kind. A
// block or zipf of 0 is that of the kind.
func Custom(name string, block int, zipf float64, depths []int, jobs int) (ws []Workload, err error) {
	w, usual := Mixed(0, jobs), []int{mixedDepth}
	if name != "mixed" {
		i := slices.IndexFunc(kinds, func(k kind) bool { return k.name == name })
		if i < 0 {
			return nil, fmt.Errorf("%q is no kind of load: use one of %s", name, KindNames())
		}
		w = Workload{Reads: kinds[i].reads, Random: kinds[i].random, Blocks: []Block{{4 << 10, 1}}, Jobs: jobs}
		usual = usualDepths
	}
	if block > 0 {
		w.Blocks = []Block{{block, 1}}
	}
	if zipf != 0 {
		w.Zipf = zipf
	}
	if len(depths) == 0 {
		depths = usual
	}
	for _, w.Depth = range depths {
		ws = append(ws, w.named())
	}
	return ws, check(w, depths)
}

// Bounds of sensible values.
const (
	maxDepth = 4096
	maxJobs  = 64
	maxBlock = 64 << 20
	sector   = 512
)

func check(w Workload, depths []int) error {
	block := w.Blocks[0].Bytes
	for _, d := range depths {
		if d < 1 || d > maxDepth {
			return fmt.Errorf("depth %d is not between 1 and %d", d, maxDepth)
		}
	}
	switch {
	case block > maxBlock || block%sector != 0:
		return fmt.Errorf("blocks of %d bytes: use a multiple of %d up to %d", block, sector, maxBlock)
	case w.Jobs < 1 || w.Jobs > maxJobs:
		return fmt.Errorf("%d jobs are not between 1 and %d", w.Jobs, maxJobs)
	case w.Zipf != 0 && !(w.Zipf > 1 && w.Zipf <= 10):
		return fmt.Errorf("zipf %v is not above 1, up to 10", w.Zipf)
	case w.Zipf != 0 && !w.Random:
		return fmt.Errorf("zipf is for random places")
	}
	return nil
}
