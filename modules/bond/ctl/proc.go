package ctl

import (
	"fmt"
	"strings"

	"github.com/rnbd-go/rnbd/modules/bond/core"
	"github.com/rnbd-go/rnbd/modules/bond/dev"
)

// Proc returns the text of /proc/net/bonding/NAME.
func Proc(s dev.Status, version string) string {
	var w strings.Builder
	p := func(format string, args ...any) { fmt.Fprintf(&w, format, args...) }
	o := s.Options
	p("Ethernet Channel Bonding Driver: v%s\n\n", version)
	p("Bonding Mode: fault-tolerance (active-backup)")
	if o.FailOverMAC != core.FailOverMACNone {
		p(" (fail_over_mac %s)", [...]string{"none", "active", "follow"}[o.FailOverMAC])
	}
	p("\nPrimary Slave: %s", orNone(s.Primary))
	if s.Primary != "" {
		p(" (primary_reselect %s)", [...]string{"always", "better", "failure"}[o.PrimaryReselect])
	}
	p("\nCurrently Active Slave: %s\n", orNone(s.Active))
	p("MII Status: %s\n", upDown(s.Carrier))
	p("MII Polling Interval (ms): %d\n", o.Miimon.Milliseconds())
	p("Up Delay (ms): %d\n", o.Updelay().Milliseconds())
	p("Down Delay (ms): %d\n", o.Downdelay().Milliseconds())
	p("Peer Notification Delay (ms): %d\n", o.PeerNotifDelay().Milliseconds())
	if o.ArpInterval > 0 {
		var targets []string
		for _, t := range o.ArpTargets {
			targets = append(targets, " "+t.String())
		}
		p("ARP Polling Interval (ms): %d\n", o.ArpInterval.Milliseconds())
		p("ARP Missed Max: %d\n", o.MissedMax)
		p("ARP IP target/s (n.n.n.n form):%s\n", strings.Join(targets, ","))
		p("NS IPv6 target/s (xx::xx form):\n")
	}
	for _, sl := range s.Slaves {
		w.WriteString(procSlave(sl))
	}
	return w.String()
}

func procSlave(s dev.SlaveStatus) string {
	speed, duplex := "Unknown", "Unknown"
	if s.Speed > 0 {
		speed, duplex = fmt.Sprintf("%d Mbps", s.Speed), "half"
		if s.FullDuplex {
			duplex = "full"
		}
	}
	return fmt.Sprintf("\nSlave Interface: %s\nMII Status: %s\nSpeed: %s\nDuplex: %s\nLink Failure Count: %d\nPermanent HW addr: %s\nSlave queue ID: 0\n",
		s.Name, s.Link, speed, duplex, s.Failures, dev.HW(s.PermAddress))
}

func orNone(name string) string {
	if name == "" {
		return "None"
	}
	return name
}

func upDown(up bool) string {
	if up {
		return "up"
	}
	return "down"
}
