package server

import (
	"reflect"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/confine"
)

// A plugin may open what any session's names can lead to, and nothing else.
func TestFolderOfAPlugin(t *testing.T) {
	for path, want := range map[string]string{
		"/srv":                          "/srv",
		"/srv/%SESSNAME%":               "/srv/",
		"/srv/%SESSNAME%/more":          "/srv/",
		"/srv/%IDENTITY%":               "/srv/",
		"/srv/%IDENTITY%/%SESSNAME%":    "/srv/",
		"/srv/%SESSNAME%/%IDENTITY%":    "/srv/",
		"/srv/of-%IDENTITY%/disks":      "/srv/",
		"images/%IDENTITY%":             "images/",
		"%IDENTITY%":                    ".",
		"/srv/%IDENTITY%-%IDENTITY%/x/": "/srv/",
	} {
		if got := commonFolder(path); got != want {
			t.Errorf("%s: %s, not %s", path, got, want)
		}
		c := Config{SearchPath: path, Confine: confine.Config{Mode: confine.Try, Launcher: []string{"x"}}}
		p, err := c.pluginProfile("fileio")
		if err != nil {
			t.Fatal(err)
		}
		if rules := []confine.Rule{{Path: want, Access: confine.Write, Required: true}}; !reflect.DeepEqual(p.Files, rules) {
			t.Errorf("%s: %v", path, p.Files)
		}
	}
	for _, off := range []Config{{}, {Confine: confine.Config{Mode: confine.Off}}} {
		if p, err := off.pluginProfile("fileio"); p != nil || err != nil {
			t.Errorf("not confined: %v, %v", p, err)
		}
	}
}
