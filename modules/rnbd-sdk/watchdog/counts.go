package watchdog

import (
	"golang.org/x/sys/unix"
)

// Count is the number of failed requests of a stage and an errno.
type Count struct {
	Stage string
	Errno string // its name, such as EIO, or OtherErrno
	N     uint64
}

// Counts are sums of Failures.
type Counts [stages][len(errnos) + 1]uint64

// Add adds the counts of f.
func (c *Counts) Add(f *Failures) {
	t := f.counts.Load()
	if t == nil {
		return
	}
	for s := range t {
		for i := range t[s] {
			c[s][i] += t[s][i].Load()
		}
	}
}

// List returns the counts that are not 0, by stage and errno.
func (c *Counts) List() (out []Count) {
	for s := range c {
		for i, n := range c[s] {
			if n == 0 {
				continue
			}
			name := OtherErrno
			if i > 0 {
				name = unix.ErrnoName(unix.Errno(errnos[i-1]))
			}
			out = append(out, Count{Stage(s).String(), name, n})
		}
	}
	return out
}

// Sum returns the number of failed requests.
func (c *Counts) Sum() (n uint64) {
	for s := range c {
		for _, k := range c[s] {
			n += k
		}
	}
	return n
}
