package iwarp

// DATA PATH. Segments: one message becomes FPDUs, and their headers, payload, pads
// and CRCs become entries of the list that tx.go passes to the socket.
//
//	buildSegment      emits the next segment of a message: gather, emitServed
//	emitImmediate     emits a message of one segment, as do emitReadRequest and
//	                  buildTerminate
//	putHead           adds an entry to the list, as do putPayload and putTail

// buildSegment emits the next segment of the message in progress.
func (q *qp) buildSegment() {
	t, m := &q.tx, &q.tx.cur
	limit := t.maxTagged
	if !m.op.tagged() {
		limit = t.maxUntagged
	}
	n := int(min(uint64(m.length-m.off), uint64(limit)))
	last := m.off+uint32(n) == m.length
	if m.serve {
		q.emitServed(n, last)
		return
	}
	var head []byte
	if m.op.tagged() {
		head = t.putHead(fpduTagged)
		putTagged(head, m.op, last, n, m.stag, m.to+uint64(m.off))
	} else {
		head = t.putHead(fpduUntagged)
		putUntagged(head, m.op, last, n, m.stag, m.msn, m.off)
	}
	crc := t.updateCRC(0, head)
	crc = q.gatherPayload(n, crc)
	t.putTail(fpduHeader(head).length(), crc)
	m.off += uint32(n)
	if last {
		q.endMessage()
	}
}

func (q *qp) endMessage() {
	t, m := &q.tx, &q.tx.cur
	m.active = false
	t.lastWrite = m.op == opWrite
	if m.entry == noEntry {
		return
	}
	if m.imm {
		q.emitImmediate(m.immData)
	}
	q.finishEntry(q.SQ.At(m.entry))
}

// gatherPayload lists the next n payload bytes of the message's elements.
func (q *qp) gatherPayload(n int, crc uint32) uint32 {
	t, m := &q.tx, &q.tx.cur
	sges := q.SQ.Elements(m.entry)
	for n > 0 {
		b := m.at.Next(sges, n)
		if len(b) <= inlineMax && t.headUsed+len(b)+segmentHead <= batchHead {
			copy(t.putHead(len(b)), b)
		} else {
			t.putPayload(b)
		}
		crc = t.updateCRC(crc, b)
		n -= len(b)
	}
	return crc
}

// emitServed emits a segment of a Read Response of n bytes. The region is looked
// up for every segment, since it may be invalidated between them.
func (q *qp) emitServed(n int, last bool) {
	t, m := &q.tx, &q.tx.cur
	s := &q.serves[q.serveHead%uint64(len(q.serves))]
	r := readRequest(s.request[:])
	var src []byte
	if n > 0 {
		var c termCode
		if src, c = q.readSource(r.sourceSTag(), r.sourceTO()+uint64(m.off), uint64(m.length-m.off)); c != 0 {
			m.active = false
			t.quoteRead(r, m.off)
			q.terminate(c)
			return
		}
		src = src[:n]
	}
	head := t.putHead(fpduTagged)
	putTagged(head, opReadResponse, last, n, m.stag, m.to+uint64(m.off))
	crc := t.updateCRC(0, head)
	if n > 0 {
		t.putPayload(src)
		t.served = true
		crc = t.updateCRC(crc, src)
	}
	t.putTail(fpduHeader(head).length(), crc)
	m.off += uint32(n)
	if last {
		m.active = false
		q.serveHead++
	}
}

// quoteRead makes a Terminate quote r, with the offset of the failure.
func (t *transmitHalf) quoteRead(r readRequest, off uint32) {
	var head [fpduUntagged]byte
	putUntagged(head[:], opReadRequest, true, readRequestLen, 0, 0, 0)
	t.off.setHeader(head[:])
	t.off.hasRead = true
	putReadRequest(t.off.read[:], r.sinkSTag(), r.sinkTO()+uint64(off), r.size()-off, r.sourceSTag(), r.sourceTO()+uint64(off))
}

func (q *qp) emitImmediate(imm uint32) {
	t := &q.tx
	b := t.putHead(fpduUntagged + immediateLen)
	putUntagged(b, opImmediate, true, immediateLen, 0, t.msn[queueSend], 0)
	t.msn[queueSend]++
	putImmediate(b[fpduUntagged:], imm)
	t.putTail(fpduHeader(b).length(), t.updateCRC(0, b))
	t.lastWrite = false
}

func (q *qp) emitReadRequest(sink, size, stag uint32, to uint64) {
	t := &q.tx
	b := t.putHead(fpduUntagged + readRequestLen)
	putUntagged(b, opReadRequest, true, readRequestLen, 0, t.msn[queueRead], 0)
	t.msn[queueRead]++
	putReadRequest(b[fpduUntagged:], sink, 0, size, stag, to)
	t.putTail(fpduHeader(b).length(), t.updateCRC(0, b))
}

// buildTerminate emits the last frame of the connection.
func (q *qp) buildTerminate() {
	t := &q.tx
	var body [maxTerminateLen]byte
	n := putTerminate(body[:], termCode(q.End.Code), &t.off)
	b := t.putHead(fpduUntagged + n)
	putUntagged(b, opTerminate, true, n, 0, 1, 0)
	copy(b[fpduUntagged:], body[:n])
	t.putTail(fpduHeader(b).length(), t.updateCRC(0, b))
	t.termBuilt = true
}

// updateCRC continues crc over b if the connection uses a CRC, else it returns 0.
func (t *transmitHalf) updateCRC(crc uint32, b []byte) uint32 {
	if !t.crc {
		return 0
	}
	return crcUpdate(crc, b)
}

// putHead appends n bytes of header room to the list and returns them.
func (t *transmitHalf) putHead(n int) []byte {
	b := t.head[t.headUsed : t.headUsed+n]
	t.headUsed += n
	t.queued += uint64(n)
	if t.headVec {
		t.v.growEntry(t.n-1, n)
	} else {
		t.v.setEntry(t.n, b)
		t.n++
		t.headVec = true
	}
	return b
}

// putTail appends the pad and the CRC of a segment of length bytes to the list.
func (t *transmitHalf) putTail(length int, crc uint32) {
	pad := padLen(length)
	b := t.putHead(pad + crcLen)
	clear(b)
	if t.crc {
		putCRC(b[pad:], crcUpdate(crc, b[:pad]))
	}
}

// putPayload appends b to the list. b must not be empty.
func (t *transmitHalf) putPayload(b []byte) {
	t.v.setEntry(t.n, b)
	t.n++
	t.headVec = false
	t.queued += uint64(len(b))
}
