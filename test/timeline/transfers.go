package main

// transfer is a large request: its pieces are under way at once, so that it has no single
// chain of hand-overs. Its processes are counted instead.
type transfer struct {
	from, to int64
}

// transfers finds them by the application: it sends after it has received.
func (r *recording) transfers() (all []transfer) {
	begun := map[int]int64{}
	received, start := false, int64(0)
	for i := range r.events {
		e := &r.events[i]
		switch {
		case e.kind == enterCall:
			begun[e.tid] = e.at
		case r.threads[e.tid] != roleApp:
		case e.moves(receives):
			received = true
		case e.moves(sends) && received && begun[e.tid] > 0:
			if start > 0 {
				all = append(all, transfer{start, begun[e.tid]})
			}
			start, received = begun[e.tid], false
		}
	}
	return all
}

// share is what one process does for a transfer.
type share struct {
	role        string
	first, last float64 // when it moves its first and last bytes, ns from the beginning
	times       times   // of the thread that moves them
	woken       float64 // times
	calls       map[string]float64
}

// shares are those of all processes.
func (r *recording) shares(t transfer) map[string]*share {
	all := map[string]*share{}
	pumps := map[string]int{rolePlugin: r.plugin}
	for i := range r.events {
		e := &r.events[i]
		if e.at < t.from || e.at >= t.to {
			continue
		}
		if role := r.threads[e.woken]; e.kind == waking && role != "" {
			shareOf(all, role).woken++
		}
		role := r.threads[e.tid]
		if e.kind != exitCall || role == "" {
			continue
		}
		s := shareOf(all, role)
		name := known[e.call].name
		if name == "" {
			name = "others"
		}
		s.calls[name]++
		if e.moves(sends) || e.moves(receives) {
			pumps[role] = e.tid
			if s.last = float64(e.at - t.from); s.first == 0 {
				s.first = s.last
			}
		}
	}
	for role, tid := range pumps {
		shareOf(all, role).times = r.hist[tid].between(t.from, t.to)
	}
	return all
}

func shareOf(all map[string]*share, role string) *share {
	if all[role] == nil {
		all[role] = &share{role: role, calls: map[string]float64{}}
	}
	return all[role]
}
