package core

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Values of the options that are words. Their numbers are Linux's.
const (
	ReselectAlways  = 0
	ReselectBetter  = 1
	ReselectFailure = 2

	FailOverMACNone   = 0
	FailOverMACActive = 1
	FailOverMACFollow = 2
)

// Validate is arp_validate: bit 0 for the active slave, bit 1 for backups, bit 2
// to count nothing but ARP.
type Validate int

func (v Validate) checksActive() bool  { return v&1 != 0 }
func (v Validate) checksBackups() bool { return v&2 != 0 }
func (v Validate) filtersFrames() bool { return v&4 != 0 }

// MaxTargets is how many addresses arp_ip_target takes.
const MaxTargets = 16

// Options are those of a bond. updelay, downdelay and peer_notif_delay are
// multiples of miimon and change with it, as in Linux.
type Options struct {
	Miimon          time.Duration
	UseCarrier      bool
	ArpInterval     time.Duration
	ArpTargets      []netip.Addr
	ArpValidate     Validate
	ArpAllTargets   bool
	MissedMax       int
	Primary         string // may name a slave to come
	PrimaryReselect int
	FailOverMAC     int
	NumPeerNotif    int
	ResendIGMP      int

	updelay, downdelay, peerNotifDelay int // in units of Miimon
}

// Defaults returns Linux's defaults: no monitor is on.
func Defaults() Options {
	return Options{UseCarrier: true, MissedMax: 2, NumPeerNotif: 1, ResendIGMP: 1}
}

// Updelay is how long a link that is back has to stay before it is used.
func (o *Options) Updelay() time.Duration { return time.Duration(o.updelay) * o.Miimon }

// Downdelay is how long a carrier has to be lost before the link is given up.
func (o *Options) Downdelay() time.Duration { return time.Duration(o.downdelay) * o.Miimon }

// PeerNotifDelay is the time between two notifications of peers.
func (o *Options) PeerNotifDelay() time.Duration {
	return time.Duration(o.peerNotifDelay) * o.Miimon
}

// monitorInterval is that of the monitor that runs.
func (o *Options) monitorInterval() time.Duration {
	if o.Miimon > 0 {
		return o.Miimon
	}
	return o.ArpInterval
}

// Options returns a copy of the options.
func (m *Machine) Options() Options {
	o := m.opt
	o.ArpTargets = slices.Clone(o.ArpTargets)
	return o
}

// SetFailOverMAC sets fail_over_mac without the check for slaves, as enslaving
// a device does that cannot change its address.
func (m *Machine) SetFailOverMAC(v int) { m.opt.FailOverMAC = v }

// optionFile is one file of the folder bonding.
type optionFile struct {
	show func(*Machine) string
	set  func(m *Machine, value string, now time.Time) error
}

var options map[string]optionFile

func init() {
	options = map[string]optionFile{
		"mode":             {showMode, setMode},
		"primary":          {(*Machine).showPrimary, (*Machine).setPrimary},
		"active_slave":     {(*Machine).Active, func(m *Machine, v string, now time.Time) error { return m.SetActive(v, now) }},
		"primary_reselect": wordOption("primary_reselect", []string{"always", "better", "failure"}, func(m *Machine) *int { return &m.opt.PrimaryReselect }, (*Machine).reselect),
		"fail_over_mac":    wordOption("fail_over_mac", []string{"none", "active", "follow"}, func(m *Machine) *int { return &m.opt.FailOverMAC }, nil),
		"arp_validate": wordOption("arp_validate", []string{"none", "active", "backup", "all", "filter", "filter_active", "filter_backup"},
			func(m *Machine) *int { return (*int)(&m.opt.ArpValidate) }, nil),
		"arp_all_targets":  {showAllTargets, setAllTargets},
		"use_carrier":      {func(m *Machine) string { return formatBool(m.opt.UseCarrier) }, setUseCarrier},
		"num_grat_arp":     numberOption("num_grat_arp", 0, 255, func(m *Machine) *int { return &m.opt.NumPeerNotif }),
		"num_unsol_na":     numberOption("num_unsol_na", 0, 255, func(m *Machine) *int { return &m.opt.NumPeerNotif }),
		"resend_igmp":      numberOption("resend_igmp", 0, 255, func(m *Machine) *int { return &m.opt.ResendIGMP }),
		"arp_missed_max":   numberOption("arp_missed_max", 1, 255, func(m *Machine) *int { return &m.opt.MissedMax }),
		"miimon":           {func(m *Machine) string { return formatMillis(m.opt.Miimon) }, (*Machine).setMiimon},
		"arp_interval":     {func(m *Machine) string { return formatMillis(m.opt.ArpInterval) }, (*Machine).setArpInterval},
		"updelay":          delayOption("updelay", "up delay", func(m *Machine) *int { return &m.opt.updelay }),
		"downdelay":        delayOption("downdelay", "down delay", func(m *Machine) *int { return &m.opt.downdelay }),
		"peer_notif_delay": delayOption("peer_notif_delay", "peer notification delay", func(m *Machine) *int { return &m.opt.peerNotifDelay }),
		"arp_ip_target":    {(*Machine).showTargets, (*Machine).setTarget},
		"mii_status":       {func(m *Machine) string { return upDown(m.carrier) }, nil},
	}
}

