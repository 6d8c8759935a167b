package faults

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os/exec"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
)

// fioRun is a fio that writes, reads and verifies a device over NBD.
type fioRun struct {
	t    *testing.T
	done chan struct{}
	out  bytes.Buffer
	errs bytes.Buffer
	err  error
}

// fioResult is the work done by a fio without errors.
type fioResult struct {
	Requests int64
	Longest  time.Duration
}

// startFio runs fio on uris for a time. Its writes are verified all along and at the
// end. size and rate are those of each of them.
func startFio(t *testing.T, runtime time.Duration, size, rate string, uris ...string) *fioRun {
	t.Helper()
	f := &fioRun{t: t, done: make(chan struct{})}
	args := []string{"--ioengine=nbd", "--rw=randrw", "--bsrange=4k-128k", "--iodepth=32", "--size=" + size, "--rate=" + rate + "," + rate,
		"--verify=crc32c", "--verify_fatal=1", "--verify_backlog=128", "--do_verify=1", "--thread", "--group_reporting",
		"--time_based", fmt.Sprintf("--runtime=%dms", runtime.Milliseconds()), "--output-format=json"}
	for i, uri := range uris {
		args = append(args, fmt.Sprint("--name=faults", i), "--uri="+uri)
	}
	cmd := exec.Command(lab.Tool(t, "fio"), args...)
	cmd.Dir = t.TempDir() // it leaves a state file
	cmd.Stdout, cmd.Stderr = &f.out, &f.errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		f.err = cmd.Wait()
		close(f.done)
	}()
	t.Cleanup(func() {
		cmd.Process.Kill()
		<-f.done
	})
	return f
}

func (f *fioRun) running() bool {
	select {
	case <-f.done:
		return false
	default:
		return true
	}
}

// wait waits for the end of fio and fails the test if fio reports an error.
func (f *fioRun) wait() fioResult {
	f.t.Helper()
	select {
	case <-f.done:
	case <-time.After(5 * time.Minute):
		f.t.Fatal("fio does not end")
	}
	if f.err != nil {
		f.t.Fatalf("fio: %v\n%s", f.err, f.errs.String())
	}
	r, err := parseFio(f.out.Bytes())
	if err != nil {
		f.t.Fatalf("fio's report: %v\n%s", err, f.out.String())
	}
	return r
}

func parseFio(out []byte) (r fioResult, err error) {
	type direction struct {
		TotalIOs int64 `json:"total_ios"`
		Clat     struct {
			Max float64 `json:"max"`
		} `json:"clat_ns"`
	}
	var report struct {
		Jobs []struct {
			Error int       `json:"error"`
			R     direction `json:"read"`
			W     direction `json:"write"`
		} `json:"jobs"`
	}
	if i := bytes.IndexByte(out, '{'); i >= 0 { // warnings come first
		out = out[i:]
	}
	if err := json.Unmarshal(out, &report); err != nil {
		return r, err
	}
	if len(report.Jobs) != 1 || report.Jobs[0].Error != 0 {
		return r, fmt.Errorf("jobs: %+v", report.Jobs)
	}
	j := report.Jobs[0]
	r.Requests = j.R.TotalIOs + j.W.TotalIOs
	r.Longest = time.Duration(max(j.R.Clat.Max, j.W.Clat.Max))
	if j.R.TotalIOs == 0 || j.W.TotalIOs == 0 {
		return r, fmt.Errorf("fio did not both read and write: %+v", j)
	}
	return r, nil
}
