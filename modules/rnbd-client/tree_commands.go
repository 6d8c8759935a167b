package client

import (
	"context"
	"fmt"
	"strconv"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ctltree"
)

// Files that take a command, for all parts of the tree.

// controlTree builds the nodes.
type controlTree struct {
	c        *Client
	frontend string // front end of devices mapped through the tree; empty: the first
}

// triggerFile returns a file that calls do when 1 is written to it.
func triggerFile(usage string, do func(context.Context) error) *ctltree.File {
	return digitFile("1", usage, do)
}

func digitFile(want, usage string, do func(context.Context) error) *ctltree.File {
	return ctltree.Command(usage, func(ctx context.Context, word string) error {
		if word != want {
			return fmt.Errorf("write %s, nothing else: %w", want, syscall.EINVAL)
		}
		return do(ctx)
	})
}

// numberError converts the error of a number to the kernel's errno.
func numberError(what, number string, err error) error {
	if e, ok := err.(*strconv.NumError); ok && e.Err == strconv.ErrRange {
		return fmt.Errorf("%s: %q is too large: %w", what, number, syscall.ERANGE)
	}
	return fmt.Errorf("%s: %q is not a number: %w", what, number, syscall.EINVAL)
}