// OptionNames returns the names of all options.
func OptionNames() []string {
	var names []string
	for n := range options {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// Settable reports whether an option can be set.
func Settable(name string) bool { return options[name].set != nil }

// Show returns an option as its file has it, without the newline. An option
// that is not known is "".
func (m *Machine) Show(name string) string {
	if o, ok := options[name]; ok {
		return o.show(m)
	}
	return ""
}

// MaxValue is the longest value of an option in bytes; Linux's is a page.
const MaxValue = 4096

// Set sets an option from the text that was written to its file. The errors are
// of type *Error.
func (m *Machine) Set(name, value string, now time.Time) error {
	o, ok := options[name]
	if !ok || o.set == nil {
		return Errorf(syscall.EACCES, "option %s: cannot be set", name)
	}
	if len(value) > MaxValue {
		return Errorf(syscall.EINVAL, "option %s: invalid value (longer than %d bytes)", name, MaxValue)
	}
	return o.set(m, strings.TrimSpace(value), now)
}

func invalidValue(name, value string) error {
	return Errorf(syscall.EINVAL, "option %s: invalid value (%s)", name, shortenInput(value))
}

// shortenInput keeps long input out of logs.
func shortenInput(s string) string {
	if len(s) > 32 {
		return s[:32] + "..."
	}
	return s
}

func parseNumber(name, value string, lo, hi int) (int, error) {
	v, err := strconv.Atoi(value)
	if err != nil {
		return 0, invalidValue(name, value)
	}
	if v < lo || v > hi {
		return 0, Errorf(syscall.EINVAL, "option %s: invalid value (%s), option %s: allowed values %d - %d", name, value, name, lo, hi)
	}
	return v, nil
}

const maxInt = 1<<31 - 1

func numberOption(name string, lo, hi int, field func(*Machine) *int) optionFile {
	return optionFile{
		func(m *Machine) string { return strconv.Itoa(*field(m)) },
		func(m *Machine, v string, _ time.Time) error {
			n, err := parseNumber(name, v, lo, hi)
			if err == nil {
				*field(m) = n
			}
			return err
		},
	}
}

// wordOption is an option with values that have a name and a number.
func wordOption(name string, words []string, field func(*Machine) *int, after func(*Machine, time.Time)) optionFile {
	return optionFile{
		func(m *Machine) string { return words[*field(m)] + " " + strconv.Itoa(*field(m)) },
		func(m *Machine, v string, now time.Time) error {
			i := slices.Index(words, v)
			if i < 0 {
				if n, err := strconv.Atoi(v); err == nil && n >= 0 && n < len(words) {
					i = n
				}
			}
			if i < 0 {
				return invalidValue(name, v)
			}
			if name == "fail_over_mac" && len(m.slaves) > 0 {
				return Errorf(syscall.ENOTEMPTY, "option %s: unable to set because the bond device has slaves", name)
			}
			*field(m) = i
			if after != nil {
				after(m, now)
			}
			return nil
		},
	}
}

func (m *Machine) reselect(now time.Time) {
	m.selectActive(now)
	m.announceIfUp(now)
}

// delayOption is an option in milliseconds that is kept as a multiple of miimon.
func delayOption(name, words string, field func(*Machine) *int) optionFile {
	return optionFile{
		func(m *Machine) string { return formatMillis(time.Duration(*field(m)) * m.opt.Miimon) },
		func(m *Machine, v string, _ time.Time) error {
			n, err := parseNumber(name, v, 0, maxInt)
			if err != nil {
				return err
			}
			if m.opt.Miimon == 0 {
				return Errorf(syscall.EPERM, "Unable to set %s as MII monitoring is disabled", words)
			}
			unit := int(m.opt.Miimon.Milliseconds())
			*field(m) = n / unit
			if n%unit != 0 {
				m.log(nil, "%s (%d) is not a multiple of miimon (%d), value rounded to %d ms", words, n, unit, n/unit*unit)
			}
			return nil
		},
	}
}

var modes = []string{"balance-rr", "active-backup", "balance-xor", "broadcast", "802.3ad", "balance-tlb", "balance-alb"}

func showMode(*Machine) string { return "active-backup 1" }

func setMode(m *Machine, v string, _ time.Time) error {
	i := slices.Index(modes, v)
	if n, err := strconv.Atoi(v); err == nil && n >= 0 && n < len(modes) {
		i = n
	}
	switch {
	case i < 0:
		return invalidValue("mode", v)
	case len(m.slaves) > 0:
		return Errorf(syscall.ENOTEMPTY, "option mode: unable to set because the bond device has slaves")
	case m.up:
		return Errorf(syscall.EBUSY, "option mode: unable to set because the bond device is up")
	case i != 1:
		return Errorf(syscall.EOPNOTSUPP, "Only active-backup mode is supported")
	}
	return nil
}

func (m *Machine) showPrimary() string { return m.Primary() }

func showAllTargets(m *Machine) string {
	if m.opt.ArpAllTargets {
		return "all 1"
	}
	return "any 0"
}

func setAllTargets(m *Machine, v string, _ time.Time) error {
	switch v {
	case "any", "0":
		m.opt.ArpAllTargets = false
	case "all", "1":
		m.opt.ArpAllTargets = true
	default:
		return invalidValue("arp_all_targets", v)
	}
	return nil
}

func setUseCarrier(m *Machine, v string, _ time.Time) error {
	switch v {
	case "1", "on":
		return nil
	case "0", "off":
		return Errorf(syscall.EINVAL, "option use_carrier: invalid value (%s), a carrier is the only link state there is", v)
	}
	return invalidValue("use_carrier", v)
}

func (m *Machine) setMiimon(v string, now time.Time) error {
	n, err := parseNumber("miimon", v, 0, maxInt)
	if err != nil {
		return err
	}
	m.opt.Miimon = time.Duration(n) * time.Millisecond
	m.nextMII = now
	if n > 0 && m.opt.ArpInterval > 0 {
		m.log(nil, "MII monitoring cannot be used with ARP monitoring - disabling ARP monitoring...")
		m.opt.ArpInterval, m.opt.ArpValidate, m.probing = 0, 0, nil
	}
	return nil
}

func (m *Machine) setArpInterval(v string, now time.Time) error {
	n, err := parseNumber("arp_interval", v, 0, maxInt)
	if err != nil {
		return err
	}
	m.opt.ArpInterval = time.Duration(n) * time.Millisecond
	m.nextARP = now
	if n == 0 {
		m.probing = nil
		return nil
	}
	if m.opt.Miimon > 0 {
		m.log(nil, "ARP monitoring cannot be used with MII monitoring. Disabling MII monitoring")
		m.opt.Miimon = 0
	}
	if len(m.opt.ArpTargets) == 0 {
		m.log(nil, "ARP monitoring has been set up, but no ARP targets have been specified")
	}
	return nil
}

func (m *Machine) showTargets() string {
	var t []string
	for _, a := range m.opt.ArpTargets {
		t = append(t, a.String())
	}
	return strings.Join(t, " ")
}

// setTarget takes +a.b.c.d and -a.b.c.d.
func (m *Machine) setTarget(v string, now time.Time) error {
	if v == "" || v[0] != '+' && v[0] != '-' {
		return Errorf(syscall.EPERM, "no command found in arp_ip_targets file - use +<addr> or -<addr>")
	}
	word := map[byte]string{'+': "addition", '-': "removal"}[v[0]]
	a, err := netip.ParseAddr(v[1:])
	if err != nil || !a.Is4() || a.IsUnspecified() || a == netip.AddrFrom4([4]byte{255, 255, 255, 255}) {
		return Errorf(syscall.EINVAL, "invalid ARP target %s specified for %s", shortenInput(v[1:]), word)
	}
	i := slices.Index(m.opt.ArpTargets, a)
	if v[0] == '-' {
		return m.removeTarget(i, a)
	}
	switch {
	case i >= 0:
		return Errorf(syscall.EINVAL, "ARP target %s is already present", a)
	case len(m.opt.ArpTargets) == MaxTargets:
		return Errorf(syscall.EINVAL, "ARP target table is full!")
	}
	m.opt.ArpTargets = append(m.opt.ArpTargets, a)
	for _, s := range m.slaves {
		s.targetRx = append(s.targetRx, now)
	}
	return nil
}

func (m *Machine) removeTarget(i int, a netip.Addr) error {
	if i < 0 {
		return Errorf(syscall.EINVAL, "unable to remove nonexistent ARP target %s", a)
	}
	m.opt.ArpTargets = slices.Delete(m.opt.ArpTargets, i, i+1)
	for _, s := range m.slaves {
		s.targetRx = slices.Delete(s.targetRx, i, i+1)
	}
	if len(m.opt.ArpTargets) == 0 && m.opt.ArpInterval > 0 {
		m.log(nil, "Removing last arp target with arp_interval on")
	}
	return nil
}

func formatMillis(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }

func formatBool(b bool) string {
	if b {
		return "1"
	}
	return "0"
}

func upDown(b bool) string {
	if b {
		return "up"
	}
	return "down"
}
