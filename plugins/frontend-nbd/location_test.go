package main

import (
	"net/url"
	"testing"
)

func TestEscapePath(t *testing.T) {
	for path, want := range map[string]string{
		"/run/rnbd/nbd.sock": "/run/rnbd/nbd.sock", "/my disks/nbd.sock": "/my%20disks/nbd.sock", "/a+b&c=d%#?.sock": "/a%2Bb%26c%3Dd%25%23%3F.sock",
	} {
		got := escapePath(path)
		if got != want {
			t.Errorf("%q is escaped as %q, want %q", path, got, want)
		}
		u, err := url.Parse("nbd+unix:///d?socket=" + got)
		if err != nil || u.Query().Get("socket") != path {
			t.Errorf("%q is read as %q, %v", got, u.Query().Get("socket"), err)
		}
	}
}
