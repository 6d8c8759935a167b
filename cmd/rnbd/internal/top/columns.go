package top

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// column is one of a view.
type column struct {
	name  string // for --sort
	head  string
	group string // stage, above the heads
	min   int    // width
	max   int    // width that it may grow to; 0: as min, and for numbers
	whole bool   // it is not cut: left out if it has no room
	rank  int    // those of high rank are left out first
}

// flexible reports whether the column has texts. Those that are not whole are cut in the
// middle.
func (c *column) flexible() bool { return c.max > 0 }

// hidden is the rank of columns that are there to sort by.
const hidden = 1000

// cell is a text, and the number that rows are sorted by.
type cell struct {
	text  string
	value float64
	known bool // the value
}

func word(s string) cell { return cell{text: clean(s)} }

func count(n uint64) cell { return cell{number(float64(n)), float64(n), true} }

func (r rate) cell(text string) cell { return cell{text, r.value, r.known} }

func took(d time.Duration, known bool) cell {
	if !known {
		return cell{text: none}
	}
	return cell{duration(d), float64(d), true}
}

// row is one object.
type row struct {
	key   string   // for objects that are equal otherwise
	cells []cell   // by column
	alarm []bool   // by column: it is to be seen
	why   []string // what needs attention
}

// grid is a view: all columns that it has for some kinds of daemons, and the rows.
type grid struct {
	columns []column
	rows    []row
}

const long = 1 << 20

// deviceColumns are those before the stages.
var deviceColumns = []column{
	{name: "device", head: "DEVICE", min: 8, max: long},
	{name: "daemon", head: "DAEMON", min: 6, rank: 55},
	{name: "session", head: "SESSION", min: 10, max: long, rank: 90},
	{name: "state", head: "STATE", min: 6, max: 24, rank: 1},
	{name: "iops", head: "IOPS", min: 5, rank: 2},
	{name: "read", head: "RD/s", min: 5, rank: 4},
	{name: "write", head: "WR/s", min: 5, rank: 5},
	{name: "inflight", head: "INFL", min: 4, rank: 8},
	{name: "failed", head: "FAIL", min: 5, rank: 7},
	{name: "hung", head: "HUNG", min: 4, rank: 6},
}

// pathColumns are those of paths.
var pathColumns = []column{
	{name: "path", head: "PATH", min: 16, max: long},
	{name: "daemon", head: "DAEMON", min: 6, rank: 55},
	{name: "state", head: "STATE", min: 12, max: 14, rank: 1},
	{name: "fabric", head: "FABRIC", min: 6, max: 10, rank: 40},
	{name: "iops", head: "IOPS", min: 5, rank: 3},
	{name: "rx", head: "RX/s", min: 5, rank: 4},
	{name: "tx", head: "TX/s", min: 5, rank: 5},
	{name: "inflight", head: "INFL", min: 4, rank: 7},
	{name: "latency", head: "PING", min: 5, rank: 6},
	{name: "reconnects", head: "RECON", min: 5, rank: 8},
	{name: "failovers", head: "FAILO", min: 5, rank: 9},
	{name: "address", head: "ADDRESS", min: 12, max: long, whole: true, rank: 60},
	{name: "error", max: long, rank: hidden}, // it stands below the row
}

// stageColumns are the columns of a stage. p50 is left out before p99.
func stageColumns(stage string) []column {
	rank := map[string]int{"wire": 10, "plugin": 11, "queue": 12, "disk": 13, "frontend": 14}[stage]
	group, width := stage, 5
	switch stage {
	case "frontend":
		group = "front"
	case "plugin": // a letter more than the numbers
		width = 6
	}
	return []column{
		{name: stage + "_p50", head: "p50", group: group, min: 5, rank: rank + 10},
		{name: stage + "_p99", head: "p99", group: group, min: width, rank: rank},
	}
}

// columnsOf are those of a view for some stages.
func columnsOf(view string, stages []string) []column {
	switch view {
	case "devices":
		all := slices.Clone(deviceColumns)
		for _, s := range stages {
			all = append(all, stageColumns(s)...)
		}
		return all
	case "paths":
		return slices.Clone(pathColumns)
	}
	return nil
}

// Columns are the names of the columns that rows of a view can be sorted by.
func Columns(view string) (names []string) {
	for _, c := range columnsOf(view, stages) {
		names = append(names, c.name)
	}
	return names
}

// used are the stages that the daemons of a sample have.
func (s *Sample) used() (out []string) {
	for _, stage := range stages {
		for _, d := range s.Daemons {
			if slices.Contains(stagesOf[d.Kind], stage) {
				out = append(out, stage)
				break
			}
		}
	}
	return out
}

// separateDaemons keeps the column of daemons as long as others of the first ranks, if
// objects of two daemons have one name.
func (g *grid) separateDaemons() {
	seen := map[string]bool{}
	for _, name := range g.texts(0) {
		if seen[name] {
			g.columns[1].rank = 1
			return
		}
		seen[name] = true
	}
}

