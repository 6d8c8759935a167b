package sim

import (
	"reflect"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
)

// Only existing kinds are drawn, and the same seed draws the same schedule.
func TestDraw(t *testing.T) {
	seen, fabrics := map[string]int{}, map[loopback.Fabric]int{}
	for seed := range uint64(3000) {
		plan := Draw(seed)
		seen[plan.Scene]++
		if !reflect.DeepEqual(plan, Draw(seed)) {
			t.Fatalf("seed %d draws two schedules", seed)
		}
		if len(plan.Resets) != plan.Paths || len(plan.Fabrics) != plan.Paths {
			t.Errorf("seed %d, scene %q: %d paths, and %d and %d words on their fabrics", seed, plan.Scene, plan.Paths, len(plan.Resets), len(plan.Fabrics))
		}
		for _, f := range plan.Fabrics {
			fabrics[f]++
		}
		for _, f := range plan.Faults {
			if faults[f.Kind] == nil || f.At < 0 || f.For < 0 || f.Server >= plan.Servers || f.Path >= plan.Paths || f.Device >= plan.Servers*plan.Devices {
				t.Errorf("seed %d, scene %q: no such fault can be: %s\n%s", seed, plan.Scene, f, plan)
			}
		}
	}
	if fabrics[loopback.Stream] < 2000 || fabrics[loopback.Datagrams] < 2000 || fabrics[loopback.Plain] > 0 {
		t.Errorf("paths have the fabrics %v", fabrics)
	}
	for _, s := range scenes {
		if seen[s.name] < 50 {
			t.Errorf("scene %s is drawn %d times of 3,000", s.name, seen[s.name])
		}
	}
}
