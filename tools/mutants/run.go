package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

type mutantVerdict string

const (
	caught   mutantVerdict = "caught"
	survived mutantVerdict = "SURVIVED"
	notBuilt mutantVerdict = "DOES NOT BUILD"
	notFound mutantVerdict = "NOT FOUND" // the line is gone from the tree
	noTest   mutantVerdict = "NO TEST"
	failed   mutantVerdict = "FAILED" // the tool could not do its work
)

type mutantResult struct {
	verdict mutantVerdict
	detail  string
}

// runner tries mutants of the tree at root.
type runner struct {
	root  string
	limit time.Duration // of one go test
}

// baseline runs the tests of all mutants on the unchanged tree: one that fails
// anyway catches nothing.
func (r *runner) baseline(mutants []mutant) error {
	patterns := map[string][]string{}
	for _, m := range mutants {
		if !slices.Contains(patterns[m.pkg], m.run) {
			patterns[m.pkg] = append(patterns[m.pkg], m.run)
		}
	}
	for pkg, runs := range patterns {
		if out, err := r.goTest(pkg, strings.Join(runs, "|"), 5*r.limit); err != nil {
			return fmt.Errorf("%s: %w\n%s", pkg, err, out)
		}
	}
	return nil
}

// tryMutant runs the tests of m with m in place.
func (r *runner) tryMutant(m *mutant) mutantResult {
	overlay, err := r.writeOverlay(m)
	if err != nil {
		return mutantResult{notFound, err.Error()}
	}
	defer os.RemoveAll(filepath.Dir(overlay))
	out, err := r.goTest(m.pkg, m.run, r.limit, "-failfast", "-overlay", overlay)
	return mutantResult{readVerdict(out, err), out}
}

// writeOverlay writes the changed files and the description for go build's -overlay
// into a folder of their own, and returns the description's name.
func (r *runner) writeOverlay(m *mutant) (string, error) {
	texts, err := r.mutatedFiles(m)
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp("", "mutant")
	if err != nil {
		return "", err
	}
	replace := map[string]string{}
	for file, text := range texts {
		replace[file] = filepath.Join(dir, fmt.Sprintf("mutant%d.go", len(replace)))
		err = errors.Join(err, os.WriteFile(replace[file], []byte(text), 0o644))
	}
	overlay := filepath.Join(dir, "overlay.json")
	text, jsonErr := json.Marshal(map[string]any{"Replace": replace})
	return overlay, errors.Join(err, jsonErr, os.WriteFile(overlay, text, 0o644))
}

// mutatedFiles returns the changed files of m by absolute name.
func (r *runner) mutatedFiles(m *mutant) (map[string]string, error) {
	texts := map[string]string{}
	for _, e := range m.edits {
		file, err := filepath.Abs(filepath.Join(r.root, e.file))
		if err != nil {
			return nil, err
		}
		if _, ok := texts[file]; !ok {
			src, err := os.ReadFile(file)
			if err != nil {
				return nil, err
			}
			texts[file] = string(src)
		}
		if texts[file], err = e.applyTo(texts[file]); err != nil {
			return nil, err
		}
	}
	return texts, nil
}

// goTest runs tests of one package. Tests that hang for longer than limit fail.
func (r *runner) goTest(pkg, run string, limit time.Duration, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit+2*time.Minute) // with the build
	defer cancel()
	args = append([]string{"test", "-count=1", "-vet=off", "-timeout", limit.String(), "-run", run}, args...)
	cmd := exec.CommandContext(ctx, "go", append(args, ".")...)
	cmd.Dir = filepath.Join(r.root, pkg)
	cmd.WaitDelay = 5 * time.Second // a child of a dead test may hold its output
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	return string(out), err
}

// readVerdict reads the result for a mutant from go test's output.
func readVerdict(out string, err error) mutantVerdict {
	var exit *exec.ExitError
	switch {
	case strings.Contains(out, "[build failed]"), strings.Contains(out, "[setup failed]"):
		return notBuilt
	case strings.Contains(out, "[no tests to run]"):
		return noTest
	case err == nil:
		return survived
	case errors.As(err, &exit), errors.Is(err, context.DeadlineExceeded):
		return caught
	}
	return failed
}
