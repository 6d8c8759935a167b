package main

import (
	"os"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/plugintest"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// BenchmarkRead4K is one plugin process and one queue, with the given number of
// requests in flight and a host that never sleeps.
func BenchmarkRead4K(b *testing.B) {
	exe, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	for name, depth := range map[string]int{"depth 1": 1, "depth 32": 32} {
		b.Run(name, func(b *testing.B) {
			h := plugintest.StartIO(b, nil, plugintest.Options{Executable: exe})
			read(b, h.Submitter, depth)
		})
	}
}

func read(b *testing.B, s *shm.Submitter, depth int) {
	cqes := make([]shm.CQE, depth)
	b.ReportAllocs()
	for done, pushed := 0, 0; done < b.N; {
		for pushed < b.N && pushed-done < depth {
			slot := uint64(pushed % depth)
			s.Push(&shm.SQE{Op: blk.Read, Device: plugintest.Device, Arena: plugintest.Arena, Len: 4096,
				Offset: slot * 4096, ArenaOff: slot * 4096})
			pushed++
		}
		s.Publish()
		n := s.Pop(cqes)
		for _, c := range cqes[:n] {
			if c.Errno != 0 {
				b.Fatal(blk.Errno(c.Errno))
			}
		}
		done += n
	}
}
