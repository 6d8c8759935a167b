package main

import (
	"encoding/binary"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
)

// Metadata contexts of the negotiation. There is one, base:allocation: the ranges of
// an export that hold data. It is in force if the last SET_META_CONTEXT has selected it for
// the export that is opened then, and status.go answers for it.

// metaQueries are the queries of a LIST_META_CONTEXT or SET_META_CONTEXT.
type metaQueries struct {
	export  string
	count   uint32
	longest int  // bytes
	exact   bool // a query is base:allocation
	base    bool // a query is base:
}

// onMetaContext answers LIST_META_CONTEXT and SET_META_CONTEXT. An earlier
// selection is void after a SET_META_CONTEXT, even if that fails.
func (n *negotiation) onMetaContext(opt uint32, data []byte) error {
	if opt == nbdwire.OptSetMetaContext {
		n.context = nil
	}
	q, ok := parseMetaContext(data)
	switch {
	case !ok || !n.structured:
		return n.sendReply(opt, nbdwire.RepErrInvalid, nil)
	case len(q.export) > nbdwire.MaxName || q.longest > nbdwire.MaxName:
		return n.sendReply(opt, nbdwire.RepErrTooBig, nil)
	}
	exp, err := n.exports.findExport(q.export)
	if err != nil {
		return n.sendReply(opt, nbdwire.RepErrUnknown, []byte(err.Error()))
	}
	var out []byte
	if exp.listsExtents() && q.asksAllocation(opt) {
		id := uint32(0) // means nothing in a list
		if opt == nbdwire.OptSetMetaContext {
			n.context, id = exp, allocationID
		}
		b := binary.BigEndian.AppendUint32(nil, id)
		out = appendReply(out, opt, nbdwire.RepMetaCtx, append(b, nbdwire.AllocationContext...))
	}
	return n.sendInfo(opt, appendReply(out, opt, nbdwire.RepAck, nil))
}

// asksAllocation reports whether base:allocation is asked for.
func (q *metaQueries) asksAllocation(opt uint32) bool {
	return q.exact || opt == nbdwire.OptListMetaContext && (q.base || q.count == 0)
}

// parseMetaContext takes the data of LIST_META_CONTEXT and SET_META_CONTEXT apart: an
// export's name, and a number of queries. Unknown queries are ignored.
func parseMetaContext(data []byte) (q metaQueries, ok bool) {
	name, data, ok := cutString(data)
	if !ok || len(data) < 4 {
		return q, false
	}
	q.export, q.count = string(name), binary.BigEndian.Uint32(data)
	data = data[4:]
	for range q.count {
		var query []byte
		if query, data, ok = cutString(data); !ok {
			return q, false
		}
		q.longest = max(q.longest, len(query))
		q.exact = q.exact || string(query) == nbdwire.AllocationContext
		q.base = q.base || string(query) == baseContexts
	}
	return q, len(data) == 0
}

// cutString takes a string behind its length from the beginning of b.
func cutString(b []byte) (s, rest []byte, ok bool) {
	if len(b) < 4 {
		return nil, nil, false
	}
	n := binary.BigEndian.Uint32(b)
	if b = b[4:]; uint64(n) > uint64(len(b)) {
		return nil, nil, false
	}
	return b[:n], b[n:], true
}
