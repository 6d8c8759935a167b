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

func (q *qp) connectQP(ctx context.Context, p verbs.ConnectParams) ([]byte, error) {
	if len(p.Private) > verbs.MaxPrivate {
		return nil, fmt.Errorf("%d bytes of private data, at most %d", len(p.Private), verbs.MaxPrivate)
	}
	if !q.setPhase(phaseIdle, phaseConnecting) {
		return nil, errUsed
	}
	private, err := q.dialSteps(ctx, p)
	if err == nil {
		q.setRetries()
		return private, nil
	}
	if q.setPhase(phaseConnecting, phaseFailed) {
		q.freeID()
		return nil, err
	}
	e := <-q.answers // it came just in time
	return e.private, nil
}

// dialSteps is connect in the order of the connection manager's events. Once it is
// established the queue pair is up, by cmEvent.
func (q *qp) dialSteps(ctx context.Context, p verbs.ConnectParams) ([]byte, error) {
	f := q.dev.f
	id, err := f.boundID(ctx, q, q.answers, p.Src, p.Dst)
	if err != nil {
		return nil, err
	}
	q.setID(id)
	if err := q.dev.checkContext(C.rv_id_context(id.id)); err != nil {
		return nil, err
	}
	if err := q.createQP(id); err != nil {
		return nil, err
	}
	if err := id.resolveRoute(ctx, q.answers); err != nil {
		return nil, err
	}
	q.setAddrs(id)
	if err := errnoOf(C.rv_connect(id.id, bytePointer(p.Private), C.int(len(p.Private)), C.int(f.cfg.IRD), C.int(f.cfg.ORD))); err != nil {
		return nil, err
	}
	e, err := q.answers.awaitEvent(ctx, C.RDMA_CM_EVENT_ESTABLISHED)
	if e.kind == C.RDMA_CM_EVENT_REJECTED && e.status == rejectConsumer {
		return nil, &verbs.RejectError{Private: e.private}
	}
	return e.private, err
}

// cmEvent takes the events of q's identifier.
func (q *qp) cmEvent(e cmEventCopy) {
	if q.inPhase(phaseConnecting) {
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
		if !q.inPhase(phaseUp) {
			go q.tellPeer()
		}
	}
}
