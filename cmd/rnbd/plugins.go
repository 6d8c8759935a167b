package main

import (
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// pluginFile is a plugin as a user names it: NAME=PATH, optionally with
// ",sha256=HEX" behind it.
type pluginFile struct {
	name, path string
	sha256     []byte
	settings   map[string]string
}

func parsePlugin(s string) (pluginFile, error) {
	fail := func(why string) (pluginFile, error) {
		return pluginFile{}, usageError{fmt.Errorf("plugin %q: %s; write NAME=PATH[,sha256=HEX]", s, why)}
	}
	name, rest, ok := strings.Cut(s, "=")
	path, sum, pinned := strings.Cut(rest, ",sha256=")
	if !ok || name == "" || path == "" {
		return fail("no name or no path")
	}
	p := pluginFile{name: name, path: path}
	if pinned {
		var err error
		if p.sha256, err = hex.DecodeString(sum); err != nil || len(p.sha256) != 32 {
			return fail("the SHA-256 is not 64 hexadecimal digits")
		}
	}
	return p, nil
}

// pluginPatience is the time for plugins to start before a daemon serves without them.
const pluginPatience = 5 * time.Second

// noPlugin in place of a path leaves a default plugin out.
const noPlugin = "none"

// findPlugins returns the default plugins that dir has, as files called prefix
// and name, and the named ones. A named plugin replaces the default of its name.
func findPlugins(named []string, dir, prefix string, defaults ...string) ([]pluginFile, error) {
	var given []pluginFile
	for _, s := range named {
		p, err := parsePlugin(s)
		if err != nil {
			return nil, err
		}
		given = append(given, p)
	}
	if err := noneTwice(given); err != nil {
		return nil, err
	}
	var out []pluginFile
	for _, name := range defaults {
		path := filepath.Join(dir, prefix+name)
		if slices.ContainsFunc(given, func(p pluginFile) bool { return p.name == name }) {
			continue
		}
		if _, err := os.Stat(path); err == nil {
			out = append(out, pluginFile{name: name, path: path})
		}
	}
	for _, p := range given {
		if p.path != noPlugin {
			out = append(out, p)
		}
	}
	if len(out) == 0 {
		return nil, usageError{fmt.Errorf("no plugin %s{%s} in %s; name the folder with --plugin-dir", prefix, strings.Join(defaults, ","), dir)}
	}
	return out, nil
}

func noneTwice(files []pluginFile) error {
	seen := map[string]bool{}
	for _, p := range files {
		if seen[p.name] {
			return usageError{fmt.Errorf("plugin %q is named twice", p.name)}
		}
		seen[p.name] = true
	}
	return nil
}

// giveSettings reads NAME:KEY=VALUE and gives them to the plugins of the names.
func giveSettings(files []pluginFile, in []string) error {
	for _, s := range in {
		name, kv, ok := strings.Cut(s, ":")
		key, value, ok2 := strings.Cut(kv, "=")
		if !ok || !ok2 || name == "" || key == "" {
			return usageError{fmt.Errorf("setting %q: write NAME:KEY=VALUE", s)}
		}
		i := slices.IndexFunc(files, func(p pluginFile) bool { return p.name == name })
		if i < 0 {
			return usageError{fmt.Errorf("setting %q: there is no plugin %q", s, name)}
		}
		if files[i].settings == nil {
			files[i].settings = map[string]string{}
		}
		files[i].settings[key] = value
	}
	return nil
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
