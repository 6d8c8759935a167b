package main

import (
	"bytes"
	"debug/buildinfo"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/mod/module"
)

// ours begins the names of modules under the licence of the repository.
const ours = "github.com/rnbd-go/rnbd/"

// licenceFinder finds texts of licences.
type licenceFinder struct {
	cache, goroot string
	own           []byte // of this repository
}

func newLicences(source string) (l licenceFinder, err error) {
	if l.own, err = os.ReadFile(filepath.Join(source, "LICENSE")); err != nil {
		return l, err
	}
	out, err := exec.Command("go", "env", "GOMODCACHE", "GOROOT").Output()
	if err != nil {
		return l, fmt.Errorf("go env: %w", err)
	}
	l.cache, l.goroot, _ = strings.Cut(strings.TrimSpace(string(out)), "\n")
	return l, nil
}

// textsOf returns the texts that belong to programs: ours, that of Go, and those of
// the modules that they are linked with, in a folder for each module.
func (l licenceFinder) textsOf(programs []fileEntry, dir string) (texts []fileEntry, err error) {
	texts = []fileEntry{regularFile(path.Join(dir, "rnbd", "LICENSE"), l.own)}
	if len(programs) == 0 {
		return texts, nil
	}
	seen := map[string]bool{}
	for _, p := range programs {
		info, err := buildinfo.Read(bytes.NewReader(p.body))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", p.path, err)
		}
		for _, m := range info.Deps {
			if m.Replace != nil {
				m = m.Replace
			}
			if seen[m.Path] || strings.HasPrefix(m.Path, ours) {
				continue
			}
			seen[m.Path] = true
			found, err := l.moduleTexts(m.Path, m.Version)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", p.path, err)
			}
			for _, f := range found {
				texts = append(texts, regularFile(path.Join(dir, m.Path, f.path), f.body))
			}
		}
	}
	std, err := readLicences(l.goroot)
	if err != nil {
		return nil, fmt.Errorf("licence of %s: %w", runtime.Version(), err)
	}
	for _, f := range std {
		texts = append(texts, regularFile(path.Join(dir, "go", f.path), f.body))
	}
	return texts, nil
}

func (l licenceFinder) moduleTexts(name, version string) ([]fileEntry, error) {
	p, err := module.EscapePath(name)
	if err != nil {
		return nil, err
	}
	v, err := module.EscapeVersion(version)
	if err != nil {
		return nil, err
	}
	found, err := readLicences(filepath.Join(l.cache, p+"@"+v))
	if err != nil {
		return nil, fmt.Errorf("module %s %s: %w", name, version, err)
	}
	return found, nil
}

// readLicences returns the licences and notices in the top folder of a module. It
// is an error if there are none.
func readLicences(dir string) (found []fileEntry, err error) {
	all, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, f := range all {
		stem, _, _ := strings.Cut(strings.ToUpper(f.Name()), ".")
		if !f.Type().IsRegular() || !slices.Contains([]string{"LICENSE", "LICENCE", "COPYING", "NOTICE", "PATENTS"}, stem) {
			continue
		}
		body, err := os.ReadFile(filepath.Join(dir, f.Name()))
		if err != nil {
			return nil, err
		}
		found = append(found, regularFile(f.Name(), body))
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("no licence in %s", dir)
	}
	return found, nil
}

// copyrightFile is the file that Debian wants in each package.
func copyrightFile(texts []fileEntry, dir string) []byte {
	var b strings.Builder
	b.WriteString("Copyright: the contributors of rnbd.\nIts source is at https://" + strings.TrimSuffix(ours, "/") + ".\n\n" +
		"It is under the Apache License, version 2.0, see rnbd/LICENSE in the folder\n/" + dir + ",\n" +
		"or /usr/share/common-licenses/Apache-2.0 on Debian systems.\n")
	if len(texts) > 1 {
		b.WriteString("\nThe programs contain the standard library of Go and the modules below. Their\ncopyrights and licences are in that folder; where a licence wants the source to be\nnamed, it is at the address that is the module's name:\n\n")
		for _, t := range texts[1:] {
			b.WriteString("  " + strings.TrimPrefix(t.path, dir+"/") + "\n")
		}
	}
	return []byte(b.String())
}
