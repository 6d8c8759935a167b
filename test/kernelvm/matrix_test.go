package kernelvm

import (
	"errors"
	"strings"
	"syscall"
	"testing"
)

// cells are all pairs of a column.
func (c column) cells() (all []cell) {
	for _, pair := range [][2]side{{ours, kernel}, {kernel, ours}, {ours, ours}} {
		for _, invalidate := range []bool{true, false} {
			all = append(all, cell{column: c, from: pair[0], to: pair[1], invalidate: invalidate})
		}
	}
	return all
}

// Every client understands every server: maps in each mode, reads and writes in
// every way with the data compared at both ends, gets one error, and unmaps.
func TestMatrix(t *testing.T) {
	for _, col := range columns {
		for _, c := range col.cells() {
			t.Run(c.String(), func(t *testing.T) { wholeLife(t, c.set(t)) })
		}
	}
}

// fill writes and reads all of a disk, compares it with the server's and returns the sum.
func fill(t *testing.T, b *bench, d disk) string {
	t.Helper()
	var sum string
	if err := b.repeat(t, d, func() (err error) {
		sum, err = b.c.Exercise(t.Context(), d, "--seed", "7")
		return err
	}); err != nil {
		t.Fatalf("exercise: %v", err)
	}
	sum = strings.TrimSpace(sum)
	if got := b.s.Sum(t); got != sum {
		t.Errorf("the disk of the server has the sum %s, the client %s", got, sum)
	}
	return sum
}

func wholeLife(t *testing.T, b *bench) {
	d := b.mapDisk(t, "rw", fast)
	sum := fill(t, b, d)
	missing := b.mapping("rw", fast)
	missing.name = "nowhere"
	if _, err := b.c.Map(t.Context(), missing); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("map of what is not there: %v, want ENOENT", err)
	}
	b.unmap(t, d)

	d = b.mapDisk(t, "ro", fast)
	var got string
	err := b.repeat(t, d, func() (err error) {
		got, err = b.c.Exercise(t.Context(), d, "--refused")
		return err
	})
	if err != nil || strings.TrimSpace(got) != sum {
		t.Errorf("read-only: sum %s, error %v; want %s", got, err, sum)
	}
	b.unmap(t, d)

	d = b.mapDisk(t, "migration", fast)
	if err := b.repeat(t, d, func() error {
		_, err := b.c.Exercise(t.Context(), d, "--for", "1s")
		return err
	}); err != nil {
		t.Errorf("migration: %v", err)
	}
	b.unmap(t, d)
}
