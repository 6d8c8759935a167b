package load

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

func TestRequestsStayInTheirRegion(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	ws := slices.Concat(Usual(true, 1), []Workload{{Reads: 70, Random: true, Blocks: []Block{{12 << 10, 1}}, InRow: 3}})
	for range 2000 {
		block := uint32(512) << rng.IntN(4)
		w := ws[rng.IntN(len(ws))]
		w.Zipf = []float64{0, 1.01, 1.2, 5}[rng.IntN(4)]
		first := uint64(block) * rng.Uint64N(1000)
		size := uint64(w.largest()) + uint64(block)*rng.Uint64N(10000)>>rng.IntN(14)
		size = size / uint64(block) * uint64(block)
		c := newChooser(&w, region{first, size}, block, rng.Uint64())
		for range 100 {
			op, off, n := c.choose()
			if off < first || off+uint64(n) > first+size || n <= 0 {
				t.Fatalf("%s of %d at %d leaves the %d bytes from %d on", op, n, off, size, first)
			}
			if off%uint64(block) != 0 || n%int(block) != 0 {
				t.Fatalf("%s of %d at %d on blocks of %d", op, n, off, block)
			}
			if op == blk.Write && !w.Writes() || op == blk.Read && w.Reads == 0 {
				t.Fatalf("%s with %d %% reads", op, w.Reads)
			}
		}
	}
}

func TestPartsOfADeviceDoNotOverlap(t *testing.T) {
	whole := region{0, 1<<20 + 512}
	end := uint64(0)
	for i := range 3 {
		p := whole.part(i, 3, 4096)
		if p.first < end || p.first%4096 != 0 || p.size%4096 != 0 || p.size == 0 {
			t.Errorf("part %d is %+v, the one before ends at %d", i, p, end)
		}
		end = p.first + p.size
	}
	if end > whole.size {
		t.Errorf("the last part ends at %d of %d", end, whole.size)
	}
}

func TestSequencesGoOnAndBeginAgain(t *testing.T) {
	w := Workload{Reads: 100, Blocks: []Block{{4096, 1}}}
	c := newChooser(&w, region{8192, 3 * 4096}, 512, 1)
	var got []uint64
	for range 4 {
		_, off, _ := c.choose()
		got = append(got, off)
	}
	if !slices.Equal(got, []uint64{8192, 12288, 16384, 8192}) {
		t.Errorf("requests at %v", got)
	}
}

// The shares of the mixed load are those of the reports: of 98 requests 20 have
// 512 bytes, and so on; half are reads; they come in pairs.
func TestTheMixedLoadHasItsShares(t *testing.T) {
	w := Mixed(1, 1)
	c := newChooser(&w, region{0, 1 << 30}, 512, 7)
	const n = 100000
	sizes, reads, pairs, end := map[int]int{}, 0, 0, uint64(0)
	for i := range n {
		op, off, length := c.choose()
		sizes[length]++
		if op == blk.Read {
			reads++
		}
		if i%2 == 1 && off == end {
			pairs++
		}
		end = off + uint64(length)
	}
	for _, b := range w.Blocks {
		if got, want := float64(sizes[b.Bytes])/n, float64(b.Weight)/98; math.Abs(got-want) > 0.01 {
			t.Errorf("%.3f of the requests have %d bytes, want %.3f", got, b.Bytes, want)
		}
	}
	if got := float64(reads) / n; math.Abs(got-0.5) > 0.01 {
		t.Errorf("%.3f are reads", got)
	}
	if got := float64(pairs) / (n / 2); got < 0.99 {
		t.Errorf("%.3f of the second requests follow the first", got)
	}
}

// The k-th most popular place comes in proportion to k^-1.2.
func TestPopularityFollowsZipf(t *testing.T) {
	const places, draws = 1000, 400000
	s := newScatter(rand.New(rand.NewPCG(1, 2)), 1.2, places)
	count := map[uint64]int{}
	for range draws {
		count[s.draw()]++
	}
	sum := 0.0
	for k := 1; k <= places; k++ {
		sum += math.Pow(float64(k), -1.2)
	}
	for _, k := range []int{1, 2, 3, 10, 100} {
		want := math.Pow(float64(k), -1.2) / sum
		got := float64(count[s.place(uint64(k-1))]) / draws
		if math.Abs(got-want) > 0.1*want+0.0005 {
			t.Errorf("place %d comes with %.5f, want %.5f", k, got, want)
		}
	}
}

func TestEachRankHasAPlaceOfItsOwn(t *testing.T) {
	for _, n := range []uint64{1, 2, 3, 4, 10, 64, 997, 1 << 12, 30030} {
		s := &scatter{n: n, stride: strideOf(n)}
		seen := map[uint64]bool{}
		for rank := range n {
			p := s.place(rank)
			if p >= n || seen[p] {
				t.Fatalf("of %d places, rank %d is at %d, which is taken or none", n, rank, p)
			}
			seen[p] = true
		}
	}
}

func TestKindsOfLoad(t *testing.T) {
	for _, c := range []struct {
		kind   string
		block  int
		zipf   float64
		depths []int
		jobs   int
		names  []string // nil: refused
	}{
		{kind: "randread", jobs: 1, names: []string{"4k-randread-d1", "4k-randread-d4", "4k-randread-d16", "4k-randread-d64"}},
		{kind: "write", block: 1 << 20, depths: []int{8}, jobs: 2, names: []string{"1m-seqwrite-d8"}},
		{kind: "randrw", block: 512, zipf: 1.2, depths: []int{3}, jobs: 64, names: []string{"512-randrw-d3"}},
		{kind: "read", block: 1536, depths: []int{1}, jobs: 1, names: []string{"1536-seqread-d1"}},
		{kind: "mixed", jobs: 1, names: []string{"mixed-d129"}},
		{kind: "mixed", depths: []int{2}, jobs: 1, names: []string{"mixed-d2"}},
		{kind: "trim", jobs: 1},
		{kind: "randread", block: 1000, jobs: 1},
		{kind: "randread", block: 65 << 20, jobs: 1},
		{kind: "randread", depths: []int{0}, jobs: 1},
		{kind: "randread", depths: []int{1, 5000}, jobs: 1},
		{kind: "randread", jobs: 0},
		{kind: "randread", jobs: 65},
		{kind: "randread", zipf: 1, jobs: 1},
		{kind: "randread", zipf: math.NaN(), jobs: 1},
		{kind: "read", zipf: 1.2, jobs: 1},
	} {
		ws, err := Custom(c.kind, c.block, c.zipf, c.depths, c.jobs)
		if c.names == nil {
			if err == nil {
				t.Errorf("%+v is taken: %v", c, ws)
			}
			continue
		}
		var names []string
		for _, w := range ws {
			names = append(names, w.Name)
		}
		if err != nil || !slices.Equal(names, c.names) {
			t.Errorf("%+v gives %v, %v", c, names, err)
		}
	}
	for _, w := range Usual(false, 1) {
		if w.Writes() {
			t.Errorf("%s writes without being asked to", w.Name)
		}
	}
}
