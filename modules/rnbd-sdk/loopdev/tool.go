package loopdev

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
)

// Argument is the hidden argument of a program that is its own tool. The program calls
// Main with the arguments behind it.
const Argument = "loop-device"

// Tool is the program that calls Main, with its arguments up to Argument. An empty Tool
// makes no loop devices: the error of its methods wraps ENODEV.
type Tool []string

// Device describes a loop device.
type Device struct {
	File      string // path of the file below the device
	Node      string // preferred node, such as /dev/loop3; empty: any
	BlockSize uint32 // logical block size in bytes, a power of two from 512 to a page
	ReadOnly  bool
}

// request is the work for a tool.
type request struct {
	Do     string // one of the do constants
	Device Device
	Force  bool
	Size   uint64 // resize: in bytes
}

const (
	doAttach = "attach"
	doDetach = "detach"
	doResize = "resize"
)

// reply is the answer of a tool.
type reply struct {
	Node  string `json:",omitempty"`
	Error string `json:",omitempty"`
	Errno int    `json:",omitempty"`
}

// Attach makes a loop device with direct I/O and returns its node. Errors: ENODEV where
// the kernel has no loop devices, EACCES or EPERM without the right to make one.
func (t Tool) Attach(ctx context.Context, d Device) (node string, err error) {
	r, err := t.run(ctx, request{Do: doAttach, Device: d})
	return r.Node, err
}

// Detach removes the loop devices of a file. The error wraps EBUSY if one is in use and
// force is not set. With force the users of a device keep it, and it ends with their last
// close. A file without a loop device is no error.
func (t Tool) Detach(ctx context.Context, file string, force bool) error {
	_, err := t.run(ctx, request{Do: doDetach, Device: Device{File: file}, Force: force})
	return err
}

// Resize waits until the file has so many bytes, and gives its loop devices that size.
func (t Tool) Resize(ctx context.Context, file string, size uint64) error {
	_, err := t.run(ctx, request{Do: doResize, Device: Device{File: file}, Size: size})
	return err
}

// run runs the tool. When ctx ends the tool is killed; a tool that waits in the kernel
// ends later, and run does not wait for that.
func (t Tool) run(ctx context.Context, r request) (reply, error) {
	if len(t) == 0 {
		return reply{}, fmt.Errorf("this program has no tool for loop devices: %w", syscall.ENODEV)
	}
	text, err := json.Marshal(r)
	if err != nil {
		return reply{}, err
	}
	var out, errText bytes.Buffer
	c := exec.CommandContext(ctx, t[0], append(t[1:len(t):len(t)], string(text))...)
	c.Stdout, c.Stderr = &out, &errText
	ended := make(chan error, 1)
	go func() { ended <- c.Run() }()
	select {
	case err = <-ended:
	case <-ctx.Done():
		return reply{}, fmt.Errorf("%s a loop device: %w", r.Do, context.Cause(ctx))
	}
	return parse(r.Do, out.Bytes(), errText.String(), err)
}

// parse returns the reply of a tool that has ended with err.
func parse(do string, out []byte, errText string, err error) (a reply, _ error) {
	if jerr := json.Unmarshal(out, &a); jerr != nil {
		return a, fmt.Errorf("%s a loop device: %w: %s", do, errors.Join(err, jerr), strings.TrimSpace(errText))
	}
	if a.Error != "" {
		return a, toolError{a.Error, syscall.Errno(a.Errno)}
	}
	return a, nil
}

// toolError is an error of another process.
type toolError struct {
	text  string
	errno syscall.Errno // zero: not known
}

func (e toolError) Error() string { return e.text }

func (e toolError) Unwrap() error {
	if e.errno == 0 {
		return syscall.EIO
	}
	return e.errno
}
