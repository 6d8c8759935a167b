package selfstats

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
)

// PayloadCopied is the metric of a process that copies payload on the data
// path: bytes, since its start.
const PayloadCopied = "/rnbd/payload/copied:bytes"

var counts struct {
	mu   sync.Mutex
	read map[string]func() uint64
}

// Count adds a metric of the process's own to the reports. read is called by
// any goroutine; a later Count of the same name takes its place.
func Count(name string, read func() uint64) {
	counts.mu.Lock()
	defer counts.mu.Unlock()
	if counts.read == nil {
		counts.read = map[string]func() uint64{}
	}
	counts.read[name] = read
}

func writeCounts(w io.Writer) {
	counts.mu.Lock()
	defer counts.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(counts.read)) {
		fmt.Fprintf(w, "%s %d\n", name, counts.read[name]())
	}
}
