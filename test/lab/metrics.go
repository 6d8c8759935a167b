package lab

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/selfstats"
)

// MetricsEnv makes a daemon and its plugins report their metrics below path:
// see package selfstats.
func MetricsEnv(path string) string { return selfstats.FileEnv + "=" + path }

// Metrics asks a running process for its metrics, by name. The process was
// started with MetricsEnv(path).
func Metrics(path string, pid int) (map[string]float64, error) {
	path += "." + strconv.Itoa(pid)
	if err := os.RemoveAll(path); err != nil {
		return nil, err
	}
	if err := syscall.Kill(pid, syscall.SIGUSR1); err != nil {
		return nil, fmt.Errorf("ask process %d for its metrics: %w", pid, err)
	}
	for end := time.Now().Add(Patience); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if text, err := os.ReadFile(path); err == nil { // it comes as a whole
			return parseMetrics(string(text)), nil
		}
	}
	return nil, fmt.Errorf("process %d does not write its metrics to %s", pid, path)
}

func parseMetrics(text string) map[string]float64 {
	m := map[string]float64{}
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if v, err := strconv.ParseFloat(value, 64); err == nil {
			m[name] = v
		}
	}
	return m
}
