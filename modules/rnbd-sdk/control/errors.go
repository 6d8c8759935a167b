package control

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"syscall"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/names"
)

// Error is a refusal by a daemon. Msg is the whole cause chain as the daemon
// put it.
type Error struct {
	Msg   string
	Errno blk.Errno // OK when the daemon gave none
	Code  codes.Code
	// Causes are the parts of Msg, the outermost first, the root last.
	Causes []string
}

func (e *Error) Error() string { return e.Msg }

// Unwrap gives the errno, so that errors.Is(err, syscall.EBUSY) works.
func (e *Error) Unwrap() error { return e.Errno.Err() }

const (
	errnoKey  = "rnbd-errno"
	causesKey = "rnbd-cause-bin"
)

// Causes splits the chain of an error: the text of each level without its
// cause. Levels without text of their own are left out.
func Causes(err error) []string {
	if e, ok := err.(*Error); ok && len(e.Causes) > 0 {
		return e.Causes
	}
	var below []error
	switch e := err.(type) {
	case nil:
		return nil
	case interface{ Unwrap() []error }:
		below = e.Unwrap()
	default:
		if next := errors.Unwrap(err); next != nil {
			below = []error{next}
		}
	}
	own := err.Error()
	var causes []string
	for i := len(below) - 1; i >= 0; i-- {
		before, ok := strings.CutSuffix(own, below[i].Error())
		if !ok {
			return []string{own}
		}
		own = strings.TrimRight(before, ": \n")
		causes = append(Causes(below[i]), causes...)
	}
	if own != "" {
		causes = append([]string{own}, causes...)
	}
	return causes
}

// keepErrno is the server's half: the errno of a failed call goes into the
// trailer.
func keepErrno(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	resp, err := handle(ctx, req)
	if err == nil {
		return resp, nil
	}
	if _, isStatus := status.FromError(err); isStatus {
		return nil, err
	}
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() != nil {
		return nil, status.FromContextError(ctx.Err()).Err() // the caller's patience, not ours
	}
	errno := blk.ToErrno(err)
	trailer := metadata.Pairs(errnoKey, strconv.Itoa(int(errno)))
	if causes := Causes(err); len(err.Error()) <= maxCauses {
		for _, c := range causes {
			trailer.Append(causesKey, names.Text(c))
		}
	}
	if err := grpc.SetTrailer(ctx, trailer); err != nil {
		return nil, err
	}
	return nil, status.Error(codeOf(errno), names.Text(err.Error()))
}

// maxCauses bounds the text of causes in bytes: metadata has a limit of its
// own.
const maxCauses = 4096

// codeOf is the one table from errno to gRPC code.
func codeOf(e blk.Errno) codes.Code {
	switch syscall.Errno(e) {
	case syscall.ENOENT, syscall.ENXIO, syscall.ENODEV:
		return codes.NotFound
	case syscall.EEXIST, syscall.EALREADY:
		return codes.AlreadyExists
	case syscall.EINVAL, syscall.ENOTBLK:
		return codes.InvalidArgument
	case syscall.EPERM, syscall.EACCES:
		return codes.PermissionDenied
	case syscall.EBUSY, syscall.ENOTEMPTY, syscall.EROFS:
		return codes.FailedPrecondition
	case syscall.ENOSPC, syscall.EDQUOT:
		return codes.ResourceExhausted
	case syscall.EFBIG:
		return codes.OutOfRange
	case syscall.ETIMEDOUT:
		return codes.DeadlineExceeded
	case syscall.ECONNRESET, syscall.ECONNREFUSED, syscall.ECONNABORTED, syscall.ENOTCONN, syscall.ESTALE:
		return codes.Unavailable
	}
	return codes.Unknown
}

// restoreErrno is the client's half.
func restoreErrno(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	var trailer metadata.MD
	err := invoke(ctx, method, req, reply, cc, append(opts, grpc.Trailer(&trailer))...)
	if err == nil {
		return nil
	}
	st := status.Convert(err)
	e := &Error{Msg: st.Message(), Code: st.Code(), Causes: trailer.Get(causesKey)}
	if v := trailer.Get(errnoKey); len(v) == 1 {
		if n, err := strconv.ParseUint(v[0], 10, 16); err == nil {
			e.Errno = blk.Errno(n)
		}
	}
	switch {
	case ctx.Err() == context.DeadlineExceeded || e.Errno == blk.OK && e.Code == codes.DeadlineExceeded:
		// The connection was cut in the middle of the call; gRPC's text about
		// it does not help.
		e.Errno, e.Code, e.Causes = blk.ETIMEDOUT, codes.DeadlineExceeded, nil
		e.Msg = "the daemon has not finished in the time allowed; it may still do so"
	case e.Errno == blk.OK && e.Code == codes.Unavailable: // gRPC says so, not the daemon
		e.Errno, e.Causes = blk.Errno(syscall.ENOTCONN), nil
		e.Msg = "the daemon does not answer, or has ended: " + e.Msg
	}
	return e
}
