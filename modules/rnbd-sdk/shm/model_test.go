package shm

import (
	"testing"

	"pgregory.net/rapid"
)

// The ring against a model of three queues: pushed, visible, taken.
func TestRing_BehavesAsTwoQueues(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		entries := 1 << rapid.IntRange(0, 4).Draw(t, "log2 of entries")
		r := must(NewHeapRing(entries))
		defer r.Close()
		s, c := r.Submitter(), r.Completer()
		var next uint64
		var pushed, visible, taken, answered, returned []uint64 // tags
		inFlight := func() int {
			return len(pushed) + len(visible) + len(taken) + len(answered) + len(returned)
		}
		t.Repeat(map[string]func(*rapid.T){
			"push": func(t *rapid.T) {
				want := inFlight() < entries
				if got := s.Push(&SQE{Tag: next}); got != want {
					t.Fatalf("push = %v with %d of %d in flight", got, inFlight(), entries)
				}
				if want {
					pushed = append(pushed, next)
					next++
				}
			},
			"publish requests": func(*rapid.T) {
				s.Publish()
				visible, pushed = append(visible, pushed...), nil
			},
			"pop requests": func(t *rapid.T) {
				dst := make([]SQE, rapid.IntRange(0, entries+1).Draw(t, "room"))
				n := c.Pop(dst)
				if want := min(len(dst), len(visible)); n != want {
					t.Fatalf("popped %d requests, want %d", n, want)
				}
				for i, e := range dst[:n] {
					if e.Tag != visible[i] {
						t.Fatalf("request %d has tag %d, want %d", i, e.Tag, visible[i])
					}
				}
				taken, visible = append(taken, visible[:n]...), visible[n:]
			},
			"answer one, in any order": func(t *rapid.T) {
				if len(taken) == 0 {
					if c.Push(&CQE{}) {
						t.Fatal("answer to nothing accepted")
					}
					return
				}
				i := rapid.IntRange(0, len(taken)-1).Draw(t, "which")
				if !c.Push(&CQE{Tag: taken[i]}) {
					t.Fatalf("answer refused: %v", c.Err())
				}
				answered = append(answered, taken[i])
				taken = append(taken[:i:i], taken[i+1:]...)
			},
			"publish answers": func(*rapid.T) {
				c.Publish()
				returned, answered = append(returned, answered...), nil
			},
			"pop answers": func(t *rapid.T) {
				dst := make([]CQE, rapid.IntRange(0, entries+1).Draw(t, "room"))
				n := s.Pop(dst)
				if want := min(len(dst), len(returned)); n != want {
					t.Fatalf("popped %d answers, want %d", n, want)
				}
				for i, e := range dst[:n] {
					if e.Tag != returned[i] {
						t.Fatalf("answer %d has tag %d, want %d", i, e.Tag, returned[i])
					}
				}
				returned = returned[n:]
			},
			"completer sleeps": func(t *rapid.T) {
				if got := c.Arm(); got != (len(visible) == 0) {
					t.Fatalf("arm = %v with %d requests visible", got, len(visible))
				}
			},
			"submitter sleeps": func(t *rapid.T) {
				if got := s.Arm(); got != (len(returned) == 0) {
					t.Fatalf("arm = %v with %d answers visible", got, len(returned))
				}
			},
			"": func(t *rapid.T) {
				if s.Err() != nil || c.Err() != nil {
					t.Fatalf("errors: %v, %v", s.Err(), c.Err())
				}
				if s.InFlight() != inFlight() || s.Space() != entries-inFlight() || c.InFlight() != len(taken) {
					t.Fatalf("in flight %d and %d, space %d; want %d, %d, %d",
						s.InFlight(), c.InFlight(), s.Space(), inFlight(), len(taken), entries-inFlight())
				}
			},
		})
	})
}

// A peer that writes anything to the shared words at any time causes an error
// at worst: no panic, no access outside, no more entries than there can be.
func TestRing_SurvivesAnyIndices(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		entries := 1 << rapid.IntRange(0, 3).Draw(t, "log2 of entries")
		r := must(NewHeapRing(entries))
		defer r.Close()
		s, c := r.Submitter(), r.Completer()
		sqes, cqes := make([]SQE, entries+2), make([]CQE, entries+2)
		word := rapid.OneOf(rapid.Uint32(), rapid.Uint32Range(0, 20), rapid.Uint32Min(1<<32-20))
		t.Repeat(map[string]func(*rapid.T){
			"sq tail":     func(t *rapid.T) { r.view.hdr.sq.Tail.Store(word.Draw(t, "v")) },
			"sq head":     func(t *rapid.T) { r.view.hdr.sq.Head.Store(word.Draw(t, "v")) },
			"sq wake":     func(t *rapid.T) { r.view.hdr.sq.Wake.Store(word.Draw(t, "v")) },
			"cq tail":     func(t *rapid.T) { r.view.hdr.cq.Tail.Store(word.Draw(t, "v")) },
			"cq head":     func(t *rapid.T) { r.view.hdr.cq.Head.Store(word.Draw(t, "v")) },
			"cq wake":     func(t *rapid.T) { r.view.hdr.cq.Wake.Store(word.Draw(t, "v")) },
			"geometry":    func(t *rapid.T) { r.view.hdr.Entries = word.Draw(t, "v") },
			"push":        func(*rapid.T) { s.Push(&SQE{}) },
			"publish":     func(*rapid.T) { s.Publish() },
			"answer":      func(*rapid.T) { c.Push(&CQE{}) },
			"publish ans": func(*rapid.T) { c.Publish() },
			"arm":         func(*rapid.T) { s.Arm(); c.Arm() },
			"disarm":      func(*rapid.T) { s.Disarm(); c.Disarm() },
			"pop requests": func(t *rapid.T) {
				if n := c.Pop(sqes); n > entries {
					t.Fatalf("popped %d of %d entries", n, entries)
				}
			},
			"pop answers": func(t *rapid.T) {
				before := s.InFlight()
				if n := s.Pop(cqes); n > before {
					t.Fatalf("popped %d answers to %d requests", n, before)
				}
			},
			"": func(t *rapid.T) {
				if n := s.InFlight(); n < 0 || n > entries {
					t.Fatalf("%d in flight of %d", n, entries)
				}
				if n := c.InFlight(); n < 0 || n > entries {
					t.Fatalf("%d taken of %d", n, entries)
				}
			},
		})
	})
}
