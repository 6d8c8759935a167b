package plugin

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// protectedFront can serve by TLS.
type protectedFront struct {
	*testFront
	tls TLS
}

func (f *protectedFront) SetTLS(_ context.Context, t TLS) error {
	if len(t.Certificate) == 0 {
		return fmt.Errorf("no certificate: %w", blk.EINVAL)
	}
	f.tls = t
	return nil
}

// checkingFront checks its users.
type checkingFront struct{ protectedFront }

func (*checkingFront) ChecksUsers() {}

func TestParseRules(t *testing.T) {
	for word, list := range map[string][]UserRule{
		"rule 1: allow":  {{Allow: "migration"}},
		"rule 2: allow":  {{Allow: "ro"}, {}},
		"rule 1: device": {{Device: []string{"["}, Allow: "rw"}},
		"identity":       {{Identity: []string{""}, Allow: "rw"}},
	} {
		if _, err := ParseRules(list); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%+v: %v, want %q", list, err, word)
		}
	}
	if r, err := ParseRules(nil); r != nil || err != nil {
		t.Errorf("no rules: %v, %v", r, err)
	}
}

func TestFrontend_TLS(t *testing.T) {
	ctx := testContext(t)
	want := TLS{Certificate: []byte("certificate"), PrivateKey: []byte("key"), ClientCA: []byte("ca"), Required: true, Plain: []string{"a", "b"}}
	f := &protectedFront{testFront: newTestFront()}
	r := attachT(t, inProcessT(t, f))
	if err := r.SetTLS(ctx, want); err != nil || !f.tls.Equal(&want) {
		t.Errorf("%+v, error %v", f.tls, err)
	}
	if err := r.SetTLS(ctx, TLS{PrivateKey: []byte("secret")}); blk.ToErrno(err) != blk.EINVAL || strings.Contains(err.Error(), "secret") {
		t.Errorf("a plugin that refuses: %v", err)
	}
	for i, t2 := range []TLS{{ClientCRL: []byte("crl")}, {Rules: []UserRule{{Allow: "ro"}}}} {
		t2.Certificate = want.Certificate
		if err := r.SetTLS(ctx, t2); blk.ToErrno(err) != blk.EOPNOTSUPP || !f.tls.Equal(&want) {
			t.Errorf("a plugin that does not check users, %d: %v", i, err)
		}
	}
	checks := &checkingFront{protectedFront{testFront: newTestFront()}}
	want.ClientCRL, want.Rules = []byte("crl"), []UserRule{{Identity: []string{"a"}, Device: []string{"b", "c"}, Allow: "ro"}, {Allow: "rw"}}
	if err := attachT(t, inProcessT(t, checks)).SetTLS(ctx, want); err != nil || !checks.tls.Equal(&want) {
		t.Errorf("%+v, error %v", checks.tls, err)
	}
	if s := fmt.Sprint(want, &want); strings.Contains(s, "key") {
		t.Errorf("printed as %s", s)
	}
	old := attachT(t, inProcessT(t, newTestFront()))
	if err := old.SetTLS(ctx, want); blk.ToErrno(err) != blk.EOPNOTSUPP {
		t.Errorf("a plugin that serves no user by TLS: %v", err)
	}
}

func TestTLS_Equal(t *testing.T) {
	full := func() TLS {
		return TLS{Certificate: []byte("1"), PrivateKey: []byte("2"), ClientCA: []byte("3"), Required: true, Plain: []string{"4"}}
	}
	for i, change := range []func(*TLS){
		func(t *TLS) { t.Certificate = nil }, func(t *TLS) { t.PrivateKey = []byte("x") }, func(t *TLS) { t.ClientCA = nil },
		func(t *TLS) { t.Required = false }, func(t *TLS) { t.Plain = nil },
		func(t *TLS) { t.ClientCRL = []byte("x") }, func(t *TLS) { t.Rules = []UserRule{{Allow: "ro"}} },
	} {
		a, b := full(), full()
		if change(&b); a.Equal(&b) || !a.Equal(&a) {
			t.Errorf("change %d", i)
		}
	}
}
