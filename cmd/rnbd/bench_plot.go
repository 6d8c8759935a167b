package main

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/plot"
)

// draw writes the curves over depth to a file.
func (r *benchRun) draw(path string) error {
	if err := os.WriteFile(path, r.figure().SVG(), 0o644); err != nil {
		return fmt.Errorf("--plot: %w", err)
	}
	return nil
}

// figure has requests per second, and latency as median and 99 %.
func (r *benchRun) figure() plot.Figure {
	rates := plot.Panel{Y: "requests per second", Format: metric}
	times := plot.Panel{Y: "latency", Log: true, Format: func(v float64) string { return time.Duration(v).String() }}
	color := map[string]int{}
	for _, row := range r.rows {
		name := row.Kind()
		if row.Reads > 0 && row.Writes() {
			name += " " + row.op
		}
		if _, known := color[name]; !known {
			color[name] = len(color)
		}
		x := float64(row.Depth)
		c := color[name]
		addPoint(&rates, plot.Line{Name: name, Color: c}, x, float64(row.latency.Count())/row.elapsed.Seconds())
		addPoint(&times, plot.Line{Name: name, Color: c}, x, float64(row.latency.Quantile(0.5)))
		addPoint(&times, plot.Line{Name: name + ", 99 %", Color: c, Dashed: true}, x, float64(row.latency.Quantile(0.99)))
	}
	return plot.Figure{Title: r.title(), Notes: r.notes(), X: "requests in flight, per job", Panels: []plot.Panel{rates, times}}
}

// addPoint gives the line of that name a point, in the order of workloads.
func addPoint(p *plot.Panel, l plot.Line, x, y float64) {
	for i := range p.Lines {
		if p.Lines[i].Name == l.Name {
			p.Lines[i].Points = append(p.Lines[i].Points, plot.Point{X: x, Y: y})
			return
		}
	}
	l.Points = []plot.Point{{X: x, Y: y}}
	p.Lines = append(p.Lines, l)
}

// title names the devices and the way to them.
func (r *benchRun) title() string {
	var names []string
	for _, t := range r.targets {
		names = append(names, t.Name)
	}
	const most = 3
	if len(names) > most {
		names = append(names[:most], fmt.Sprintf("and %d more", len(names)-most))
	}
	t := r.targets[0]
	way := t.access
	for _, s := range append([]string{t.plugin}, t.fabric...) {
		if s != "" {
			way += ", " + s
		}
	}
	return strings.Join(names, ", ") + ": " + way
}

// notes returns the conditions of the measurement.
func (r *benchRun) notes() []string {
	return []string{
		fmt.Sprintf("%s, %d cores, %s", cpuModel(), runtime.NumCPU(), kernelVersion()),
		fmt.Sprintf("load average %.2f before, %.2f after, rnbd %s, %s", r.loadBefore, r.loadAfter, versionString(), r.start.UTC().Format(time.DateOnly)),
	}
}

// metric is a number with the prefix that suits it.
func metric(v float64) string {
	for _, unit := range []struct {
		size float64
		name string
	}{{1e9, "G"}, {1e6, "M"}, {1e3, "k"}} {
		if v >= unit.size {
			return fmt.Sprintf("%.3g%s", v/unit.size, unit.name)
		}
	}
	return fmt.Sprintf("%.3g", v)
}
