package main

import (
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// pluginFile is a plugin as a user names it: NAME=PATH, optionally with
// ",sha256=HEX" behind it.
type pluginFile struct {
	name, path string
	sha256     []byte
}

func parsePlugin(s string) (pluginFile, error) {
	fail := func(why string) (pluginFile, error) {
		return pluginFile{}, usageError{fmt.Errorf("plugin %q: %s; write NAME=PATH[,sha256=HEX]", s, why)}
	}
	name, rest, ok := strings.Cut(s, "=")
	if !ok || name == "" || rest == "" {
		return fail("no name or no path")
	}
	path, sum, pinned := strings.Cut(rest, ",sha256=")
	p := pluginFile{name: name, path: path}
	if pinned {
		var err error
		if p.sha256, err = hex.DecodeString(sum); err != nil || len(p.sha256) != 32 {
			return fail("the SHA-256 is not 64 hexadecimal digits")
		}
	}
	return p, nil
}

// findPlugins reads what the user named; with nothing named it takes those of
// defaults that dir has, called by the name behind prefix.
func findPlugins(named []string, dir, prefix string, defaults ...string) ([]pluginFile, error) {
	var out []pluginFile
	for _, s := range named {
		p, err := parsePlugin(s)
		if err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	if len(out) > 0 {
		return out, nil
	}
	for _, name := range defaults {
		path := filepath.Join(dir, prefix+name)
		if _, err := os.Stat(path); err == nil {
			out = append(out, pluginFile{name: name, path: path})
		}
	}
	if len(out) == 0 {
		return nil, usageError{fmt.Errorf("no plugin %s{%s} in %s; name the folder with --plugin-dir", prefix, strings.Join(defaults, ","), dir)}
	}
	return out, nil
}

// defaultPluginDir is the folder of this executable.
func defaultPluginDir() string {
	exe, err := os.Executable()
	if err != nil {
		return "."
	}
	if real, err := filepath.EvalSymlinks(exe); err == nil {
		exe = real
	}
	return filepath.Dir(exe)
}
