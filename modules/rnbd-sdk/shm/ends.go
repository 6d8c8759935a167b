package shm

// The two ends of a ring. Requests in flight never exceed the number of
// entries, so neither array can overflow between honest peers.

// Submitter is the requesting end. It has one owner.
type Submitter struct {
	out      producer
	in       consumer
	v        view
	inFlight uint32 // pushed and not yet popped as completed
	err      error
}

// Push queues a request. False: full, or the ring is broken (see Err). The
// peer sees the request after Publish.
func (s *Submitter) Push(e *SQE) bool {
	if s.err != nil || s.inFlight == s.out.size {
		return false
	}
	ok, err := s.out.room()
	if !ok {
		if err == nil {
			err = errNotTaken
		}
		s.err = err
		return false
	}
	s.v.sqes[s.out.tail&(s.out.size-1)] = *e
	s.out.tail++
	s.inFlight++
	return true
}

// Space returns how many more requests Push takes now.
func (s *Submitter) Space() int {
	if s.err != nil {
		return 0
	}
	return int(s.out.size - s.inFlight)
}

// Fits reports whether a device with sent requests in flight may have one more.
// A ring is shared by devices, and requests to one that does not answer stay in
// flight. So half of the ring is for devices with few requests: each of them
// may always have 1/256 of it.
func (s *Submitter) Fits(sent int) bool {
	free, size := s.Space(), int(s.out.size)
	return free > 0 && (sent < max(size/256, 1) || sent < free-size/2)
}

// InFlight returns the number of requests pushed and not yet answered.
func (s *Submitter) InFlight() int { return int(s.inFlight) }

// Publish makes the pushed entries visible to the peer and kicks it if it
// sleeps.
func (s *Submitter) Publish() {
	if s.err == nil {
		s.out.publish()
	}
}

// Pop copies completions to dst and returns how many. 0: none, or the ring is
// broken (see Err). Tags and errnos are the peer's word.
func (s *Submitter) Pop(dst []CQE) int {
	if s.err != nil {
		return 0
	}
	unshown := s.out.tail - s.out.published
	n, err := s.in.ready(s.inFlight - unshown)
	if err != nil {
		s.err = err
		return 0
	}
	n = min(n, uint32(len(dst)))
	if n == 0 {
		return 0
	}
	for i := range n {
		dst[i] = s.v.cqes[(s.in.head+i)&(s.in.size-1)]
	}
	s.in.release(n)
	s.inFlight -= n
	return int(n)
}

// Err returns why the ring is unusable, or nil. It is sticky.
func (s *Submitter) Err() error { return s.err }

// Arm asks the peer to make FD readable at its next Publish. False: completions
// are there already, do not sleep.
func (s *Submitter) Arm() bool { return s.err != nil || s.in.arm() }

// Disarm withdraws Arm; call it after waking.
func (s *Submitter) Disarm() {
	if s.err == nil {
		s.in.disarm()
	}
}

// Woken is Disarm for a caller that slept in a read of FD, not in a poll: the
// next Arm need not empty it.
func (s *Submitter) Woken() {
	if s.err == nil {
		s.in.woken()
	}
}

// FD is the eventfd to sleep on.
func (s *Submitter) FD() int { return s.in.event }

// Kicks returns how often Publish had to wake the peer.
func (s *Submitter) Kicks() uint64 { return s.out.kicks }

// Completer is the answering end. It has one owner.
type Completer struct {
	in    consumer
	out   producer
	v     view
	taken uint32 // popped and not yet answered
	err   error
}

// Pop copies requests to dst and returns how many. 0: none, or the ring is
// broken (see Err). Everything in them is the peer's word.
func (c *Completer) Pop(dst []SQE) int {
	if c.err != nil {
		return 0
	}
	n, err := c.in.ready(c.in.size - c.taken)
	if err != nil {
		c.err = err
		return 0
	}
	n = min(n, uint32(len(dst)))
	if n == 0 {
		return 0
	}
	for i := range n {
		dst[i] = c.v.sqes[(c.in.head+i)&(c.in.size-1)]
	}
	c.in.release(n)
	c.taken += n
	return int(n)
}

// Push queues an answer. The peer sees it after Publish. False: more answers
// than requests, or the peer broke the ring (see Err); never merely full.
func (c *Completer) Push(e *CQE) bool {
	if c.err != nil || c.taken == 0 {
		return false
	}
	ok, err := c.out.room()
	if !ok {
		if err == nil {
			err = errNotTaken
		}
		c.err = err
		return false
	}
	// Field by field: a load wider than the stores that wrote e waits for all stores
	// before them, the payload's too.
	d := &c.v.cqes[c.out.tail&(c.out.size-1)]
	d.Tag, d.Errno = e.Tag, e.Errno
	c.out.tail++
	c.taken--
	return true
}

// InFlight returns the number of requests popped and not yet answered.
func (c *Completer) InFlight() int { return int(c.taken) }

// Publish makes the pushed entries visible to the peer and kicks it if it
// sleeps.
func (c *Completer) Publish() {
	if c.err == nil {
		c.out.publish()
	}
}

// Err returns why the ring is unusable, or nil. It is sticky.
func (c *Completer) Err() error { return c.err }

// Arm asks the peer to make FD readable at its next Publish. False: requests
// are there already, do not sleep.
func (c *Completer) Arm() bool { return c.err != nil || c.in.arm() }

// Disarm withdraws Arm; call it after waking.
func (c *Completer) Disarm() {
	if c.err == nil {
		c.in.disarm()
	}
}

// FD is the eventfd to sleep on.
func (c *Completer) FD() int { return c.in.event }

// Kicks returns how often Publish had to wake the peer.
func (c *Completer) Kicks() uint64 { return c.out.kicks }
