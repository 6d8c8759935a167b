package client

import (
	"fmt"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/loopdev"
)

func TestChoose(t *testing.T) {
	with := func(def string, names ...string) *Client {
		c := &Client{cfg: Config{Frontend: def}}
		for _, n := range names {
			c.frontends = append(c.frontends, &frontend{cfg: FrontendConfig{Name: n}})
		}
		return c
	}
	loops := func(c *Client) *Client {
		c.cfg.LoopTool = loopdev.Tool{"tool"}
		for _, f := range c.frontends {
			if f.cfg.Name == "fuse" {
				f.cfg.MountDir = "/run/disks"
			}
		}
		return c
	}
	for _, v := range []struct {
		name   string
		client *Client
		asked  string
		want   string
		errno  blk.Errno
	}{
		{"auto takes a disk before a socket", with("", "nbd", "ublk"), "auto", "ublk nbd(auto)", 0},
		{"auto takes a loop device before a socket", loops(with("", "nbd", "ublk", "fuse")), "auto", "ublk nbd(yes) fuse(loop) nbd(no)", 0},
		{"fuse-loop", loops(with("", "fuse")), "fuse-loop", "fuse(loop)", 0},
		{"fuse-loop without files", with("", "nbd"), "fuse-loop", "", blk.EINVAL},
		{"auto without ublk", with("", "nbd"), "auto", "nbd(auto)", 0},
		{"auto with others only", with("", "vhost", "fuse"), "auto", "vhost", 0},
		{"auto without any", with(""), "auto", "", blk.ENODEV},
		{"default of the daemon", with("nbd-socket", "ublk", "nbd"), "", "nbd(no)", 0},
		{"nbd", with("", "ublk", "nbd"), "nbd", "nbd(auto)", 0},
		{"nbd-socket", with("", "ublk", "nbd"), "nbd-socket", "nbd(no)", 0},
		{"ublk", with("", "ublk", "nbd"), "ublk", "ublk", 0},
		{"a third party's", with("", "ublk", "vhost"), "vhost", "vhost", 0},
		{"one that is not there", with("", "ublk"), "nbd", "", blk.EINVAL},
		{"none", with("", "ublk"), "none", "", 0},
	} {
		got := ""
		choices, err := v.client.listChoices(v.asked)
		for i, c := range choices {
			if i > 0 {
				got += " "
			}
			got += c.fe.cfg.Name
			if a := c.settings[settingAttach]; a != "" {
				got += "(" + a + ")"
			}
			if c.name() == FrontendFuseLoop {
				got += "(loop)"
			}
		}
		if got != v.want || v.errno == 0 && err != nil || v.errno != 0 && blk.ToErrno(err) != v.errno {
			t.Errorf("%s: %q, %v; want %q", v.name, got, err, v.want)
		}
	}
}

func TestChoose_SettingsOfTheUserWin(t *testing.T) {
	d := &Device{options: map[string]string{"attach": "no", "number": "3"}, choices: []frontendChoice{{settings: map[string]string{"attach": "auto"}}}}
	if s := d.frontendSettings(); s["attach"] != "no" || s["number"] != "3" || len(d.options) != 2 {
		t.Errorf("settings %v", s)
	}
}

func TestUnavailable(t *testing.T) {
	for errno, want := range map[error]bool{syscall.ENODEV: true, syscall.EACCES: true, syscall.EPERM: true, syscall.EINVAL: false, syscall.EIO: false, syscall.EEXIST: false} {
		if got := isUnavailable(fmt.Errorf("add: %w", errno)); got != want {
			t.Errorf("%v: %v", errno, got)
		}
	}
}
