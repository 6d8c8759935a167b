package pluginkit

import (
	"os"
	"slices"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/test/lab"
)

// faults are what can be wrong with a plugin, and the check that must find it.
var faults = []struct{ fault, check string }{
	{"none", ""},
	{"ends well when started by hand", "start-by-hand"},
	{"has no version", "describe-values"},
	{"has an unknown crash class", "describe-values"},
	{"has physical blocks below the logical ones", "limits-sizes"},
	{"offers what it cannot do", "limits-operations"},
	{"takes any setting", "configure-unknown"},
	{"loses the end of a large write", "data-edges"},
	{"takes memory for aligned", "data-memory"},
	{"answers a read too early", "data-answer-last"},
	{"answers a write too early", "data-source-free"},
	{"has one file for all disks", "data-disks"},
	{"refuses hints", "data-hints"},
	{"refuses a flush with a range", "flush-answer"},
	{"has an empty flush", "flush-medium"},
	{"ignores FUA", "fua-medium"},
	{"ignores FUA of zeroes", "zeroes-fua-medium"},
	{"says it has no cache", "cache-medium"},
	{"writes no zeroes", "zeroes-read"},
	{"writes no zeroes where it must not unmap", "zeroes-no-unmap"},
	{"unmaps where it must not", "zeroes-allocated"},
	{"discards more than it was asked", "discard-range"},
	{"forgets the first block at close", "open-again"},
	{"makes readers wait", "open-reader"},
	{"opens one disk at a time", "calls-concurrent"},
	{"resizes to the old size", "resize-grown"},
	{"says all is a hole", "extents-holes"},
	{"lists more than it was asked", "extents-form"},
	{"has no fence", "fence-open-waits"},
	{"takes the fence after its answer", "fence-open-waits"},
	{"has a lock elsewhere", "fence-lock"},
	{"fails where it should wait", "fence-open-goes-on"},
	{"keeps writes to itself", "crash-idle"},
	{"hides a write error", "error-write"},
	{"makes EIO of no space", "error-space"},
	{"reads zeroes where the medium fails", "error-read"},
	{"hides the error of a flush", "error-flush"},
	{"hides the error of FUA", "error-fua"},
	{"takes a short write for a whole one", "short-transfers"},
	{"stops where one disk hangs", "hang-other-disk"},
	{"leaks a descriptor with each open", "leak-descriptors"},
	{"leaks memory with each open", "leak-memory"},
	{"leaks a thread with each open", "leak-threads"},
	{"dies of SIGTERM", "end-signals"},
	{"ends with status 3", "end-orderly"},
	{"oversleeps", "ring-wake"},

	{"answers a request twice", "ring-one-answer"},
	{"cuts tags to 32 bits", "ring-tags"},
	{"reads entries twice", "ring-entry-once"},
	{"drops the last of a full ring", "ring-full"},
	{"forgets what is in flight", "close-waits"},
	{"serves devices that are not open", "refuse-unknown-device"},
	{"takes unaligned requests", "refuse-unaligned"},
	{"takes requests without length", "refuse-no-length"},
	{"answers EINVAL beyond the end", "refuse-beyond-end"},
	{"takes unknown operations", "refuse-unknown-operation"},
	{"takes unknown flags", "refuse-unknown-flag"},
	{"takes unknown arenas", "refuse-unknown-arena"},
	{"answers EIO outside of an arena", "refuse-outside-arena"},
	{"does what it does not offer", "limits-refusals"},
	{"writes to read-only disks", "refuse-read-only"},
	{"reads into memory of others", "data-neighbours"},
}

// rawGroups are the checks for plugins that take requests out of the ring by themselves.
const rawGroups = "limits-*,refuse-*,ring-*,data-*,open-*,flush-answer,close-waits,detach-arena-waits,drain-waits"

func TestMain(m *testing.M) {
	fault := os.Getenv(faultKey)
	if fault == "ends well when started by hand" && !plugin.StartedByHost() {
		os.Exit(0)
	}
	if fault != "" {
		plugin.ServeIO(newWrong(fault))
	}
	os.Exit(lab.Run(m))
}

// TestWrongPluginsFail judges plugins with one fault each. Each fails the check that names
// its fault, and no other.
func TestWrongPluginsFail(t *testing.T) {
	if testing.Short() {
		t.Skip("takes minutes; make check runs it")
	}
	if !mayMount() {
		t.Skip("needs FUSE and loop devices, as root")
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range faults {
		t.Run(f.fault, func(t *testing.T) {
			t.Parallel()
			args := []string{"--quick"}
			if rawFaults[f.fault] {
				args = append(args, "--only", rawGroups)
			}
			if f.fault == "oversleeps" {
				args = []string{"--only", "ring-*,data-*"} // not quick: it takes many requests
			}
			var failed []string
			for _, r := range judgeAs(t, []string{faultKey + "=" + f.fault}, exe, args...) {
				if r.Outcome == "failed" {
					failed = append(failed, r.Check)
					t.Logf("%s: %s", r.Check, r.Reason)
				}
			}
			var want []string
			if f.check != "" {
				want = []string{f.check}
			}
			if !slices.Equal(failed, want) {
				t.Errorf("a plugin that %s fails %v, want %v", f.fault, failed, want)
			}
		})
	}
}

// TestFaultsAreEnough: the list is the proof that the kit finds what it names.
func TestFaultsAreEnough(t *testing.T) {
	for fault := range rawFaults {
		if !slices.ContainsFunc(faults, func(f struct{ fault, check string }) bool { return f.fault == fault }) {
			t.Errorf("no test has the fault %q", fault)
		}
	}
}
