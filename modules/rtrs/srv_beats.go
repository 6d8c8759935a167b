package rtrs

import (
	"fmt"
	"time"
)

// Heartbeats of a path on the server. All of it runs on the owner of connection 0.

// startBeats begins the heartbeats.
func (p *srvPath) startBeats(now time.Time) {
	c := p.conns[0]
	if c.down {
		return
	}
	p.hb.start(now, p.sess.srv.Timing().Heartbeat)
	p.hb.alarm.f = p.beat
	c.poller.alarms.put(&p.hb.alarm, p.hb.next)
}

// beat is called when a heartbeat is due.
func (p *srvPath) beat(now time.Time) {
	if !p.connected() {
		return
	}
	heard := false
	for _, c := range p.conns {
		heard = c.stats.takeHeard() || heard
	}
	t := p.sess.srv.Timing()
	switch p.hb.tick(now, heard, t.Heartbeat, t.HeartbeatMisses) {
	case hbSend:
		p.hb.sendOn(p.conns[0].conn)
	case hbDead:
		p.close(fmt.Errorf("%w: nothing heard for %d x %s", ErrHeartbeat, t.HeartbeatMisses+2, t.Heartbeat))
		return
	}
	p.conns[0].poller.alarms.put(&p.hb.alarm, p.hb.next)
}

// probe ends the path unless something arrives from its client within one interval.
// The caller sends an HB_MSG.
func (p *srvPath) probe(now time.Time) {
	for _, c := range p.conns {
		c.stats.takeHeard()
	}
	t := p.sess.srv.Timing()
	if p.hb.probe(now, t.Heartbeat, t.HeartbeatMisses) {
		p.conns[0].poller.alarms.put(&p.hb.alarm, p.hb.next)
	}
}

// followBeat is called after an HB_MSG of the client was answered. The server's own
// goes out with the answer: see (*heartbeat).follow.
func (p *srvPath) followBeat(now time.Time) {
	if !p.connected() || p.hb.alarm.slot == 0 {
		return
	}
	p.hb.follow(now, p.sess.srv.Timing().Heartbeat, p.beat)
	p.conns[0].poller.alarms.put(&p.hb.alarm, p.hb.next)
}
