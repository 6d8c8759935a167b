package top

import (
	"math"
	"testing"
	"time"
)

func TestNumbersTakeFiveColumns(t *testing.T) {
	for v := 1.0; v < 1e18; v *= 1.003 {
		for _, s := range []string{number(v), bytes(v), duration(time.Duration(v))} {
			if size(s) > 5 {
				t.Fatalf("%v is %q", v, s)
			}
		}
	}
	for v, want := range map[float64]string{0: "0", 999: "999", 999.6: "1.00k", 1234: "1.23k", 99960: "100k", 1e6: "1.00M"} {
		if got := number(v); got != want {
			t.Errorf("number %v is %s, want %s", v, got, want)
		}
	}
	for v, want := range map[float64]string{1023: "1.00K", 1 << 20: "1.00M", 512 << 10: "512K"} {
		if got := bytes(v); got != want {
			t.Errorf("%v bytes are %s, want %s", v, got, want)
		}
	}
	for v, want := range map[time.Duration]string{0: "0ns", 999 * time.Nanosecond: "999ns", 1500: "1.5us", 12 * time.Millisecond: "12ms", 137 * time.Second: "137s", math.MaxInt64: ">137s"} {
		if got := duration(v); got != want {
			t.Errorf("%d ns are %s, want %s", v, got, want)
		}
	}
}
