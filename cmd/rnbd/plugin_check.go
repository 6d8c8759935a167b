package main

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/confine"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/plugincheck"
)

// pluginTest is `rnbd plugin test`.
type pluginTest struct {
	settings []string
	disk     string
	seed     uint64
	junit    string
	only     []string
	quick    bool
	list     bool
	all      bool
	log      bool
}

var resultFields = []report.Field[plugincheck.Result]{
	report.F("check", "Check", "its id, which stays the same", func(r plugincheck.Result) any { return r.Check.ID }),
	report.F("outcome", "Outcome", "passed, failed or skipped", func(r plugincheck.Result) any { return string(r.Outcome) }),
	report.F("title", "A plugin must", "what is checked", func(r plugincheck.Result) any { return r.Check.Title }),
	report.F("reason", "Reason", "why it failed or was left out", func(r plugincheck.Result) any { return r.Reason }),
	report.F("took", "Took", "time of the check", func(r plugincheck.Result) any { return r.Took }),
}

func pluginTestVerb() *verb {
	o := &pluginTest{}
	return &verb{
		name: "test", on: onServer, max: 1, args: "PROGRAM", flags: o.register, run: o.run, atLength: true, interrupted: "the test was not finished",
		short: "Judge a storage plugin, in whatever language it is written",
		long: `Start PROGRAM as a server would, and compare what it does with the plugin ABI:
handshake, limits, refusals, rings, data, fence, crashes, a medium that fails,
hangs and loses what was not synced, leaks, and its end. No daemon has to run.

The disks are files of the test in a temporary folder, some on a file system that
the test serves (as root, with FUSE). For a plugin with names of its own {dir} in
a setting stands for that folder; without it those checks are left out.
With --name the disk is the user's, and WHAT WAS ON IT IS LOST.

Failed checks are printed with the reason, those left out with theirs. The exit
code is 1 if a check has failed. docs/extend/plugin-test.md explains each check;
--list prints their ids.`,
		example: `  rnbd plugin test ./io-foo
  rnbd plugin test ./io-foo --config dir={dir} --all
  rnbd plugin test ./io-foo --only 'fence-*' --seed 42
  rnbd plugin test ./io-foo -o json --junit result.xml`,
	}
}

func (o *pluginTest) register(f *pflag.FlagSet) {
	f.StringArrayVar(&o.settings, "config", nil, "setting of the plugin, KEY=VALUE; may be repeated")
	f.StringVar(&o.disk, "name", "", "disk of the checks, whose contents are lost: a name, or a path for a plugin with paths as names")
	f.Uint64Var(&o.seed, "seed", 0, "of random patterns, to repeat a failure; 0: the time")
	f.StringVar(&o.junit, "junit", "", "write the results as JUnit XML to this file, too")
	f.StringSliceVar(&o.only, "only", nil, "ids of the checks to run, with * as in file names")
	f.BoolVar(&o.quick, "quick", false, "fewer rounds of the checks that repeat")
	f.BoolVar(&o.list, "list", false, "print the checks and do not run them")
	f.BoolVar(&o.all, "all", false, "print checks that passed, too")
	f.BoolVar(&o.log, "plugin-log", false, "print what the plugin logs")
}

func (o *pluginTest) run(c *call) error {
	checks, err := o.chosen()
	if err != nil {
		return err
	}
	if o.list {
		var all []plugincheck.Result
		for _, k := range checks {
			all = append(all, plugincheck.Result{Check: k})
		}
		return o.print(c, all, []string{"check", "title"})
	}
	if len(c.args) == 0 {
		return usageError{errors.New("write: rnbd plugin test PROGRAM; see rnbd plugin test --help")}
	}
	options, err := o.options(c.args[0])
	if err != nil {
		return err
	}
	r := plugincheck.New(options)
	results, err := o.judge(c, r, checks)
	if o.junit != "" && len(results) > 0 {
		err = errors.Join(err, writeJUnit(o.junit, c.args[0], r.Seed(), results))
	}
	if err != nil {
		return err
	}
	if c.Machine() {
		err = o.print(c, results, []string{"check", "outcome", "title", "reason", "took"})
	}
	return cmp.Or(err, verdict(c.args[0], results))
}

