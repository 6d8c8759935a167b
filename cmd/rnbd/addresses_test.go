package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestEveryAddressOfANameIsTried(t *testing.T) {
	refused := fmt.Errorf("connect: %w", syscall.ECONNREFUSED)
	denied := fmt.Errorf("open: %w", syscall.EACCES)
	for _, c := range []struct {
		name    string
		choices []pathChoice
		answers map[string]error // by the paths
		tried   []string
		want    error
	}{
		{"an address", []pathChoice{{"10.0.0.1"}}, map[string]error{"10.0.0.1": refused}, []string{"10.0.0.1"}, refused},
		{"none", nil, nil, []string{""}, nil},
		{"the second one answers", []pathChoice{{"::1", "127.0.0.1"}}, map[string]error{"::1": refused}, []string{"::1", "127.0.0.1"}, nil},
		{"the first one refuses the device", []pathChoice{{"::1", "127.0.0.1"}}, map[string]error{"::1": denied}, []string{"::1"}, denied},
		{"nobody answers", []pathChoice{{"::1", "127.0.0.1"}}, map[string]error{"::1": refused, "127.0.0.1": syscall.EHOSTUNREACH}, []string{"::1", "127.0.0.1"}, syscall.EHOSTUNREACH},
		{"two names", []pathChoice{{"a6", "a4"}, {"b6", "b4"}}, map[string]error{"a6 b6": refused, "a4 b6": syscall.ETIMEDOUT, "a6 b4": refused},
			[]string{"a6 b6", "a4 b6", "a6 b4", "a4 b4"}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			var tried []string
			err := tryPaths(t.Context(), c.choices, func(_ context.Context, paths []string) error {
				tried = append(tried, strings.Join(paths, " "))
				return c.answers[tried[len(tried)-1]]
			})
			if !errors.Is(err, c.want) || !slices.Equal(tried, c.tried) {
				t.Errorf("tried %q, error %v; want %q, %v", tried, err, c.tried, c.want)
			}
		})
	}
}

func TestADeadAddressLeavesTimeForTheNext(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	err := tryPaths(ctx, []pathChoice{{"dead", "alive"}}, func(ctx context.Context, paths []string) error {
		if paths[0] == "dead" {
			<-ctx.Done()
		}
		return ctx.Err()
	})
	if err != nil {
		t.Error(err)
	}
}

func TestResolvePath(t *testing.T) {
	for word, want := range map[string]string{
		"10.0.0.1": "10.0.0.1", "[fe80::1%eth0]%iwarp": "[fe80::1%eth0]%iwarp", "localhost:99%rocev2": "127.0.0.1:99%rocev2",
		"127.0.0.2@localhost": "127.0.0.2@127.0.0.1",
	} {
		choice, err := resolvePath(t.Context(), word)
		if err != nil || !slices.Contains(choice, want) {
			t.Errorf("%q means %q, %v; want %q among them", word, choice, err, want)
		}
	}
	choice, err := resolvePath(t.Context(), "127.0.0.2@localhost")
	if err != nil || slices.ContainsFunc(choice, func(s string) bool { return strings.Contains(s, "::") }) {
		t.Errorf("a source of IPv4 leads to %q, %v", choice, err)
	}
}
