package selfstats

import (
	"strings"
	"testing"
)

func TestReportHasCountsOfTheProcess(t *testing.T) {
	n := uint64(7)
	Count("/test/things", func() uint64 { return n })
	if !strings.Contains(string(report()), "/test/things 7\n") {
		t.Error("the first report lacks it")
	}
	n = 8
	if !strings.Contains(string(report()), "/test/things 8\n") {
		t.Error("the second report has not the new value")
	}
	Count("/test/things", func() uint64 { return 9 })
	if got := string(report()); !strings.Contains(got, "/test/things 9\n") || strings.Contains(got, "/test/things 8\n") {
		t.Error("the later count does not take the place of the first")
	}
}
