//go:build linux && cgo && ibverbs

package ibverbs

// #include "lib.h"
import "C"

import (
	"context"
	"fmt"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// The active side of a connection.

func (q *qp) connect(ctx context.Context, p verbs.ConnectParams) ([]byte, error) {
	if len(p.Private) > verbs.MaxPrivate {
		return nil, fmt.Errorf("%d bytes of private data, at most %d", len(p.Private), verbs.MaxPrivate)
	}
	if !q.move(phaseIdle, phaseConnecting) {
		return nil, errUsed
	}
	private, err := q.dial(ctx, p)
	if err == nil {
		q.patience()
		return private, nil
	}
	if q.move(phaseConnecting, phaseFailed) {
		q.freeID()
		return nil, err
	}
	e := <-q.answers // it came just in time
	return e.private, nil
}

// dial is connect in the order of the connection manager's events. Once it is
// established the queue pair is up, by cmEvent.
func (q *qp) dial(ctx context.Context, p verbs.ConnectParams) ([]byte, error) {
	f := q.dev.f
	id, err := f.reach(ctx, q, q.answers, p.Src, p.Dst)
	if err != nil {
		return nil, err
	}
	q.setID(id)
	if err := q.dev.connectable(C.rv_id_context(id.id)); err != nil {
		return nil, err
	}
	if err := q.create(id); err != nil {
		return nil, err
	}
	if err := id.route(ctx, q.answers); err != nil {
		return nil, err
	}
	q.setAddrs(id)
	if err := errnoOf(C.rv_connect(id.id, bytePointer(p.Private), C.int(len(p.Private)), C.int(f.cfg.IRD), C.int(f.cfg.ORD))); err != nil {
		return nil, err
	}
	e, err := q.answers.await(ctx, C.RDMA_CM_EVENT_ESTABLISHED)
	if e.kind == C.RDMA_CM_EVENT_REJECTED && e.status == rejectConsumer {
		return nil, &verbs.RejectError{Private: e.private}
	}
	return e.private, err
}

// cmEvent takes the events of q's identifier.
func (q *qp) cmEvent(e event) {
	if q.is(phaseConnecting) {
		if e.kind == C.RDMA_CM_EVENT_ESTABLISHED && !q.goUp() {
			return
		}
		q.answers.cmEvent(e)
		return
	}
	switch e.kind {
	case C.RDMA_CM_EVENT_DISCONNECTED, C.RDMA_CM_EVENT_DEVICE_REMOVAL, C.RDMA_CM_EVENT_CONNECT_ERROR,
		C.RDMA_CM_EVENT_UNREACHABLE, C.RDMA_CM_EVENT_REJECTED:
		q.Disconnect()
	case C.RDMA_CM_EVENT_ESTABLISHED:
		// The passive side is up before the peer's last word has come, and the connection
		// manager sends no word of an end until then, without an error.
		if !q.is(phaseUp) {
			go q.tellPeer()
		}
	}
}
