package core

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
)

func TestOptions(t *testing.T) {
	for _, c := range []struct {
		option, value string
		errno         syscall.Errno
		text          string // of the error, or of the file afterwards
	}{
		{"mode", "active-backup\n", 0, "active-backup 1"},
		{"mode", "1", 0, "active-backup 1"},
		{"mode", "balance-rr", syscall.EOPNOTSUPP, "Only active-backup mode is supported"},
		{"mode", "6", syscall.EOPNOTSUPP, "Only active-backup mode is supported"},
		{"mode", "7", syscall.EINVAL, "option mode: invalid value (7)"},
		{"mode", "", syscall.EINVAL, "option mode: invalid value ()"},
		{"miimon", "250", 0, "250"},
		{"miimon", "-1", syscall.EINVAL, "option miimon: invalid value (-1), option miimon: allowed values 0 - 2147483647"},
		{"miimon", "99999999999", syscall.EINVAL, "option miimon: invalid value (99999999999), option miimon: allowed values 0 - 2147483647"},
		{"miimon", "fast", syscall.EINVAL, "option miimon: invalid value (fast)"},
		{"updelay", "250", 0, "200"},
		{"downdelay", "300", 0, "300"},
		{"peer_notif_delay", "100", 0, "100"},
		{"use_carrier", "1", 0, "1"},
		{"use_carrier", "0", syscall.EINVAL, "option use_carrier: invalid value (0), a carrier is the only link state there is"},
		{"fail_over_mac", "active", 0, "active 1"},
		{"fail_over_mac", "2", 0, "follow 2"},
		{"fail_over_mac", "3", syscall.EINVAL, "option fail_over_mac: invalid value (3)"},
		{"primary_reselect", "failure", 0, "failure 2"},
		{"arp_validate", "filter_backup", 0, "filter_backup 6"},
		{"arp_validate", "6", 0, "filter_backup 6"},
		{"arp_all_targets", "all", 0, "all 1"},
		{"arp_all_targets", "some", syscall.EINVAL, "option arp_all_targets: invalid value (some)"},
		{"num_grat_arp", "255", 0, "255"},
		{"num_unsol_na", "256", syscall.EINVAL, "option num_unsol_na: invalid value (256), option num_unsol_na: allowed values 0 - 255"},
		{"resend_igmp", "0", 0, "0"},
		{"arp_missed_max", "0", syscall.EINVAL, "option arp_missed_max: invalid value (0), option arp_missed_max: allowed values 1 - 255"},
		{"arp_ip_target", "+10.1.2.3", 0, "10.1.2.3"},
		{"arp_ip_target", "10.1.2.3", syscall.EPERM, "no command found in arp_ip_targets file - use +<addr> or -<addr>"},
		{"arp_ip_target", "+0.0.0.0", syscall.EINVAL, "invalid ARP target 0.0.0.0 specified for addition"},
		{"arp_ip_target", "+255.255.255.255", syscall.EINVAL, "invalid ARP target 255.255.255.255 specified for addition"},
		{"arp_ip_target", "+fe80::1", syscall.EINVAL, "invalid ARP target fe80::1 specified for addition"},
		{"arp_ip_target", "-10.1.2.3", syscall.EINVAL, "unable to remove nonexistent ARP target 10.1.2.3"},
		{"mii_status", "up", syscall.EACCES, "option mii_status: cannot be set"},
		{"primary", strings.Repeat("x", 16), syscall.EINVAL, "option primary: invalid value (xxxxxxxxxxxxxxxx)"},
		{"miimon", strings.Repeat("1", 1<<20), syscall.EINVAL, "option miimon: invalid value (longer than 4096 bytes)"},
	} {
		m := newSim(t, "miimon=100").m
		m.SetUp(false, t0)
		err := m.Set(c.option, c.value, t0)
		name := c.option + " " + shortenInput(c.value)
		switch {
		case c.errno == 0 && err != nil:
			t.Errorf("%s: %v", name, err)
		case c.errno == 0 && m.Show(c.option) != c.text:
			t.Errorf("%s: shows %q, want %q", name, m.Show(c.option), c.text)
		case c.errno != 0 && (!errors.Is(err, c.errno) || err.Error() != c.text):
			t.Errorf("%s: %v, want %v %q", name, err, c.errno, c.text)
		}
	}
}

func TestOptions_ThatExcludeEachOther(t *testing.T) {
	m := New()
	if err := m.Set("updelay", "100", t0); !errors.Is(err, syscall.EPERM) || err.Error() != "Unable to set up delay as MII monitoring is disabled" {
		t.Errorf("updelay without miimon: %v", err)
	}
	must := func(option, value string) {
		t.Helper()
		if err := m.Set(option, value, t0); err != nil {
			t.Fatal(err)
		}
	}
	must("miimon", "100")
	must("updelay", "200")
	must("miimon", "50")
	if got := m.Show("updelay"); got != "100" { // kept as a multiple of miimon
		t.Errorf("updelay is %s after miimon was halved, want 100", got)
	}
	must("arp_interval", "200")
	if got := m.Show("miimon"); got != "0" {
		t.Errorf("miimon is %s beside arp_interval, want 0", got)
	}
	must("arp_validate", "all")
	must("miimon", "100")
	if i, v := m.Show("arp_interval"), m.Show("arp_validate"); i != "0" || v != "none 0" {
		t.Errorf("arp_interval %s, arp_validate %s beside miimon, want 0 and none 0", i, v)
	}
}

func TestOptions_WithSlaves(t *testing.T) {
	s := newSim(t)
	s.add("ib0")
	for option, value := range map[string]string{"mode": "1", "fail_over_mac": "none"} {
		err := s.m.Set(option, value, t0)
		if want := "option " + option + ": unable to set because the bond device has slaves"; !errors.Is(err, syscall.ENOTEMPTY) || err.Error() != want {
			t.Errorf("%s with slaves: %v, want ENOTEMPTY %q", option, err, want)
		}
	}
	s.m.Remove("ib0", t0)
	if err := s.m.Set("mode", "1", t0); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("mode of a bond that is up: %v, want EBUSY", err)
	}
}

func TestTargetTable_IsFullAt16(t *testing.T) {
	m := New()
	for i := range MaxTargets {
		if err := m.Set("arp_ip_target", fmt.Sprintf("+10.0.0.%d", i+1), t0); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.Set("arp_ip_target", "+10.0.0.3", t0); err == nil || err.Error() != "ARP target 10.0.0.3 is already present" {
		t.Errorf("the same target again: %v", err)
	}
	if err := m.Set("arp_ip_target", "+10.0.0.99", t0); !errors.Is(err, syscall.EINVAL) || err.Error() != "ARP target table is full!" {
		t.Errorf("the 17th target: %v, want EINVAL", err)
	}
	if err := m.Set("arp_ip_target", "-10.0.0.3", t0); err != nil {
		t.Error(err)
	}
}

func FuzzSet(f *testing.F) {
	f.Add("arp_ip_target", "+10.0.0.1")
	f.Add("mode", "4\n")
	f.Fuzz(func(t *testing.T, option, value string) {
		m := New()
		m.Add(Slave{Name: "ib0", Carrier: true}, t0)
		before := m.Show(option)
		if err := m.Set(option, value, t0); err != nil {
			var e *Error
			if !errors.As(err, &e) || e.Errno == 0 {
				t.Fatalf("%v has no errno", err)
			}
			if m.Show(option) != before {
				t.Fatalf("a refused write changed %s", option)
			}
		}
	})
}
