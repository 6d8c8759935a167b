package main

import (
	"bufio"
	"bytes"
	"fmt"
	"strconv"
	"strings"
)

// event is one line of perf script.
type event struct {
	at   int64 // ns
	cpu  int
	tid  int // of the thread that runs
	kind kind

	next   int  // switchTo: the thread that goes on
	stays  bool // switchTo: the thread before is still runnable
	woken  int  // waking
	target int  // waking: its CPU
	call   int  // of a system call
	got    int64
}

type kind uint8

const (
	switchTo kind = iota
	waking
	enterCall
	exitCall
)

// parse reads what perf script prints with the fields comm, tid, cpu, time, event and
// trace. Other events are left out.
func parse(text []byte) (all []event, err error) {
	lines := bufio.NewScanner(bytes.NewReader(text))
	for n := 1; lines.Scan(); n++ {
		e, known, err := parseLine(lines.Text())
		if err != nil {
			return nil, fmt.Errorf("line %d: %w: %s", n, err, lines.Text())
		}
		if known {
			all = append(all, e)
		}
	}
	return all, lines.Err()
}

// parseLine reads
//
//	comm tid [cpu] seconds.nanoseconds: system:event: fields
//
// where comm may have spaces.
func parseLine(line string) (e event, known bool, err error) {
	open := strings.Index(line, " [")
	if open < 0 {
		return e, false, nil
	}
	front, rest := strings.Fields(line[:open]), strings.Fields(line[open+2:])
	if len(front) < 2 || len(rest) < 4 {
		return e, false, nil
	}
	p := numbers{}
	e.tid = p.int(front[len(front)-1])
	e.cpu = p.int(strings.TrimSuffix(rest[0], "]"))
	seconds, ns, _ := strings.Cut(strings.TrimSuffix(rest[1], ":"), ".")
	e.at = int64(p.int(seconds))*1e9 + int64(p.int(ns))
	fields := rest[3:]
	switch strings.TrimSuffix(rest[2], ":") {
	case "raw_syscalls:sys_enter":
		e.kind, e.call = enterCall, p.after(fields, "NR")
	case "raw_syscalls:sys_exit":
		e.kind, e.call, e.got = exitCall, p.after(fields, "NR"), int64(p.after(fields, "="))
	case "sched:sched_switch":
		e.kind, e.next = switchTo, p.int(value(fields, "next_pid"))
		e.stays = strings.HasPrefix(value(fields, "prev_state"), "R")
	case "sched:sched_waking":
		e.kind, e.woken, e.target = waking, p.int(value(fields, "pid")), p.int(value(fields, "target_cpu"))
	default:
		return e, false, p.err
	}
	return e, true, p.err
}

// numbers keeps the first error.
type numbers struct{ err error }

func (p *numbers) int(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil && p.err == nil {
		p.err = err
	}
	return n
}

// after returns the number behind a word.
func (p *numbers) after(fields []string, word string) int {
	for i, f := range fields[:len(fields)-1] {
		if f == word {
			return p.int(fields[i+1])
		}
	}
	p.int("")
	return 0
}

// value returns what is behind name=.
func value(fields []string, name string) string {
	for _, f := range fields {
		if v, ok := strings.CutPrefix(f, name+"="); ok {
			return v
		}
	}
	return ""
}