// chosen returns the checks to run.
func (o *pluginTest) chosen() (checks []plugincheck.Check, err error) {
	for _, k := range plugincheck.Checks() {
		fits := len(o.only) == 0 || len(k.Needs) == 0
		for _, pattern := range o.only {
			ok, err := path.Match(pattern, k.ID)
			if err != nil {
				return nil, usageError{fmt.Errorf("--only %q: %w", pattern, err)}
			}
			fits = fits || ok
		}
		if fits {
			checks = append(checks, k)
		}
	}
	if len(o.only) > 0 && len(checks) == 1 && !slices.Contains(o.only, checks[0].ID) {
		return nil, usageError{fmt.Errorf("--only %s: there is no such check; --list prints them", strings.Join(o.only, ","))}
	}
	return checks, nil
}

func (o *pluginTest) options(program string) (plugincheck.Options, error) {
	exe, err := filepath.Abs(program)
	if err != nil {
		return plugincheck.Options{}, err
	}
	p := plugincheck.Options{Executable: exe, Config: map[string]string{}, Disk: o.disk, Seed: o.seed, Quick: o.quick,
		Launcher: []string{"/proc/self/exe", confine.Argument}}
	if o.log {
		p.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	for _, s := range o.settings {
		k, v, ok := strings.Cut(s, "=")
		if !ok || k == "" {
			return p, usageError{fmt.Errorf("--config %q: write KEY=VALUE", s)}
		}
		p.Config[k] = v
	}
	return p, nil
}

// judge runs the checks. For people it prints each that has failed as it ends.
func (o *pluginTest) judge(c *call, r *plugincheck.Runner, checks []plugincheck.Check) (results []plugincheck.Result, err error) {
	for _, k := range checks {
		if err := c.cmd.Context().Err(); err != nil {
			return results, err
		}
		result := r.Run(c.cmd.Context(), k)
		results = append(results, result)
		if result.Outcome == plugincheck.Failed && len(k.Needs) == 0 {
			return results, fmt.Errorf("%s cannot be judged: %s", c.args[0], result.Reason)
		}
		if !c.Machine() {
			if err := o.tellResult(c, result); err != nil {
				return results, err
			}
		}
	}
	if !c.Machine() {
		err = tellResults(c, r, results)
	}
	return results, err
}

func (o *pluginTest) tellResult(c *call, r plugincheck.Result) error {
	switch {
	case r.Outcome == plugincheck.Failed:
		return c.tell("FAILED   %s: %s\n         %s", r.Check.ID, r.Check.Title, r.Reason)
	case r.Outcome == plugincheck.Passed && o.all:
		return c.tell("passed   %s: %s (%v)", r.Check.ID, r.Check.Title, r.Took.Round(time.Millisecond))
	}
	return nil
}

// tellResults prints the checks that were left out, by their reasons, and the sums.
func tellResults(c *call, r *plugincheck.Runner, results []plugincheck.Result) error {
	ids := map[string][]string{}
	var reasons []string
	for _, result := range results {
		if result.Outcome != plugincheck.Skipped {
			continue
		}
		if ids[result.Reason] == nil {
			reasons = append(reasons, result.Reason)
		}
		ids[result.Reason] = append(ids[result.Reason], result.Check.ID)
	}
	for _, reason := range reasons {
		if err := c.tell("left out %s:\n         %s", strings.Join(ids[reason], ", "), reason); err != nil {
			return err
		}
	}
	passed, failed, skipped := countResults(results)
	return c.tell("%s %s: %d checks passed, %d failed, %d left out (seed %d)", r.Info().Name, r.Info().Version, passed, failed, skipped, r.Seed())
}

func (o *pluginTest) print(c *call, results []plugincheck.Result, fields []string) error {
	chosen, err := report.Select(resultFields, fields, "")
	if err != nil {
		return err
	}
	return report.List(c.cmd.OutOrStdout(), c.Options, report.Build("checks", "check", chosen, results))
}

func countResults(results []plugincheck.Result) (passed, failed, skipped int) {
	for _, r := range results {
		switch r.Outcome {
		case plugincheck.Passed:
			passed++
		case plugincheck.Failed:
			failed++
		case plugincheck.Skipped:
			skipped++
		}
	}
	return passed, failed, skipped
}

func verdict(program string, results []plugincheck.Result) error {
	if _, failed, _ := countResults(results); failed > 0 {
		return fmt.Errorf("%s fails %d of %d checks", program, failed, len(results))
	}
	return nil
}
