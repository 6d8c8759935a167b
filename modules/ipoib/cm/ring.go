package cm

// sendRing is a buffer that gives out pieces. They are given back in the same
// order.
type sendRing struct {
	buf        []byte
	head, used int         // used: bytes given out, and bytes skipped at the end
	pieces     []ringPiece // given out, the oldest first
}

type ringPiece struct{ at, n, skipped int }

// push copies b into the buffer, as one piece. It reports whether there was
// room.
func (r *sendRing) push(b []byte) (p ringPiece, ok bool) {
	p = ringPiece{at: r.head, n: len(b)}
	if p.at+p.n > len(r.buf) {
		p.at, p.skipped = 0, len(r.buf)-r.head
	}
	if r.used+p.n+p.skipped > len(r.buf) {
		return p, false
	}
	copy(r.buf[p.at:], b)
	r.head, r.used = p.at+p.n, r.used+p.n+p.skipped
	r.pieces = append(r.pieces, p)
	return p, true
}

// popOldest takes back the oldest piece.
func (r *sendRing) popOldest() {
	p := r.pieces[0]
	r.used -= p.n + p.skipped
	if r.pieces = r.pieces[1:]; len(r.pieces) == 0 {
		r.head, r.used, r.pieces = 0, 0, r.pieces[:0]
	}
}
