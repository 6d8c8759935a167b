package machine

import (
	"os"
	"strings"
	"testing"
)

func TestTheMachineHasANameAndAKernel(t *testing.T) {
	if CPU() == "" {
		t.Error("the processor has no name")
	}
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		t.Fatal(err)
	}
	if want := "Linux " + strings.TrimSpace(string(release)); Kernel() != want {
		t.Errorf("the kernel is %q, want %q", Kernel(), want)
	}
	if LoadAverage() < 0 {
		t.Errorf("load average %v", LoadAverage())
	}
}
