package plot

import (
	"bytes"
	"encoding/xml"
	"flag"
	"fmt"
	"io"
	"os"
	"regexp"
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
				{Name: "random reads, 4 KiB", Points: []Point{{1, 6.8, 6.1, 7}, {4, 17.8, 16, 18}, {16, 33.6, 20, 40}, {64, 58.9, 50, 71}}},
				{Name: "random writes, 4 KiB", Color: 1, Points: []Point{{X: 1, Y: 3.6}, {X: 4, Y: 11}, {X: 16, Y: 25}, {X: 64, Y: 31}}},
				{Name: "sequential reads, 1 MiB", Color: 2, Points: []Point{{X: 8, Y: 0.56}}},
			}},
			{Y: "latency, µs", Log: true, Format: func(v float64) string { return fmt.Sprintf("%g", v) }, Lines: []Line{
				{Name: "random reads, 4 KiB", Points: []Point{{X: 1, Y: 131}, {X: 4, Y: 131}, {X: 16, Y: 393}, {X: 64, Y: 786}}},
				{Name: "random reads, 4 KiB, 99 %", Dashed: true, Points: []Point{{X: 1, Y: 458}, {X: 4, Y: 2100}, {X: 16, Y: 3150}, {X: 64, Y: 5240}}},
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

// parse fails if svg is not well-formed.
func parse(t *testing.T, svg []byte) {
	t.Helper()
	for dec := xml.NewDecoder(bytes.NewReader(svg)); ; {
		_, err := dec.Token()
		if err == io.EOF {
			return
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, svg)
		}
	}
}

func TestEveryPictureIsWellFormed(t *testing.T) {
	one := Figure{Panels: []Panel{{}}}
	one.Panels[0].Format = func(v float64) string { return fmt.Sprint(v) }
	single := figure()
	single.Panels[0].Lines = []Line{{Name: `<&">`, Color: 99, Points: []Point{{X: 8, Y: 5}}}}
	single.Panels[1].Lines = []Line{{Name: "x", Points: []Point{{X: 8, Y: 5}}}}
	for name, f := range map[string]Figure{"all": figure(), "no lines": one, "one point": single, "empty": {}} {
		t.Run(name, func(t *testing.T) {
			svg := f.SVG()
			points, bars := 0, 0
			for _, p := range f.Panels {
				if !strings.Contains(string(svg), p.Y+", "+p.axis().scale()) {
					t.Errorf("the axis of %q does not say its scale", p.Y)
				}
				for _, l := range p.Lines {
					points += len(l.Points)
					for _, pt := range l.Points {
						if pt.High > 0 {
							bars++
						}
					}
				}
			}
			parse(t, svg)
			if n := bytes.Count(svg, []byte(`<path class="dot`)); n != points+len(f.legend()) {
				t.Errorf("%d shapes for %d points and %d entries", n, points, len(f.legend()))
			}
			if n := bytes.Count(svg, []byte(`<path class="bar`)); n != bars {
				t.Errorf("%d bars for %d points with a spread", n, bars)
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
		p := Panel{Log: c.log, Lines: []Line{{Points: []Point{{X: 1, Y: c.low}, {X: 2, Y: c.high}}}}}
		a := p.axis()
		if !slices.Equal(a.marks, c.marks) {
			t.Errorf("%v to %v has marks %v, want %v", c.low, c.high, a.marks, c.marks)
		}
		if l, h := a.share(c.low), a.share(c.high); l < 0 || h > 1 || l > h {
			t.Errorf("%v to %v is drawn from %v to %v", c.low, c.high, l, h)
		}
	}
}

// Lines of two colours differ in colour, and neighbours in shape and place, too.
func TestLinesStayApart(t *testing.T) {
	f := Figure{Panels: []Panel{{Y: "x", Format: func(v float64) string { return fmt.Sprint(v) }}}}
	for i := range Colors {
		f.Panels[0].Lines = append(f.Panels[0].Lines, Line{Name: fmt.Sprint("line ", i), Color: i, Points: []Point{{X: 1, Y: 5}, {X: 2, Y: 5}}})
	}
	svg := string(f.SVG())
	places := map[string]bool{}
	for _, m := range regexp.MustCompile(`<polyline class="line c\d" points="([0-9.]+,[0-9.]+) [0-9.]+,[0-9.]+"/>`).FindAllStringSubmatch(svg, -1) {
		places[m[1]] = true
	}
	if len(places) != 2*Colors { // with those of the legend
		t.Errorf("%d places for %d lines of the same values and %d entries", len(places), Colors, Colors)
	}
	for _, th := range []theme{light, dark} {
		if n := len(slices.Compact(slices.Sorted(slices.Values(th.lines[:])))); n != Colors {
			t.Errorf("%d colours, want %d", n, Colors)
		}
	}
	for i := range Colors - 1 {
		if (Line{Color: i}).shape(0, 0) == (Line{Color: i + 1}).shape(0, 0) {
			t.Errorf("lines %d and %d have the same shape", i, i+1)
		}
	}
}
