package access

import (
	"errors"
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strings"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// Rule is a rule in its written form. A field without values fits every client
// or name. Of several values one must fit.
type Rule struct {
	// Identity are globs for the identities that the client has proved. Only
	// rules without Identity fit a client without an identity.
	Identity []string `yaml:"identity"`
	// Address are addresses or ranges (10.0.0.0/24) of the client. All paths of
	// its session must fit.
	Address []string `yaml:"address"`
	// Fabric are names of fabrics. All paths of the session must fit.
	Fabric []string `yaml:"fabric"`
	// Session are globs of the name that the client gave its session.
	Session []string `yaml:"session"`
	// Device are globs of names below the search path.
	Device []string `yaml:"device"`
	// Allow is the widest access that the rule allows: none, ro, rw or
	// migration. Each of these words includes those before it.
	Allow string `yaml:"allow"`
	// Role makes the rule one about remote administration: RoleRead, RoleVolumes or
	// RoleAdmin. It has an Identity, perhaps an Address, and nothing about devices.
	Role string `yaml:"role"`
	// QuotaBytes bounds the sum of the sizes of the volumes that an identity of the role
	// volumes has, in bytes. 0: no limit.
	QuotaBytes int64 `yaml:"quota-bytes"`
	// Limits hold for all clients of the rule together.
	Limits `yaml:",inline"`
}

// Client describes a client by the session in which it opens a device.
type Client struct {
	// Identities are the names that the client has proved, the same on all
	// paths. It is empty if the client has proved none.
	Identities []string
	Paths      []Path // of its session, connected or being connected
	Session    string // name chosen by the client, not proved
}

// Path is the client's end of a path.
type Path struct {
	Addr   netip.Addr
	Fabric string
}

// Decision is the result of Rules.Decide.
type Decision struct {
	Allowed bool
	Rule    int    // number of the rule that decided, from 1; 0: no rule fits, or there are none
	Why     string // a sentence for people, without its full stop
}

// Rules are parsed rules. nil, like no rules, allows everything. Rules are
// immutable; all methods may be called by any goroutine.
type Rules struct {
	list    []rule
	devices bool // a rule is about devices
}

type rule struct {
	identity, session, device []glob
	address                   []netip.Prefix
	fabric                    []string
	allow                     int // as level
	text                      string
	limits                    Limits
	administrator             Administrator // with a Role: the rule says nothing about devices
}

// levels are the words of Allow, each after the words that it includes.
var levels = []string{"none", blk.ReadOnly.String(), blk.ReadWrite.String(), blk.Migration.String()}

// MaxRules is the largest number of rules. The bound limits the work of an
// OPEN, which tries them in order.
const MaxRules = 100_000

// New parses rules. The error names the number of the rule, from 1, the field
// and the value.
func New(written []Rule) (*Rules, error) {
	if len(written) > MaxRules {
		return nil, fmt.Errorf("%d rules are more than %d", len(written), MaxRules)
	}
	r := &Rules{}
	for i := range written {
		one, err := written[i].parse()
		if err != nil {
			return nil, fmt.Errorf("rule %d: %w", i+1, err)
		}
		r.list = append(r.list, one)
		r.devices = r.devices || one.administrator.Role == ""
	}
	return r, nil
}

// Check returns the first error of the rule and the name of its field.
func (w *Rule) Check() (field string, err error) {
	_, err = w.parse()
	if bad, ok := errors.AsType[fieldError](err); ok {
		return bad.field, err
	}
	if bad, ok := errors.AsType[limitError](err); ok {
		return bad.field, err
	}
	return "", err
}

// fieldError is a value that a field cannot have.
type fieldError struct {
	field, value string
	err          error
}

func (e fieldError) Error() string { return fmt.Sprintf("%s: %q: %v", e.field, e.value, e.err) }

func (w *Rule) parse() (r rule, err error) {
	r.text, r.limits = w.String(), w.Limits
	for _, f := range []struct {
		name   string
		values []string
		into   *[]glob
	}{{"identity", w.Identity, &r.identity}, {"session", w.Session, &r.session}, {"device", w.Device, &r.device}} {
		for _, v := range f.values {
			g, err := parseGlob(v)
			if f.name == "device" && err == nil {
				g, err = parseGlob(cleanName(v))
			}
			if err != nil {
				return r, fieldError{f.name, v, err}
			}
			*f.into = append(*f.into, g)
		}
	}
	for _, v := range w.Address {
		p, err := parsePrefix(v)
		if err != nil {
			return r, fieldError{"address", v, err}
		}
		r.address = append(r.address, p)
	}
	for _, v := range w.Fabric {
		if v == "" {
			return r, fieldError{"fabric", v, errors.New("it is empty")}
		}
	}
	r.fabric = w.Fabric
	if err := w.checkRole(); err != nil || w.Role != "" {
		r.administrator = Administrator{w.Role, w.QuotaBytes}
		return r, err
	}
	if r.allow = slices.Index(levels, w.Allow); r.allow < 0 {
		return r, fieldError{"allow", w.Allow, errors.New("write none, ro, rw or migration")}
	}
	return r, w.checkLimits()
}

func (w *Rule) checkLimits() error {
	field, err := w.Limits.Check()
	switch {
	case err != nil:
		return limitError{field, err}
	case w.Allow == levels[0] && w.Limits != Limits{}:
		return limitError{"allow", errors.New("allow: a rule that allows nothing has no limits")}
	}
	return nil
}

// limitError is the error of a limit.
type limitError struct {
	field string
	error
}

// parsePrefix parses a range of addresses. A single address is a range of one.
func parsePrefix(s string) (netip.Prefix, error) {
	if !strings.Contains(s, "/") {
		a, err := netip.ParseAddr(s)
		if err != nil {
			return netip.Prefix{}, errors.New("neither an address nor a range as 10.0.0.0/24")
		}
		a = a.Unmap().WithZone("")
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(s)
	switch {
	case err != nil:
		return p, errors.New("neither an address nor a range as 10.0.0.0/24")
	case p.Addr().Is4In6():
		return p, fmt.Errorf("write an IPv4 range without ::ffff")
	case p != p.Masked():
		return p, fmt.Errorf("bits are set beyond the first %d; write %s", p.Bits(), p.Masked())
	}
	return p, nil
}

// String returns the rule in one line, as in YAML.
func (w *Rule) String() string {
	var fields []string
	for _, f := range []struct {
		name   string
		values []string
	}{{"identity", w.Identity}, {"address", w.Address}, {"fabric", w.Fabric}, {"session", w.Session}, {"device", w.Device}} {
		if len(f.values) > 0 {
			fields = append(fields, f.name+": ["+strings.Join(f.values, ", ")+"]")
		}
	}
	if w.Role != "" {
		fields = append(fields, "role: "+w.Role)
		if w.QuotaBytes != 0 {
			fields = append(fields, fmt.Sprintf("quota-bytes: %d", w.QuotaBytes))
		}
		return strings.Join(fields, ", ")
	}
	fields = append(fields, "allow: "+w.Allow)
	if limits := w.Limits.String(); limits != "" {
		fields = append(fields, limits)
	}
	return strings.Join(fields, ", ")
}

// Len returns the number of rules. It returns 0 for nil.
func (r *Rules) Len() int {
	if r == nil {
		return 0
	}
	return len(r.list)
}

// Text returns rule number n, from 1, in one line.
func (r *Rules) Text(n int) string { return r.list[n-1].text }

// Limits returns the limits of rule n, from 1.
func (r *Rules) Limits(n int) Limits { return r.list[n-1].limits }

// Decide decides whether the client may open the device with that name in mode.
// Names are compared without empty words and "."; a name with ".." is refused.
func (r *Rules) Decide(c Client, name string, mode blk.AccessMode) Decision {
	if r == nil || !r.devices {
		return Decision{Allowed: true, Why: "there are no rules"}
	}
	if slices.Contains(strings.Split(name, "/"), "..") {
		return Decision{Why: `a name with ".." is below no search path`}
	}
	if int(mode) >= len(levels)-1 {
		return Decision{Why: "the access mode is unknown"}
	}
	words := strings.Split(cleanName(name), "/")
	if !printable(name) {
		return Decision{Why: "the name has control characters"}
	}
	for i := range r.list {
		if d := &r.list[i]; d.fits(c, words) {
			return d.verdict(i+1, mode)
		}
	}
	return Decision{Why: "no rule fits, and what no rule allows is refused"}
}

func (d *rule) verdict(n int, mode blk.AccessMode) Decision {
	switch {
	case d.allow > int(mode):
		return Decision{true, n, fmt.Sprintf("rule %d allows %s", n, levels[d.allow])}
	case d.allow == 0:
		return Decision{false, n, fmt.Sprintf("rule %d allows nothing", n)}
	}
	return Decision{false, n, fmt.Sprintf("rule %d allows no more than %s", n, levels[d.allow])}
}

// fits reports whether the rule applies to this client and this name.
func (d *rule) fits(c Client, name []string) bool {
	return d.administrator.Role == "" && (len(d.device) == 0 || slices.ContainsFunc(d.device, func(g glob) bool { return g.matchWords(name) })) &&
		(len(d.session) == 0 || fitsOne(d.session, c.Session)) &&
		(len(d.identity) == 0 || slices.ContainsFunc(c.Identities, func(id string) bool { return fitsOne(d.identity, id) })) &&
		(len(d.address)+len(d.fabric) == 0 || d.fitsPaths(c.Paths))
}

// fitsOne reports whether one of the globs matches s. An empty s matches none.
func fitsOne(globs []glob, s string) bool {
	return s != "" && slices.ContainsFunc(globs, func(g glob) bool { return g.match(s) })
}

func (d *rule) fitsPaths(paths []Path) bool {
	for _, p := range paths {
		a := p.Addr.Unmap().WithZone("")
		if len(d.address) > 0 && !slices.ContainsFunc(d.address, func(r netip.Prefix) bool { return r.Contains(a) }) {
			return false
		}
		if len(d.fabric) > 0 && !slices.Contains(d.fabric, p.Fabric) {
			return false
		}
	}
	return len(paths) > 0
}

// cleanName returns name without ".", empty words and slashes at its ends.
func cleanName(name string) string { return strings.TrimPrefix(path.Clean("/"+name), "/") }
