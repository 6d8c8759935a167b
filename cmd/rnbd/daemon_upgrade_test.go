package main

import (
	"errors"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// An upgrade that comes after another one, before this process has ended, leaves
// the end of this process free.
func TestUpgradeOfAReplacedProcess(t *testing.T) {
	u := newUpgrading(nil)
	close(u.replaced)
	if _, err := u.upgrade(&controlpb.UpgradeRequest{}, nil); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("%v", err)
	}
	if !u.mu.TryLock() {
		t.Error("the end of the process would wait for ever")
	}
}
