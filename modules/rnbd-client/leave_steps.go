package client

import (
	"context"
	"slices"
)

// HandOver ends the service of all devices, for another process to go on with them:
// their users wait. On an error the client serves as before, or TakeOver with the
// Handover makes it do so: it must follow if h is not nil.
func (c *Client) HandOver(ctx context.Context) (h *Handover, err error) {
	return newDeparture(c).run(ctx)
}

// departure is a hand-over on the side that leaves.
type departure struct {
	client *Client
	steps  []departureStep
	h      *Handover
	places []*reservation
	kept   bool // mayLeave has succeeded
	given  bool // front ends were asked to give up connections: TakeOver must follow
}

// departureStep is a step of a hand-over. undo is called if it, or a later one, has
// failed, and may find it half done. It does what TakeOver does not; nil: nothing.
type departureStep struct {
	name string
	do   func(context.Context) error
	undo func(context.Context)
}

func newDeparture(c *Client) *departure {
	p := &departure{client: c, h: &Handover{from: c, early: true, state: handoverState{Version: handoverVersion}}}
	p.steps = []departureStep{
		{"mayLeave", p.keep, p.letGo},
		{"roomForUsers", c.roomForUsers, nil},
		{"releaseUsers", p.releaseUsers, nil},
		{"settle users", func(ctx context.Context) error { return c.awaitIdle(ctx, p.of(false)) }, nil},
		{"partDisks", func(ctx context.Context) error { c.partDisks(ctx); return nil }, p.departParted},
		{"settle disks", p.settleDisks, nil},
		{"depart", func(ctx context.Context) error { return c.closeDevices(ctx, p.places) }, nil},
		{"closeFabrics", p.closeFabrics, nil},
	}
	return p
}

// run does the steps. After the first one that fails it undoes those that were begun, the
// last one first.
func (p *departure) run(ctx context.Context) (*Handover, error) {
	for i := range p.steps {
		err := p.steps[i].do(ctx)
		if err == nil {
			continue
		}
		for ; i >= 0; i-- {
			if undo := p.steps[i].undo; undo != nil {
				undo(ctx)
			}
		}
		if !p.given {
			return nil, err
		}
		return p.h, err
	}
	return p.h, nil
}

func (p *departure) keep(context.Context) (err error) {
	p.places, err = p.client.mayLeave(p.h)
	p.kept = err == nil
	return err
}

// letGo ends the hand-over of the devices that are still there.
func (p *departure) letGo(context.Context) {
	p.client.endHandOver(p.places...)
	if p.kept && !p.given {
		p.client.undoHandOver()
	}
}

func (p *departure) releaseUsers(ctx context.Context) error {
	p.given = true
	if err := p.client.releaseUsers(ctx, p.h); err != nil {
		return err
	}
	for _, d := range p.client.nodeDevices() {
		d.fe.Load().parting.Store(true)
	}
	return nil
}

// of returns the places of the devices whose front ends end, or of the others.
func (p *departure) of(ends bool) []*reservation {
	return slices.DeleteFunc(slices.Clone(p.places), func(q *reservation) bool { return q.d.fe.Load().parting.Load() != ends })
}

// departParted takes the devices away that no front end has any more, for TakeOver to map
// them again.
func (p *departure) departParted(ctx context.Context) {
	left := p.of(true)
	p.client.mapMu.Lock()
	left = slices.DeleteFunc(left, func(q *reservation) bool { return q.work == 0 || q.d.fe.Load().attachmentOf(q.d) != nil })
	p.client.mapMu.Unlock()
	if err := p.client.closeDevices(ctx, left); err != nil {
		p.client.log.Warn("devices without a front end are still there", "err", err)
	}
}

func (p *departure) settleDisks(ctx context.Context) error {
	err := p.client.awaitIdle(ctx, p.places)
	p.h.state.noteClean(p.places)
	return err
}

// closeFabrics is the step after which the fabrics must be opened again, and the mounts
// are those of the next process.
func (p *departure) closeFabrics(ctx context.Context) error {
	p.h.early, p.h.files = false, p.client.files.all()
	return p.client.closeFabrics(ctx)
}
