// Package doctor checks a host for the needs of rnbd. Each finding has a
// remedy.
package doctor

// Outcome of a check.
type Outcome string

const (
	OK      Outcome = "ok"
	Note    Outcome = "note"    // optional, or could be faster
	Warning Outcome = "warning" // works, and is likely to go wrong or is slow
	Problem Outcome = "problem" // does not work
)

// Finding is the result of one check.
type Finding struct {
	Check   string // subject of the check, a word or two
	Subject string // one of several: a server, a daemon, a device
	Outcome Outcome
	Text    string // text of the result
	Do      string // empty only if nothing is to be done
}

// Worst returns the worst outcome of all findings.
func Worst(all []Finding) Outcome {
	rank := map[Outcome]int{OK: 0, Note: 1, Warning: 2, Problem: 3}
	worst := OK
	for _, f := range all {
		if rank[f.Outcome] > rank[worst] {
			worst = f.Outcome
		}
	}
	return worst
}
