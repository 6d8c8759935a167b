package plugin

import (
	"bytes"
	"context"
	"fmt"
	"reflect"
	"slices"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/access"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// Protector is a Frontend that can serve its listeners by TLS.
type Protector interface {
	// SetTLS gives the means of TLS, before the first listener and again when
	// they have changed. They hold for users that come from then on, and those that
	// are connected are judged by them. After an
	// error the earlier ones hold; before the first success nothing is served.
	SetTLS(ctx context.Context, t TLS) error
}

// TLS is how a front end protects its listeners. The front end reads no file for
// it: the contents are in memory only.
type TLS struct {
	Certificate []byte // PEM: the front end's, and those between it and its CA
	PrivateKey  []byte // PEM: of Certificate
	// ClientCA are certificates in PEM. Each user shows a certificate that one of
	// them has signed. Empty: users need no certificate.
	ClientCA []byte
	// Required refuses users without TLS, except on the listeners in Plain.
	Required bool
	Plain    []string // names of listeners
	// ClientCRL are lists of revoked certificates in PEM, signed by certificates of
	// ClientCA.
	ClientCRL []byte
	// Rules say which user may open which device; none: each may open all.
	Rules []UserRule
}

// UserRule lets users open devices, as a rule of package access does. A Protector
// with a method ChecksUsers honours ClientCRL and Rules; others are refused them.
type UserRule struct {
	Identity []string `yaml:"identity"` // patterns; none: it fits users without an identity, too
	Device   []string `yaml:"device"`   // patterns of names of devices
	Allow    string   `yaml:"allow"`    // none, ro or rw
}

// Check returns the first error of the rule, and the key that has it.
func (r *UserRule) Check() (key string, err error) {
	if r.Allow == blk.Migration.String() {
		return "allow", fmt.Errorf("allow: %q: write none, ro or rw: %w", r.Allow, blk.EINVAL)
	}
	w := r.rule()
	return w.Check()
}

func (r *UserRule) rule() access.Rule {
	return access.Rule{Identity: r.Identity, Device: r.Device, Allow: r.Allow}
}

// ParseRules returns the rules for decisions; nil: there are none.
func ParseRules(list []UserRule) (*access.Rules, error) {
	if len(list) == 0 {
		return nil, nil
	}
	var all []access.Rule
	for i := range list {
		if _, err := list[i].Check(); err != nil {
			return nil, fmt.Errorf("rule %d: %w", i+1, err)
		}
		all = append(all, list[i].rule())
	}
	return access.New(all)
}

// checksUsers is implemented by a Protector that honours ClientCRL and Rules.
type checksUsers interface{ ChecksUsers() }

// Equal reports whether t and o are the same.
func (t *TLS) Equal(o *TLS) bool {
	return bytes.Equal(t.Certificate, o.Certificate) && bytes.Equal(t.PrivateKey, o.PrivateKey) &&
		bytes.Equal(t.ClientCA, o.ClientCA) && t.Required == o.Required && slices.Equal(t.Plain, o.Plain) &&
		bytes.Equal(t.ClientCRL, o.ClientCRL) && len(t.Rules) == len(o.Rules) && (len(t.Rules) == 0 || reflect.DeepEqual(t.Rules, o.Rules))
}

// picky reports whether t needs a plugin that checks users.
func (t *TLS) picky() bool { return len(t.ClientCRL) > 0 || len(t.Rules) > 0 }

// String keeps the key out of logs.
func (t TLS) String() string { return "TLS" }

// errNoChecks refuses what a plugin would not honour.
var errNoChecks = fmt.Errorf("the plugin knows neither revoked certificates nor rules for its users: install its newer version, or leave them out: %w", blk.EOPNOTSUPP)
