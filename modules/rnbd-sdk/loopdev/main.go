package loopdev

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"
)

// toolTime bounds the waits of a tool.
const toolTime = 10 * time.Second

// Main is the main function of a tool: args are the arguments behind Argument. Main
// writes the result to the standard output, and does not return.
func Main(args []string) {
	ctx, cancel := context.WithTimeout(context.Background(), toolTime)
	defer cancel()
	var a reply
	node, err := do(ctx, args)
	if err != nil {
		var errno syscall.Errno
		errors.As(err, &errno)
		a = reply{Error: err.Error(), Errno: int(errno)}
	} else {
		a = reply{Node: node}
	}
	if err := json.NewEncoder(os.Stdout).Encode(a); err != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

func do(ctx context.Context, args []string) (node string, err error) {
	var r request
	if len(args) != 1 {
		return "", fmt.Errorf("a tool for loop devices takes one argument, not %d: %w", len(args), syscall.EINVAL)
	}
	if err := json.Unmarshal([]byte(args[0]), &r); err != nil {
		return "", fmt.Errorf("%w: %w", err, syscall.EINVAL)
	}
	switch r.Do {
	case doAttach:
		return attach(r.Device)
	case doDetach:
		return "", detach(ctx, r.Device.File, r.Force)
	case doResize:
		return "", resize(ctx, r.Device.File, r.Size)
	}
	return "", fmt.Errorf("no work %q: %w", r.Do, syscall.EINVAL)
}
