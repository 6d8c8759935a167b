package main

import (
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// fileEntry is a file or a folder of a package. Links do not occur.
type fileEntry struct {
	path string // without a slash in front; of a folder, without one behind
	mode int64
	dir  bool
	body []byte
}

func regularFile(name string, body []byte) fileEntry {
	return fileEntry{path: name, mode: 0o644, body: body}
}

// readTree returns the files below dir, sorted, with prefix in front of their
// paths.
func readTree(dir, prefix string) (all []fileEntry, err error) {
	err = filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		st, err := d.Info()
		if err != nil {
			return err
		}
		if !st.Mode().IsRegular() {
			return fmt.Errorf("%s is no regular file", name)
		}
		body, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, name)
		e := regularFile(path.Join(prefix, filepath.ToSlash(rel)), body)
		if st.Mode()&0o100 != 0 {
			e.mode = 0o755
		}
		all = append(all, e)
		return err
	})
	return all, err
}

// isConfig reports whether users change the file.
func isConfig(name string) bool { return strings.HasPrefix(name, "etc/") }

// isProgram reports whether the file may be linked with modules of others.
func isProgram(name string) bool { return strings.HasPrefix(name, "usr/bin/") }

// withFolders returns the entries with the folders that lead to them, sorted.
func withFolders(files []fileEntry, more ...string) []fileEntry {
	out := slices.Clone(files)
	seen := map[string]bool{}
	for _, f := range files {
		if f.dir {
			seen[f.path] = true
		}
	}
	add := func(dir string) {
		for ; dir != "." && !seen[dir]; dir = path.Dir(dir) {
			seen[dir] = true
			out = append(out, fileEntry{path: dir, mode: 0o755, dir: true})
		}
	}
	for _, f := range files {
		add(path.Dir(f.path))
	}
	for _, dir := range more {
		add(dir)
	}
	slices.SortFunc(out, func(a, b fileEntry) int { return strings.Compare(a.path, b.path) })
	return out
}
