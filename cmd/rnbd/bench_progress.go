package main

import (
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"
)

// progress is a line on a terminal that shows the progress of the measurement.
// Without a terminal nothing is printed.
type progress struct {
	w     io.Writer // nil: no terminal
	runs  int
	each  time.Duration
	shown int // characters of the line
}

func newProgress(w io.Writer, runs int, each time.Duration) *progress {
	p := &progress{runs: runs, each: each}
	if isTerminal(w) {
		p.w = w
	}
	return p
}

// of returns a function that shows the progress of run i with that name.
func (p *progress) of(i int, name string) func(uint64, time.Duration) {
	if p.w == nil {
		return nil
	}
	return func(requests uint64, elapsed time.Duration) {
		share := (float64(i) + min(elapsed.Seconds()/p.each.Seconds(), 1)) / float64(p.runs)
		rate := float64(requests) / elapsed.Seconds()
		p.say(fmt.Sprintf("%s %3.0f %%  %s  %.1f kIOPS", bar(share), share*100, name, rate/1e3))
	}
}

const barWidth = 30

// bar is a picture of a share, in eighths of a character.
func bar(share float64) string {
	eighths := int(share * barWidth * 8)
	full := strings.Repeat("█", eighths/8)
	if part := eighths % 8; part > 0 {
		full += string([]rune("▏▎▍▌▋▊▉")[part-1])
	}
	return "▕" + full + strings.Repeat(" ", barWidth-utf8.RuneCountInString(full)) + "▏"
}

// say replaces the text of the line.
func (p *progress) say(line string) {
	if p.w == nil {
		return
	}
	n := utf8.RuneCountInString(line)
	fmt.Fprint(p.w, "\r"+line+strings.Repeat(" ", max(0, p.shown-n)))
	p.shown = n
}

// clear takes the line away.
func (p *progress) clear() {
	if p.shown > 0 {
		p.say("")
		fmt.Fprint(p.w, "\r")
	}
}