// without removes a column.
func (g *grid) without(name string) {
	i := slices.IndexFunc(g.columns, func(c column) bool { return c.name == name })
	g.columns = slices.Delete(g.columns, i, i+1)
	for k := range g.rows {
		g.rows[k].cells = slices.Delete(g.rows[k].cells, i, i+1)
		g.rows[k].alarm = slices.Delete(g.rows[k].alarm, i, i+1)
	}
}

func deviceGrid(s *Sample, i *interval) (*grid, totals) {
	used := s.used()
	g, sum := &grid{columns: columnsOf("devices", used)}, totals{}
	called := s.called()
	for k := range s.Devices {
		d := &s.Devices[k]
		r := i.device(d)
		sum.add(d, r)
		inflight := cell{text: none}
		if d.Inflight >= 0 {
			inflight = count(uint64(d.Inflight))
		}
		cells := []cell{
			word(called[k]), word(d.Daemon), word(d.Session), word(d.State), r.iops.cell(r.iops.number()),
			r.read.cell(r.read.bytes()), r.written.cell(r.written.bytes()), inflight, count(d.Failed), count(d.Hung),
		}
		for _, stage := range used {
			q := r.stages[stage]
			cells = append(cells, took(q.p50, q.known), took(q.p99, q.known))
		}
		alarm := make([]bool, len(cells))
		alarm[8], alarm[9] = r.failing, d.Hung > 0
		g.rows = append(g.rows, row{d.key(), cells, alarm, s.why(d)})
	}
	return g, sum
}

// called returns the names of the devices: where two of a daemon have one name, their ids.
func (s *Sample) called() []string {
	count := map[[2]string]int{}
	for k := range s.Devices {
		count[[2]string{s.Devices[k].Daemon, s.Devices[k].Name}]++
	}
	out := make([]string, len(s.Devices))
	for k := range s.Devices {
		d := &s.Devices[k]
		if out[k] = d.Name; count[[2]string{d.Daemon, d.Name}] > 1 {
			out[k] = d.ID
		}
	}
	return out
}

// why returns what of a device needs attention.
func (s *Sample) why(d *Device) (out []string) {
	for _, daemon := range s.Daemons {
		for _, c := range daemon.Conditions {
			if daemon.Kind == d.Daemon && c.Subject == d.ID {
				out = append(out, clean(c.Kind+": "+c.Text))
			}
		}
	}
	return out
}

func pathGrid(s *Sample, i *interval) *grid {
	g := &grid{columns: columnsOf("paths", nil)}
	for k := range s.Paths {
		p := &s.Paths[k]
		did := i.path(p)
		cells := []cell{
			word(fmt.Sprintf("%s:%d", p.Session, p.ID)), word(p.Daemon), word(p.State), word(p.Fabric), did.iops.cell(did.iops.number()),
			did.received.cell(did.received.bytes()), did.sent.cell(did.sent.bytes()), count(p.Inflight), took(p.Latency, p.Latency > 0),
			count(p.Reconnects), count(p.Failovers), word(p.Address), word(p.LastError),
		}
		r := row{key: p.key(), cells: cells, alarm: make([]bool, len(cells))}
		if p.State != "connected" && p.LastError != "" {
			r.why = []string{clean(p.LastError)}
		}
		g.rows = append(g.rows, r)
	}
	return g
}

// filter keeps the rows with a text that contains the words, without regard to case.
func (g *grid) filter(what string) {
	if what == "" {
		return
	}
	what = strings.ToLower(what)
	g.rows = slices.DeleteFunc(g.rows, func(r row) bool {
		for i, c := range r.cells {
			if (g.columns[i].flexible() || g.columns[i].name == "daemon") && strings.Contains(strings.ToLower(c.text), what) {
				return false
			}
		}
		return true
	})
}

// sort orders the rows by a column: texts from a to z, numbers from the largest on.
// Unknown values come last. A column that is not there leaves the order by key.
func (g *grid) sort(by order) {
	at := slices.IndexFunc(g.columns, func(c column) bool { return c.name == by.column })
	slices.SortStableFunc(g.rows, func(a, b row) int {
		n := 0
		if at >= 0 {
			n = compare(a.cells[at], b.cells[at], by.reversed)
		}
		if n == 0 {
			n = strings.Compare(a.key, b.key)
		}
		return n
	})
}

func compare(a, b cell, reversed bool) (n int) {
	switch {
	case a.known && !b.known:
		return -1
	case b.known && !a.known:
		return 1
	case a.value > b.value:
		n = -1
	case a.value < b.value:
		n = 1
	case !a.known:
		n = strings.Compare(a.text, b.text)
	}
	if reversed {
		return -n
	}
	return n
}
