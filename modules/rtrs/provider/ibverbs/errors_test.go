package ibverbs

import (
	"errors"
	"strings"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

func TestErrorsSayWhatToDo(t *testing.T) {
	tight := memlockUsage{limit: 8 << 20, pinned: 1 << 20}
	for name, tt := range map[string]struct {
		err  error
		is   error
		says []string
	}{
		"memory limit": {registerError("mlx5_0", 64<<20, syscall.ENOMEM, tight), syscall.ENOMEM,
			[]string{"67108864 bytes on mlx5_0", "may lock 8388608 bytes", "1048576 are taken", "59768832 more", "LimitMEMLOCK", "to 68157440", "CAP_IPC_LOCK"}},
		"missing verbs library": {libraryError("libibverbs.so.1: cannot open shared object file"), verbs.ErrUnsupported, []string{"Debian package libibverbs1"}},
		"missing CM library":    {libraryError("librdmacm.so.1: cannot open shared object file"), verbs.ErrUnsupported, []string{"Debian package librdmacm1"}},
		"no device":             {noDevice(), ErrNoDevice, []string{"rdma link add", "iwarp"}},
		"not built in":          {ErrNotBuilt, verbs.ErrUnsupported, []string{"cgo", "libibverbs-dev", "librdmacm-dev"}},
		"nobody listens":        {rejectError(8), syscall.ECONNREFUSED, []string{"nobody listens"}},
		"other refusal":         {rejectError(5), syscall.ECONNREFUSED, []string{"reason 5"}},
	} {
		t.Run(name, func(t *testing.T) {
			if !errors.Is(tt.err, tt.is) {
				t.Errorf("%v is not %v", tt.err, tt.is)
			}
			for _, s := range tt.says {
				if !strings.Contains(tt.err.Error(), s) {
					t.Errorf("%q does not say %q", tt.err, s)
				}
			}
		})
	}
}

func TestOtherFailuresDoNotBlameTheLimit(t *testing.T) {
	for name, err := range map[string]error{
		"no such right":   registerError("rxe0", 1<<20, syscall.EINVAL, memlockUsage{limit: 1}),
		"enough left":     registerError("rxe0", 1<<20, syscall.ENOMEM, memlockUsage{limit: 8 << 20}),
		"no limit at all": registerError("rxe0", 1<<20, syscall.ENOMEM, memlockUsage{unlimited: true}),
	} {
		if strings.Contains(err.Error(), "limit") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestStatusBytes(t *testing.T) {
	const status = "Name:\trnbd\nVmLck:\t       0 kB\nVmPin:\t     132 kB\n"
	if got := statusBytes(status, "VmPin"); got != 132<<10 {
		t.Errorf("VmPin is %d", got)
	}
	if got := statusBytes(status, "VmFoo"); got != 0 {
		t.Errorf("a line that is not there is %d", got)
	}
}
