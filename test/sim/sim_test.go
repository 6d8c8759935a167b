package sim

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Environment of the tests: SIM_SEED runs one schedule with its log, SIM_N so
// many from SIM_FROM on. With SIM_FIRST the first failure ends the test, and
// its message says how many schedules ran. SIM_SCENE names the scene that each
// begins with. SIM_PROCESSES is how many processes run them at once, 2 by default.
// SIM_WORKER is for processes that this program starts.

// fewSchedules is the number of schedules by default: a minute on two idle CPUs. On a
// machine that is busy otherwise no more are begun after fewTime.
const (
	fewSchedules = 1000
	fewTime      = 4 * time.Minute
)

func envInt(name string, otherwise int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil {
		return n
	}
	return otherwise
}

// logger writes times as the run counts them.
func logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.String("t", a.Value.Time().Sub(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)).String())
		}
		return a
	}}))
}

// TestSeed runs one schedule with its log: SIM_SEED=7 go test -v -run Seed.
func TestSeed(t *testing.T) {
	seed := envInt("SIM_SEED", -1)
	if seed < 0 {
		t.Skip("SIM_SEED names the schedule")
	}
	plan := Draw(uint64(seed))
	t.Logf("%s", plan)
	r := Run(t, plan, logger())
	if len(r.Violations) == 0 {
		t.Logf("%s", r)
		return
	}
	t.Errorf("%s", r)
	if os.Getenv("SIM_MINIMISE") != "" {
		t.Logf("least faults that fail:\n%s", Minimise(t, plan))
	}
}

// verdict is a worker's result for one seed.
type verdict struct {
	Seed    int
	Result  Result
	Seconds float64
}

// TestWorker runs seeds in turn; the process that started it reads the verdicts.
func TestWorker(t *testing.T) {
	list := os.Getenv("SIM_WORKER")
	if list == "" {
		t.Skip("TestSchedules starts it")
	}
	for _, word := range strings.Split(list, ",") {
		seed, _ := strconv.Atoi(word)
		begin := time.Now()
		fmt.Printf("begin %d\n", seed)
		r := Run(t, Draw(uint64(seed)), slog.New(slog.DiscardHandler))
		b, _ := json.Marshal(verdict{Seed: seed, Result: r, Seconds: time.Since(begin).Seconds()})
		fmt.Printf("verdict %s\n", b)
		if untilFirst() && len(r.Violations) > 0 {
			return
		}
	}
}

func untilFirst() bool { return os.Getenv("SIM_FIRST") != "" }

// batch is schedules that one process runs in turn.
type batch struct {
	scene string // each begins with it; empty: any, or none
	seeds []int
}

// schedule is one of a batch.
type schedule struct {
	scene string
	seed  int
}

func (s schedule) String() string {
	if s.scene == "" {
		return fmt.Sprintf("seed %d", s.seed)
	}
	return fmt.Sprintf("seed %d of SIM_SCENE=%s", s.seed, s.scene)
}

const (
	batchSize     = 25
	seedsPerScene = 12 // with -short
)

// batches are what TestSchedules runs: with -short, a few schedules of each scene.
func batches() (all []batch) {
	from := envInt("SIM_FROM", 1)
	if testing.Short() && os.Getenv("SIM_N") == "" && onlyScene == "" {
		for _, scene := range scenes {
			all = append(all, batch{scene.name, consecutive(from, seedsPerScene)})
		}
		return all
	}
	for n := envInt("SIM_N", fewSchedules); n > 0; n -= batchSize {
		all = append(all, batch{onlyScene, consecutive(from, min(n, batchSize))})
		from += batchSize
	}
	return all
}

func consecutive(from, n int) (seeds []int) {
	for seed := from; seed < from+n; seed++ {
		seeds = append(seeds, seed)
	}
	return seeds
}

// TestSchedules runs schedules in processes of their own: one that dies or hangs
// costs only its own seed.
func TestSchedules(t *testing.T) {
	if os.Getenv("SIM_WORKER") != "" {
		t.Skip("a worker starts none")
	}
	begin := time.Now()
	var answers, ran atomic.Int64
	var mu sync.Mutex
	failed := map[schedule]string{}
	note := func(s schedule, what string) {
		mu.Lock()
		defer mu.Unlock()
		failed[s] = what
	}
	enough := func() bool {
		mu.Lock()
		defer mu.Unlock()
		return untilFirst() && len(failed) > 0 || os.Getenv("SIM_N") == "" && time.Since(begin) > fewTime
	}
	atOnce := envInt("SIM_PROCESSES", 2)
	if untilFirst() {
		atOnce = 1
	}
	queue := make(chan batch)
	var workers sync.WaitGroup
	for range atOnce {
		workers.Go(func() {
			for b := range queue {
				if enough() {
					continue
				}
				ran.Add(int64(len(b.seeds)))
				answers.Add(work(t, b, note))
			}
		})
	}
	for _, b := range batches() {
		queue <- b
	}
	close(queue)
	workers.Wait()
	t.Logf("%d schedules, %d requests of users answered, %.0f s", ran.Load(), answers.Load(), time.Since(begin).Seconds())
	for s, what := range failed {
		if untilFirst() {
			_, first, _ := strings.Cut(what, "\n")
			t.Logf("found after %d schedules, by seed %d: %s", s.seed-envInt("SIM_FROM", 1)+1, s.seed, strings.TrimSpace(first))
		}
		t.Errorf("%s: %s\n%s", s, drawWithScene(uint64(s.seed), s.scene), what)
	}
}

// work has a batch run by one process after the other, and returns the number of
// requests that were answered.
func work(t *testing.T, b batch, tell func(schedule, string)) (answers int64) {
	found := false
	note := func(seed int, what string) {
		found = true
		tell(schedule{b.scene, seed}, what)
	}
	for len(b.seeds) > 0 {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=TestWorker", "-test.count=1")
		cmd.Env = append(os.Environ(), "SIM_WORKER="+strings.Trim(strings.ReplaceAll(fmt.Sprint(b.seeds), " ", ","), "[]"), "SIM_SCENE="+b.scene, "GOMAXPROCS=1", "GOGC=400")
		var out, stderr bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &stderr
		err := cmd.Run()
		current := -1
		for lines := bufio.NewScanner(&out); lines.Scan(); {
			word, rest, _ := strings.Cut(lines.Text(), " ")
			switch word {
			case "begin":
				current, _ = strconv.Atoi(rest)
				b.seeds = b.seeds[1:]
			case "verdict":
				var v verdict
				if json.Unmarshal([]byte(rest), &v) != nil {
					continue
				}
				current = -1
				answers += int64(v.Result.Answers)
				if len(v.Result.Violations) > 0 {
					note(v.Seed, v.Result.String())
				}
			}
		}
		if current >= 0 {
			note(current, fmt.Sprintf("its process ended: %v\n%s", err, crash(stderr.String()+out.String())))
		}
		if found && untilFirst() {
			return answers
		}
		if current < 0 && err != nil && len(b.seeds) > 0 {
			t.Errorf("worker: %v\n%s", err, tail(stderr.String()))
			return answers
		}
	}
	return answers
}

// crash describes the end of a process with the output s.
func crash(s string) string {
	if strings.Contains(s, "does not end: ") {
		return "stuck: " + tail(s)
	}
	return "crash: " + tail(s)
}

// tail returns the part of a long output that helps a reader.
func tail(s string) string {
	if i := strings.Index(s, "panic: "); i >= 0 {
		s = s[i:]
	}
	return s[:min(len(s), 6000)]
}
