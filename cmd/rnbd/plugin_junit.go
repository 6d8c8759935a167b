package main

import (
	"encoding/xml"
	"os"
	"path/filepath"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/plugincheck"
)

// junitSuite is the form of results that services for continuous integration read.
type junitSuite struct {
	XMLName  xml.Name    `xml:"testsuite"`
	Name     string      `xml:"name,attr"`
	Tests    int         `xml:"tests,attr"`
	Failures int         `xml:"failures,attr"`
	Skipped  int         `xml:"skipped,attr"`
	Time     float64     `xml:"time,attr"`
	Seed     junitSeed   `xml:"properties>property"`
	Cases    []junitCase `xml:"testcase"`
}

type junitSeed struct {
	Name  string `xml:"name,attr"`
	Value uint64 `xml:"value,attr"`
}

type junitCase struct {
	Class   string     `xml:"classname,attr"`
	Name    string     `xml:"name,attr"`
	Time    float64    `xml:"time,attr"`
	Failure *junitText `xml:"failure,omitempty"`
	Skipped *junitText `xml:"skipped,omitempty"`
}

type junitText struct {
	Message string `xml:"message,attr"`
	Text    string `xml:",chardata"`
}

func writeJUnit(file, program string, seed uint64, results []plugincheck.Result) error {
	s := junitSuite{Name: filepath.Base(program), Tests: len(results), Seed: junitSeed{"seed", seed}}
	_, s.Failures, s.Skipped = countResults(results)
	for _, r := range results {
		k := junitCase{Class: filepath.Base(program), Name: r.Check.ID, Time: r.Took.Seconds()}
		text := &junitText{Message: r.Reason, Text: r.Check.Title}
		switch r.Outcome {
		case plugincheck.Failed:
			k.Failure = text
		case plugincheck.Skipped:
			k.Skipped = text
		}
		s.Time += r.Took.Seconds()
		s.Cases = append(s.Cases, k)
	}
	b, err := xml.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append([]byte(xml.Header), append(b, '\n')...), 0o644)
}
