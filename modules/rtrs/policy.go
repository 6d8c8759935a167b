package rtrs

import (
	"fmt"
	"strings"
	"syscall"
)

// Policy chooses among the connected paths of a session, for each request.
type Policy uint8

const (
	// MinInflight takes the path with the fewest requests in flight, the
	// first in list order if there are several. The default.
	MinInflight Policy = iota
	// RoundRobin takes the path after the last one used by the same queue.
	RoundRobin
	// MinLatency takes the path with the shortest last heartbeat round trip.
	MinLatency
)

// policyNames are the names, abbreviations and numbers of the Linux kernel.
var policyNames = [...]struct {
	name, short string
	number      int
}{
	MinInflight: {"min-inflight", "mi", 1},
	RoundRobin:  {"round-robin", "rr", 0},
	MinLatency:  {"min-latency", "ml", 2},
}

// String returns the long name.
func (p Policy) String() string {
	if int(p) >= len(policyNames) {
		return fmt.Sprintf("policy(%d)", uint8(p))
	}
	return policyNames[p].name
}

// Short returns the abbreviation of two letters.
func (p Policy) Short() string { return policyNames[p].short }

// Number returns the number that the kernel uses in mpath_policy.
func (p Policy) Number() int { return policyNames[p].number }

// ParsePolicy accepts the values of the kernel's mpath_policy, in any case: a
// number, an abbreviation, or text that starts with a name.
func ParsePolicy(s string) (Policy, error) {
	word := strings.ToLower(strings.TrimSpace(s))
	for p, n := range policyNames {
		if word == n.short || word == fmt.Sprint(n.number) || strings.HasPrefix(word, n.name) {
			return Policy(p), nil
		}
	}
	return 0, fmt.Errorf("path policy %q: want round-robin, min-inflight or min-latency: %w", s, syscall.EINVAL)
}

// linkSet is a set of indices into a list of links.
type linkSet [2]uint64

func (s *linkSet) hasLink(i int) bool { return s[i>>6]&(1<<(i&63)) != 0 }
func (s *linkSet) addLink(i int)      { s[i>>6] |= 1 << (i & 63) }

// pickLink returns the index of the link that the policy prefers among those not
// in skip, or -1. last is the path that this queue used last.
func (p Policy) pickLink(live []*link, skip *linkSet, last int) int {
	switch p {
	case RoundRobin:
		return pickNext(live, skip, last)
	case MinLatency:
		return pickLeast(live, skip, (*link).latencyCost)
	}
	return pickLeast(live, skip, (*link).inflightCount)
}

func pickNext(live []*link, skip *linkSet, last int) int {
	first := -1
	for i, l := range live {
		if skip.hasLink(i) {
			continue
		}
		if l.path.id > last {
			return i
		}
		if first < 0 {
			first = i
		}
	}
	return first
}

func pickLeast(live []*link, skip *linkSet, cost func(*link) int64) int {
	best, least := -1, int64(0)
	for i, l := range live {
		if skip.hasLink(i) {
			continue
		}
		if c := cost(l); best < 0 || c < least {
			best, least = i, c
		}
	}
	return best
}
