package client

// Writes that are sent again: docs/extend/protocol/rnbd.md, "Writes that are
// repeated". A write without an answer may have been carried out, and another
// client may have written since. So writes have numbers. By its number the
// server recognises a write that is repeated on another path of the session. A
// write that is repeated in another session carries the time of its first try.

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// isShared reports whether others may write, or may have written since.
func (sh *writerNotice) isShared(d *Device) bool { return sh.writerEvents != d.writerEvents.Load() }

// numberWrite builds the message of a numbered write in s.msg. It runs on the pump.
func (s *ringSource) numberWrite(r *request) []byte {
	if r.number == 0 {
		s.pump.number = max(s.pump.number+1, 1)
		r.number = s.pump.number
		if r.sent == 0 {
			r.writerNotice = r.dev.writerNotice.Load()
		}
	}
	if r.sent == 0 {
		rnbdwire.PutIOOnce(s.msg[:], r.number)
		return s.msg[:rnbdwire.IOOnceSize]
	}
	again := rnbdwire.AgainFields{Shared: r.dev.mode == blk.Migration} // if the server has not answered
	if sh := r.writerNotice; sh != nil {
		again = rnbdwire.AgainFields{Since: sh.mark, Shared: sh.isShared(r.dev)}
	}
	rnbdwire.PutIOAgain(s.msg[:], r.number, again)
	return s.msg[:]
}

// onRefused logs the writes that the server did not repeat.
func (d *Device) onRefused() {
	n := d.refused.Swap(0)
	if n == 0 {
		return
	}
	err := fmt.Errorf("another client may have written to the device since they were sent first: %w", syscall.EIO)
	d.log.Error("writes are not repeated", "requests", n, "err", err)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lastError = fmt.Sprintf("%d writes were not repeated: %v", n, err)
}

// askInterval is the pause between two questions about a device that others may
// write to. The server compares later writes of this client with the writes of
// others since the last question.
const askInterval = time.Second

// sayWriter sends the client's number to the server, before the first OPEN.
func (s *session) sayWriter(ctx context.Context) error {
	if s.features.Load()&rnbdwire.FeatureOnce == 0 {
		return nil
	}
	_, err := s.askWriters(ctx, rnbdwire.NoDevice)
	return err
}

// askWriters sends WRITER.
func (s *session) askWriters(ctx context.Context, id uint32) (f rnbdwire.WriterRspFields, err error) {
	msg := make(rnbdwire.Writer, rnbdwire.WriterSize)
	rnbdwire.WriterFields{DeviceID: id, Writer: s.writer}.Put(msg)
	rsp := make(rnbdwire.WriterRsp, rnbdwire.WriterRspSize)
	if err := s.transport.AdminRead(ctx, msg, rsp); err != nil {
		return f, fmt.Errorf("ask for other writers: %w", err)
	}
	if !rsp.IsValid() {
		return f, fmt.Errorf("ask for other writers: the answer is malformed: %w", syscall.EPROTO)
	}
	return rsp.Fields(), nil
}

// askWriters asks the server whether others may write to the device opened as
// id, and stores the answer. It does nothing for a device that is open
// read-only, or a server without the extension.
func (d *Device) askWriters(ctx context.Context, epoch uint64, id uint32) error {
	if d.mode == blk.ReadOnly || d.session.features.Load()&rnbdwire.FeatureOnce == 0 {
		d.writerNotice.Store(nil)
		return nil
	}
	news := d.writerEvents.Load()
	f, err := d.session.askWriters(ctx, id)
	if err != nil {
		return fmt.Errorf("open %q: %w", d.path, err)
	}
	if f.Shared {
		d.writerEvents.Add(1)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if epoch != d.session.currentEpoch() {
		return fmt.Errorf("open %q: %w", d.path, errVoid)
	}
	d.writerNotice.Store(&writerNotice{f.Mark, news})
	if f.Shared {
		d.askAgain(epoch)
	}
	return nil
}

// onShared handles the event that others may write from now on.
func (d *Device) onShared() {
	d.writerEvents.Add(1)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.writerNotice.Load() != nil {
		d.askAgain(d.session.currentEpoch())
	}
}

// askAgain asks the server repeatedly until others may no longer write. The
// caller holds mu.
func (d *Device) askAgain(epoch uint64) {
	if d.asking {
		return
	}
	d.asking = true
	go func() {
		for d.mayAsk(epoch) && d.session.pauseFor(askInterval) {
			ctx, cancel := context.WithTimeout(context.Background(), d.client.cfg.MapTimeout)
			if d.mayAsk(epoch) {
				_ = d.askWriters(ctx, epoch, d.id.Load()) // the earlier answer stays true
			}
			cancel()
		}
	}()
}

// mayAsk reports whether askAgain is to go on. If not, it has ended.
func (d *Device) mayAsk(epoch uint64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	sh := d.writerNotice.Load()
	d.asking = (d.state == Open || d.state == Init) && epoch == d.session.currentEpoch() && sh != nil && sh.isShared(d)
	return d.asking
}
