package plugin

import (
	"context"
	"errors"
	"syscall"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/pluginpb"
)

// ErrExited is in the chain of errors of calls to a process that has ended.
var ErrExited = errors.New("plugin has exited")

// ErrIncompatible is in the chain when Launch refuses a plugin: other
// version, other kind, other checksum.
var ErrIncompatible = errors.New("incompatible plugin")

// remoteError is an error that the plugin returned, with the end of its chain:
// an errno, or the end of the call's context.
type remoteError struct {
	msg string
	is  error
}

func (e *remoteError) Error() string { return e.msg }
func (e *remoteError) Unwrap() error { return e.is }

// encodeErrors is the plugin's end: a failing call keeps its errno.
func encodeErrors(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	resp, err := next(ctx, req)
	if err == nil {
		return resp, nil
	}
	if _, ok := status.FromError(err); ok {
		return nil, err
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return nil, status.Error(codes.DeadlineExceeded, err.Error())
	case errors.Is(err, context.Canceled):
		return nil, status.Error(codes.Canceled, err.Error())
	}
	st := status.New(codes.Unknown, err.Error())
	if with, derr := st.WithDetails(&pluginpb.ErrorDetail{ErrorNumber: uint32(errnoOf(err))}); derr == nil {
		st = with
	}
	return nil, st.Err()
}

// errnoOf looks through joined errors too; EIO if there is no errno.
func errnoOf(err error) blk.Errno {
	var b blk.Errno
	if errors.As(err, &b) {
		return b
	}
	var e syscall.Errno
	if errors.As(err, &e) {
		return blk.Errno(e)
	}
	return blk.EIO
}

// decodeError is the host's end.
func decodeError(err error) error {
	st, ok := status.FromError(err)
	if !ok {
		return err
	}
	for _, d := range st.Details() {
		if e, ok := d.(*pluginpb.ErrorDetail); ok && e.ErrorNumber != 0 {
			return &remoteError{st.Message(), syscall.Errno(e.ErrorNumber)}
		}
	}
	switch st.Code() {
	case codes.DeadlineExceeded:
		return &remoteError{st.Message(), context.DeadlineExceeded}
	case codes.Canceled:
		return &remoteError{st.Message(), context.Canceled}
	case codes.Unimplemented:
		return &remoteError{st.Message(), blk.EOPNOTSUPP}
	}
	return errors.New(st.Message())
}
