package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// write prints what one load has recorded.
func write(out io.Writer, l load, text []byte, threads map[int]string) error {
	r, err := newRecording(text, threads)
	if err != nil {
		return err
	}
	if l.large() {
		return r.writeTransfers(out)
	}
	return r.writeRequests(out)
}

// writeRequests prints the mean of the requests around the median, one line for each
// hand-over.
func (r *recording) writeRequests(out io.Writer) error {
	found := r.requests()
	around, err := middle(found)
	if err != nil {
		return err
	}
	var rows []handOver
	var woken, switches []float64
	for _, marks := range around {
		for i, h := range r.handOvers(marks) {
			if i == len(rows) {
				rows, woken, switches = append(rows, handOver{from: h.from, to: h.to}), append(woken, 0), append(switches, 0)
			}
			for s, t := range h.times {
				rows[i].times[s] += t / float64(len(around))
			}
			switches[i] += float64(h.switches) / float64(len(around))
			if h.woken {
				woken[i] += 100 / float64(len(around))
			}
		}
	}
	fmt.Fprintf(out, "%d requests, the mean of the %d around the median, microseconds:\n\n", len(found), len(around))
	fmt.Fprintln(out, "| hand-over | work | wake-up | waiting for a core |"+r.ifYields(" scheduler |")+" sum | switches | woken |\n|---|---|---|---|"+r.ifYields("---|")+"---|---|---|")
	sum := handOver{}
	for i, h := range rows {
		r.writeRow(out, h.from+" → "+h.to, &h, fmt.Sprintf("%.1f | %.0f %%", switches[i], woken[i]))
		for s, t := range h.times {
			sum.times[s] += t
		}
	}
	r.writeRow(out, "**all**", &sum, " | ")
	fmt.Fprintln(out)
	return nil
}

// ifYields returns a column that is known by the calls of sched_yield only.
func (r *recording) ifYields(column string) string {
	if r.yields {
		return column
	}
	return ""
}

func (r *recording) writeRow(out io.Writer, name string, h *handOver, more string) {
	us := func(s state) float64 { return h.times[s] / 1e3 }
	fmt.Fprintf(out, "| %s | %.1f | %.1f | %.1f |%s %.1f | %s |\n", name, us(working), us(wakeUp)+us(asleep), us(noCore),
		r.ifYields(fmt.Sprintf(" %.1f |", us(scheduler))), h.sum()/1e3, more)
}

// writeTransfers prints the mean of the transfers around the median, one line for each
// process.
func (r *recording) writeTransfers(out io.Writer) error {
	found := r.transfers()
	slices.SortFunc(found, func(a, b transfer) int { return int(a.to - a.from - (b.to - b.from)) })
	if len(found) < 5 {
		return fmt.Errorf("%d whole transfers were recorded, at least 5 are needed: record longer (-window)", len(found))
	}
	around := found[len(found)*2/5 : max(len(found)*3/5, len(found)*2/5+1)]
	n := float64(len(around))
	mean, length := map[string]*share{}, 0.
	for _, t := range around {
		length += float64(t.to-t.from) / n / 1e3
		for role, s := range r.shares(t) {
			m := shareOf(mean, role)
			m.first, m.last, m.woken = m.first+s.first/n, m.last+s.last/n, m.woken+s.woken/n
			for i := range s.times {
				m.times[i] += s.times[i] / n
			}
			for name, k := range s.calls {
				m.calls[name] += k / n
			}
		}
	}
	fmt.Fprintf(out, "%d transfers, the mean of the %d around the median, of %.0f us; microseconds, and numbers for one transfer:\n\n", len(found), len(around), length)
	fmt.Fprintln(out, "| process | first bytes at | last bytes at | work | wake-up | waiting for a core | scheduler | asleep | woken | system calls |\n|---|---|---|---|---|---|---|---|---|---|")
	for _, role := range []string{roleApp, roleFrontend, roleClient, roleServer, rolePlugin} {
		s := shareOf(mean, role)
		fmt.Fprintf(out, "| %s | %.0f | %.0f | %.0f | %.0f | %.0f | %.0f | %.0f | %.1f | %s |\n", role, s.first/1e3, s.last/1e3,
			s.times[working]/1e3, s.times[wakeUp]/1e3, s.times[noCore]/1e3, s.times[scheduler]/1e3, s.times[asleep]/1e3, s.woken, numbersOf(s.calls))
	}
	fmt.Fprintln(out)
	return nil
}

// numbersOf lists calls, the most frequent first.
func numbersOf(calls map[string]float64) string {
	names := slices.SortedFunc(maps.Keys(calls), func(a, b string) int {
		if calls[a] != calls[b] {
			return int(1e3 * (calls[b] - calls[a]))
		}
		return strings.Compare(a, b)
	})
	var parts []string
	for _, name := range names {
		if calls[name] >= 0.05 {
			parts = append(parts, fmt.Sprintf("%s %.1f", name, calls[name]))
		}
	}
	return strings.Join(parts, ", ")
}
