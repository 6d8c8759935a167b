//go:build amd64

package main

import (
	"bytes"
	"math"
	"os"
	"strings"
	"testing"
)

// The recorded part of a load has system calls by their numbers on amd64.
var recordedThreads = map[int]string{9518: roleApp, 9132: roleFrontend, 9095: roleClient, 9068: roleServer, 9088: rolePlugin}

func recorded(t *testing.T) *recording {
	t.Helper()
	text, err := os.ReadFile("testdata/4k-randread.txt")
	if err != nil {
		t.Fatal(err)
	}
	r, err := newRecording(text, recordedThreads)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestRequestsOfARecording(t *testing.T) {
	r := recorded(t)
	found := r.requests()
	if len(found) < 5 {
		t.Fatalf("%d requests, want at least 5", len(found))
	}
	for _, marks := range found {
		sum := 0.
		for _, h := range r.handOvers(marks) {
			sum += h.sum()
		}
		if math.Abs(sum-float64(length(marks))) > 1 {
			t.Errorf("request at %d: hand-overs of %.0f ns make a request of %d ns", marks[0].at, sum, length(marks))
		}
	}
}

func TestHandOversOfOneRequest(t *testing.T) {
	r := recorded(t)
	got := r.handOvers(r.requests()[0])
	if len(got) != 9 {
		t.Fatalf("%d hand-overs, want 9: %+v", len(got), got)
	}
	// The front end received at .136674318 and gave its CPU to the client's pump at
	// .136677814, which sent at .136683084.
	toClient := handOver{from: roleFrontend, to: roleClient, switches: 1}
	toClient.times[working] = 683084 - 674318
	// The server received at .136701489, woke the plugin at .136705145, and another
	// thread had its CPU until .136713842.
	toPlugin := handOver{from: roleServer, to: rolePlugin, switches: 1, woken: true}
	toPlugin.times[working], toPlugin.times[noCore] = 705145-701489, 713842-705145
	for i, want := range map[int]handOver{1: toClient, 3: toPlugin} {
		if got[i] != want {
			t.Errorf("hand-over %d: %+v, want %+v", i, got[i], want)
		}
	}
}

func TestTableHasALineForEachHandOver(t *testing.T) {
	text, err := os.ReadFile("testdata/4k-randread.txt")
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := write(&out, load{"read", 4096}, text, recordedThreads); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"| application → front end |", "| front end → client |", "| client → server |", "| server → plugin |",
		"| plugin → server |", "| server → client |", "| client → front end |", "| front end → application |", "| **all** |"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in:\n%s", want, out.String())
		}
	}
	if strings.Contains(out.String(), "scheduler") {
		t.Error("there is a column for what was not recorded")
	}
}

func TestStatesOfThreads(t *testing.T) {
	const text = `
 a 1 [000] 1.000000100: raw_syscalls:sys_enter: NR 24 (0, 0, 0, 0, 0, 0)
 a 1 [000] 1.000000110: sched:sched_switch: prev_comm=a prev_pid=1 prev_prio=120 prev_state=R+ ==> next_comm=b c next_pid=2 next_prio=120
 b c 2 [000] 1.000000130: sched:sched_switch: prev_comm=b c prev_pid=2 prev_prio=120 prev_state=S ==> next_comm=a next_pid=1 next_prio=120
 a 1 [000] 1.000000135: raw_syscalls:sys_exit: NR 24 = 0
 swapper/1 0 [001] 1.000000140: irq:other: nothing
 swapper/1 0 [001] 1.000000140: sched:sched_switch: prev_comm=x prev_pid=9 prev_prio=120 prev_state=S ==> next_comm=swapper/1 next_pid=0 next_prio=120
 a 1 [000] 1.000000150: sched:sched_waking: comm=b c pid=2 prio=120 target_cpu=001
 swapper/1 0 [001] 1.000000180: sched:sched_switch: prev_comm=swapper/1 prev_pid=0 prev_prio=120 prev_state=R ==> next_comm=b c next_pid=2 next_prio=120
 a 1 [000] 1.000000200: raw_syscalls:sys_enter: NR 47 (3, 0, 0, 0, 0, 0)
`
	r, err := newRecording([]byte(text), nil)
	if err != nil {
		t.Fatal(err)
	}
	const from, to = 1_000_000_100, 1_000_000_200
	for tid, want := range map[int]times{
		1: {scheduler: 10 + 5, noCore: 20, working: 65},
		2: {working: 20 + 20, asleep: 20, wakeUp: 30},
	} {
		if got := r.hist[tid].between(from, to); got != want {
			t.Errorf("thread %d: %v, want %v", tid, got, want)
		}
	}
}

func TestTransfersAreCountedByProcess(t *testing.T) {
	const text = `
 fio 1 [000] 1.000000000: raw_syscalls:sys_enter: NR 44 (6, 0, 0, 0, 0, 0)
 fio 1 [000] 1.000000010: raw_syscalls:sys_exit: NR 44 = 28
 fio 1 [000] 1.000000020: raw_syscalls:sys_exit: NR 45 = 16
 fio 1 [000] 1.000000100: raw_syscalls:sys_enter: NR 44 (6, 0, 0, 0, 0, 0)
 fio 1 [000] 1.000000110: raw_syscalls:sys_exit: NR 44 = 28
 rnbd 2 [001] 1.000000150: raw_syscalls:sys_enter: NR 47 (6, 0, 0, 0, 0, 0)
 rnbd 2 [001] 1.000000160: raw_syscalls:sys_exit: NR 47 = 4096
 rnbd 2 [001] 1.000000170: sched:sched_waking: comm=fio pid=1 prio=120 target_cpu=000
 rnbd 2 [001] 1.000000180: raw_syscalls:sys_exit: NR 47 = -11
 rnbd 2 [001] 1.000000190: raw_syscalls:sys_exit: NR 47 = 8192
 fio 1 [000] 1.000000195: raw_syscalls:sys_exit: NR 45 = 16
 fio 1 [000] 1.000000200: raw_syscalls:sys_enter: NR 44 (6, 0, 0, 0, 0, 0)
 fio 1 [000] 1.000000210: raw_syscalls:sys_exit: NR 44 = 28
`
	r, err := newRecording([]byte(text), map[int]string{1: roleApp, 2: roleServer})
	if err != nil {
		t.Fatal(err)
	}
	found := r.transfers()
	if len(found) != 1 || found[0] != (transfer{1_000_000_100, 1_000_000_200}) {
		t.Fatalf("transfers %v", found)
	}
	server := r.shares(found[0])[roleServer]
	if server.first != 60 || server.last != 90 || server.calls["recvmsg"] != 3 {
		t.Errorf("server: %+v", server)
	}
	if app := r.shares(found[0])[roleApp]; app.woken != 1 {
		t.Errorf("application: %+v", app)
	}
}

func TestBadLinesAreErrors(t *testing.T) {
	for _, line := range []string{
		"a 1 [000] 1.000000100: raw_syscalls:sys_exit: NR x = 0",
		"a 1 [000] 1.000000100: sched:sched_switch: prev_comm=a",
		"a one [000] 1.000000100: raw_syscalls:sys_enter: NR 1 (0)",
	} {
		if _, err := parse([]byte(line)); err == nil || !strings.Contains(err.Error(), "line 1") {
			t.Errorf("%q: %v", line, err)
		}
	}
}
