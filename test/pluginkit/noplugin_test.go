package pluginkit

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
)

// TestWhatIsNoPlugin: one clear line for each program, in bounded time and memory.
func TestWhatIsNoPlugin(t *testing.T) {
	bin, err := lab.Bin()
	if err != nil {
		t.Fatal(err)
	}
	script := func(text string) string {
		file := filepath.Join(t.TempDir(), "io-script")
		if err := os.WriteFile(file, []byte("#!/bin/sh\n"+text+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		return file
	}
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("hello"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ name, program, says string }{
		{"a program that is not there", "/nonexistent/io-foo", "there is no such file"},
		{"a folder", os.TempDir(), "not a regular file"},
		{"a file that is no program", text, "not executable"},
		{"a program that ends", script("exit 7"), "exit status 7"},
		{"another program", script("echo hello"), `"hello"`},
		{"a program that prints 100 MB", script("exec head -c 100000000 /dev/zero"), "is it an rnbd plugin?"},
		{"a program that is silent", script("exec sleep 600"), "no handshake within"},
		{"a program that forks and ends", script("sleep 600 >/dev/null 2>&1 3<&- & exit 3"), "exit status 3"},
		{"a program that says why it ends", script("echo out of order >&2; exit 1"), "out of order"},
		{"a handshake of another version", script("echo '1|9|unix|/tmp/x|grpc|'; exec sleep 600"), "version 9"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			cmd := exec.CommandContext(ctx, filepath.Join(bin, "rnbd"), "plugin", "test", c.program)
			var out bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &out
			err := cmd.Run()
			lines := strings.Count(strings.TrimSpace(out.String()), "\n") + 1
			if err == nil || ctx.Err() != nil || lines > 2 || !strings.Contains(out.String(), c.says) {
				t.Errorf("%v, %d lines: %.500q, want one with %q", err, lines, fmt.Sprint(out.String()), c.says)
			}
		})
	}
}
