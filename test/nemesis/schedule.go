package nemesis

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"time"
)

// Schedule is a set-up and the faults applied to it.
type Schedule struct {
	Seed   uint64  `json:"seed"`
	Length Millis  `json:"length"` // of the load with faults
	Setup  Setup   `json:"setup"`
	Faults []Fault `json:"faults"` // in the order of their begin
}

// Setup holds the daemons' settings.
type Setup struct {
	Fabrics    [2]string `json:"fabrics"`     // of the paths
	Engine     string    `json:"engine"`      // of storage plugins: uring, threads
	Loss       string    `json:"loss"`        // of the devices: fail, queue:60s
	QueueDepth int       `json:"queue_depth"` // of the server
	ChunkSize  int       `json:"chunk_size"`  // of the server, bytes
	Policy     string    `json:"policy"`
	Crowd      int       `json:"crowd,omitempty"` // devices that are open and idle
}

// Fault is something that begins, lasts, and is healed.
type Fault struct {
	Kind string  `json:"kind"`
	At   Millis  `json:"at"`
	For  Millis  `json:"for"`
	Path int     `json:"path,omitempty"` // index, of faults of one path
	Size float64 `json:"size,omitempty"` // in the unit of its kind
}

// Millis is a duration in whole milliseconds.
type Millis int64

func (m Millis) duration() time.Duration { return time.Duration(m) * time.Millisecond }

func (m Millis) String() string { return fmt.Sprintf("%.3fs", float64(m)/1000) }

func (f Fault) String() string {
	s := fmt.Sprintf("%v for %v: %s", f.At, f.For, f.Kind)
	if kinds[f.Kind].path {
		s += fmt.Sprintf(" path %d", f.Path)
	}
	if f.Size != 0 {
		s += fmt.Sprintf(" %.3g%s", f.Size, kinds[f.Kind].unit)
	}
	return s
}

func (s *Schedule) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d, %v, %+v\n", s.Seed, s.Length, s.Setup)
	for _, f := range s.Faults {
		fmt.Fprintf(&b, "  %v\n", f)
	}
	return b.String()
}

// options bound the draw.
type options struct {
	length Millis
	crowd  int      // devices of a crowd, if one is drawn
	rooted bool     // namespaces, wires and slow disks
	only   []string // kinds; empty: all
}

// Draw makes the schedule of a seed. The same seed and options give the same.
func Draw(seed uint64, o options) *Schedule {
	rnd := rand.New(rand.NewPCG(seed, 0x6e656d65736973))
	s := &Schedule{Seed: seed, Length: o.length}
	s.Setup = Setup{
		Fabrics:    pick(rnd, [][2]string{{"iwarp", "iwarp"}, {"rocev2", "rocev2"}, {"iwarp", "rocev2"}, {"rocev2", "iwarp"}}),
		Engine:     pick(rnd, []string{"uring", "uring", "threads"}),
		Loss:       pick(rnd, []string{"queue:60s", "queue:60s", "fail"}),
		QueueDepth: pick(rnd, []int{16, 64, 512}),
		ChunkSize:  pick(rnd, []int{8192, 128 << 10, 128 << 10}),
		Policy:     pick(rnd, []string{"min-inflight", "round-robin", "min-latency"}),
	}
	if o.crowd > 0 && rnd.IntN(8) == 0 {
		s.Setup.Crowd = o.crowd
	}
	var names []string
	for name, k := range kinds {
		if (o.rooted || !k.rooted) && (len(o.only) == 0 || slices.Contains(o.only, name)) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	rnd.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	names = names[:min(len(names), 2+rnd.IntN(5))]
	n := 3 + rnd.IntN(2+int(o.length/1000))
	for range n {
		name := pick(rnd, names)
		k := kinds[name]
		f := Fault{Kind: name, At: Millis(rnd.Int64N(int64(o.length))), For: Millis(logarithmic(rnd, 50, float64(o.length)/3))}
		if k.instant {
			f.For = 0
		}
		if k.path {
			f.Path = rnd.IntN(2)
		}
		if k.high > 0 {
			f.Size = math.Round(logarithmic(rnd, k.low, k.high)*100) / 100
		}
		f.For = min(f.For, o.length-f.At)
		s.Faults = append(s.Faults, f)
	}
	slices.SortStableFunc(s.Faults, func(a, b Fault) int { return int(a.At - b.At) })
	return s
}

func pick[T any](rnd *rand.Rand, of []T) T { return of[rnd.IntN(len(of))] }

// logarithmic draws between low and high, small ones as often as large ones.
func logarithmic(rnd *rand.Rand, low, high float64) float64 {
	return low * math.Pow(high/low, rnd.Float64())
}

// Load reads a schedule from a JSON file.
func Load(name string) (*Schedule, error) {
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	s := &Schedule{}
	if err := json.Unmarshal(text, s); err != nil {
		return nil, fmt.Errorf("schedule %s: %w", name, err)
	}
	for _, f := range s.Faults {
		if _, ok := kinds[f.Kind]; !ok {
			return nil, fmt.Errorf("schedule %s: there is no fault %q", name, f.Kind)
		}
	}
	return s, nil
}

// save writes the schedule as Load reads it.
func (s *Schedule) save(name string) error {
	text, err := json.MarshalIndent(s, "", " ")
	if err != nil {
		return err
	}
	return os.WriteFile(name, append(text, '\n'), 0o644)
}

// without is the schedule less one fault.
func (s *Schedule) without(i int) *Schedule {
	less := *s
	less.Faults = slices.Delete(slices.Clone(s.Faults), i, i+1)
	return &less
}
