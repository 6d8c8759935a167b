package plot

import (
	"bytes"
	"encoding/xml"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite testdata/golden.svg")

func figure() Figure {
	return Figure{
		Title: "rnbd0", Notes: []string{"CPU <model>, 2 cores & Linux 6.18", "load 0.1"}, X: "requests in flight",
		Panels: []Panel{
			{Y: "kIOPS", Format: func(v float64) string { return fmt.Sprintf("%g", v) }, Lines: []Line{
				{Name: "random reads, 4 KiB", Points: []Point{{1, 6.8}, {4, 17.8}, {16, 33.6}, {64, 58.9}}},
				{Name: "random writes, 4 KiB", Color: 1, Points: []Point{{1, 3.6}, {4, 11}, {16, 25}, {64, 31}}},
				{Name: "sequential reads, 1 MiB", Color: 2, Points: []Point{{8, 0.56}}},
			}},
			{Y: "latency, µs", Log: true, Format: func(v float64) string { return fmt.Sprintf("%g", v) }, Lines: []Line{
				{Name: "random reads, 4 KiB", Points: []Point{{1, 131}, {4, 131}, {16, 393}, {64, 786}}},
				{Name: "random reads, 4 KiB, 99 %", Dashed: true, Points: []Point{{1, 458}, {4, 2100}, {16, 3150}, {64, 5240}}},
			}},
		},
	}
}

func TestThePictureIsTheGoldenOne(t *testing.T) {
	const golden = "testdata/golden.svg"
	got := figure().SVG()
	if *update {
		if err := os.WriteFile(golden, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("the picture differs from %s: look at it, then go test -update", golden)
	}
}

// parse returns the number of elements of each name, or fails.
func parse(t *testing.T, svg []byte) map[string]int {
	t.Helper()
	n := map[string]int{}
	for dec := xml.NewDecoder(bytes.NewReader(svg)); ; {
		tok, err := dec.Token()
		if err == io.EOF {
			return n
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, svg)
		}
		if e, ok := tok.(xml.StartElement); ok {
			n[e.Name.Local]++
		}
	}
}

func TestEveryPictureIsWellFormed(t *testing.T) {
	one := Figure{Panels: []Panel{{}}}
	one.Panels[0].Format = func(v float64) string { return fmt.Sprint(v) }
	single := figure()
	single.Panels[0].Lines = []Line{{Name: `<&">`, Color: 99, Points: []Point{{8, 5}}}}
	single.Panels[1].Lines = []Line{{Name: "x", Points: []Point{{8, 5}}}}
	for name, f := range map[string]Figure{"all": figure(), "no lines": one, "one point": single, "empty": {}} {
		t.Run(name, func(t *testing.T) {
			svg := f.SVG()
			points := 0
			for _, p := range f.Panels {
				for _, l := range p.Lines {
					points += len(l.Points)
				}
			}
			if n := parse(t, svg); n["circle"] != points+len(f.legend()) {
				t.Errorf("%d circles for %d points and %d entries", n["circle"], points, len(f.legend()))
			}
			if strings.Contains(string(svg), "NaN") || strings.Contains(string(svg), "Inf") {
				t.Errorf("a place is no number:\n%s", svg)
			}
		})
	}
}

func TestAxesHoldTheirValuesBetweenRoundMarks(t *testing.T) {
	for _, c := range []struct {
		low, high float64
		log       bool
		marks     []float64
	}{
		{0, 58.9, false, []float64{0, 20, 40, 60}},
		{0, 100, false, []float64{0, 20, 40, 60, 80, 100}},
		{0, 0.56, false, []float64{0, 0.2, 0.4, 0.6000000000000001}},
		{131, 786, true, []float64{100, 200, 500, 1000}},
		{131, 52400, true, []float64{100, 1000, 10000, 100000}},
		{5, 5, true, []float64{5, 10}},
		{1, 1, true, []float64{1, 2}},
	} {
		p := Panel{Log: c.log, Lines: []Line{{Points: []Point{{1, c.low}, {2, c.high}}}}}
		a := p.axis()
		if !slices.Equal(a.marks, c.marks) {
			t.Errorf("%v to %v has marks %v, want %v", c.low, c.high, a.marks, c.marks)
		}
		if l, h := a.share(c.low), a.share(c.high); l < 0 || h > 1 || l > h {
			t.Errorf("%v to %v is drawn from %v to %v", c.low, c.high, l, h)
		}
	}
}
