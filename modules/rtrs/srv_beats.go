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
	p.hb.startBeats(now, p.sess.srv.Timing().Heartbeat)
	p.hb.alarm.f = p.sendBeat
	c.poller.alarms.setAlarm(&p.hb.alarm, p.hb.next)
}

// sendBeat is called when a heartbeat is due.
func (p *srvPath) sendBeat(now time.Time) {
	if !p.isConnected() {
		return
	}
	heard := false
	for _, c := range p.conns {
		heard = c.stats.takeHeard() || heard
	}
	t := p.sess.srv.Timing()
	switch p.hb.onTick(now, heard, t.Heartbeat, t.HeartbeatMisses) {
	case hbSend:
		p.hb.sendOn(p.conns[0].conn)
	case hbDead:
		p.close(fmt.Errorf("%w: nothing heard for %d x %s", ErrHeartbeat, t.HeartbeatMisses+2, t.Heartbeat))
		return
	}
	p.conns[0].poller.alarms.setAlarm(&p.hb.alarm, p.hb.next)
}

// probePeer ends the path unless something arrives from its client within one interval.
// The caller sends an HB_MSG.
func (p *srvPath) probePeer(now time.Time) {
	for _, c := range p.conns {
		c.stats.takeHeard()
	}
	t := p.sess.srv.Timing()
	if p.hb.probePeer(now, t.Heartbeat, t.HeartbeatMisses) {
		p.conns[0].poller.alarms.setAlarm(&p.hb.alarm, p.hb.next)
	}
}

// followBeat is called after an HB_MSG of the client was answered. The server's own
// goes out with the answer: see (*heartbeat).followPeer.
func (p *srvPath) followBeat(now time.Time) {
	if !p.isConnected() || p.hb.alarm.slot == 0 {
		return
	}
	p.hb.followPeer(now, p.sess.srv.Timing().Heartbeat, p.sendBeat)
	p.conns[0].poller.alarms.setAlarm(&p.hb.alarm, p.hb.next)
}
