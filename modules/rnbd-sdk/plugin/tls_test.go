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
	} {
		a, b := full(), full()
		if change(&b); a.Equal(&b) || !a.Equal(&a) {
			t.Errorf("change %d", i)
		}
	}
}
