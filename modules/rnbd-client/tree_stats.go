package client

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ctltree"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

const resetUsage = "echo %s to reset all statistics"

// counterFile returns a file with the counters of a path. Writing digitToReset
// resets them.
func counterFile(s *session, id int, digitToReset string, kind rtrs.StatKind, show func(*rtrs.PathDetails) string) *ctltree.File {
	f := digitFile(digitToReset, "", func(context.Context) error { return s.transport.ResetStats(id, kind) })
	f.Show = func() (string, error) {
		d, err := s.transport.PathDetails(id)
		if err != nil {
			return "", err
		}
		return show(&d) + "\n", nil
	}
	return f
}

func resetAll(s *session, id int, digitToReset string) *ctltree.File {
	return digitFile(digitToReset, fmt.Sprintf(resetUsage, digitToReset), func(context.Context) error {
		return s.transport.ResetStats(id, rtrs.StatAll)
	})
}

func pathStats(s *session, id int) ctltree.Fixed {
	file := func(kind rtrs.StatKind, show func(*rtrs.PathDetails) string) *ctltree.File {
		return counterFile(s, id, "1", kind, show)
	}
	return ctltree.Fixed{
		"cpu_migration_from": file(rtrs.StatCPUMigration, func(d *rtrs.PathDetails) string { return perCPU(d.CPUMigrationFrom) }),
		"cpu_migration_to":   file(rtrs.StatCPUMigration, func(d *rtrs.PathDetails) string { return perCPU(d.CPUMigrationTo) }),
		"reconnects":         file(rtrs.StatReconnects, showReconnects),
		"rdma":               file(rtrs.StatRDMA, showRDMA),
		"reset_all":          resetAll(s, id, "1"),
	}
}

// olderPathStats returns the files of earlier kernels, with their ways to
// reset them.
func olderPathStats(s *session, id int) ctltree.Fixed {
	file := func(kind rtrs.StatKind, show func(*rtrs.PathDetails) string) *ctltree.File {
		return counterFile(s, id, "0", kind, show)
	}
	return ctltree.Fixed{
		"cpu_migration": file(rtrs.StatCPUMigration, func(d *rtrs.PathDetails) string {
			return "from: " + strings.TrimSpace(perCPU(d.CPUMigrationFrom)) + "\nto: " + strings.TrimSpace(perCPU(d.CPUMigrationTo))
		}),
		"reconnects":    file(rtrs.StatReconnects, showReconnects),
		"rdma":          file(rtrs.StatRDMA, showRDMA),
		"sg_entries":    file(rtrs.StatSGEntries, showSGEntries),
		"rdma_lat":      file(rtrs.StatRDMALat, showLatency),
		"wc_completion": file(rtrs.StatWCCompletion, showCompletions),
		"reset_all":     resetAll(s, id, "0"),
	}
}

// perCPU returns one number for each possible CPU, each followed by a blank.
func perCPU(counts []uint64) string {
	var b strings.Builder
	for cpu := range max(rtrs.PossibleCPUs(), len(counts)) {
		n := uint64(0)
		if cpu < len(counts) {
			n = counts[cpu]
		}
		fmt.Fprintf(&b, "%d ", n)
	}
	return b.String()
}

func showReconnects(d *rtrs.PathDetails) string {
	return fmt.Sprintf("%d %d", d.Reconnects, d.ReconnectsFailed)
}

func showRDMA(d *rtrs.PathDetails) string {
	return fmt.Sprintf("%d %d %d %d %d %d", d.ReadCount, d.ReadBytes, d.WriteCount, d.WriteBytes, d.Inflight, d.Failovers)
}

// showSGEntries returns a table with a column per pump and a row per length of
// the list.
func showSGEntries(d *rtrs.PathDetails) string {
	var b strings.Builder
	b.WriteString("entries:")
	for pump := range d.SGEntries {
		fmt.Fprintf(&b, " pump%d", pump)
	}
	for length := range 2 {
		fmt.Fprintf(&b, "\n%d:", length)
		for _, counts := range d.SGEntries {
			fmt.Fprintf(&b, " %d", counts[length])
		}
	}
	return b.String()
}

// showLatency returns a line per limit: reads and writes below it and not
// below the limit before.
func showLatency(d *rtrs.PathDetails) string {
	var b strings.Builder
	last := len(d.ReadLatency.Counts) - 1
	for i := range last {
		fmt.Fprintf(&b, "%d ms: %d %d\n", 1<<i, d.ReadLatency.Counts[i], d.WriteLatency.Counts[i])
	}
	fmt.Fprintf(&b, ">= %d ms: %d %d\n", 1<<(last-1), d.ReadLatency.Counts[last], d.WriteLatency.Counts[last])
	fmt.Fprintf(&b, "maximum ms: %d %d", roundUpMillis(d.ReadLatency.Max), roundUpMillis(d.WriteLatency.Max))
	return b.String()
}

// roundUpMillis rounds up, so that only zero becomes zero.
func roundUpMillis(d time.Duration) int64 {
	return int64((d + time.Millisecond - 1) / time.Millisecond)
}

// showCompletions returns the largest and the average number of completions
// found at once.
func showCompletions(d *rtrs.PathDetails) string {
	average := uint64(0)
	if calls := d.Completions.Calls(); calls > 0 {
		average = d.Completions.Total() / calls
	}
	return fmt.Sprintf("%d %d", d.Completions.Max(), average)
}
