package rnbdwire

// Event asks for the server's next news: docs/extend/protocol/rnbd.md, "Events". The
// answer comes when there is some.
type Event []byte

// IsValid reports whether the accessors may be used.
func (m Event) IsValid() bool { return len(m) >= EventSize && TypeOf(m) == TypeEvent }

// Seen is the number of the last news that the client has taken; 0: none.
func (m Event) Seen() uint64 { return le.Uint64(m[8:]) }

// Holds reports whether the client holds its requests back, as EventHandOver
// asks it to.
func (m Event) Holds() bool { return le.Uint32(m[4:])&eventHolds != 0 }

// eventHolds is a bit in the flags of an Event.
const eventHolds = 1 << 0

// EventFields are the fields of an Event.
type EventFields struct {
	Seen  uint64
	Holds bool
}

// Put writes the message into m. m must have room for EventSize bytes.
func (f EventFields) Put(m []byte) {
	m = putHeader(m, TypeEvent, EventSize)
	if f.Holds {
		le.PutUint32(m[4:], eventHolds)
	}
	le.PutUint64(m[8:], f.Seen)
}

// EventKind is the kind of an event. Kinds that are not known are to be
// ignored.
type EventKind uint16

const (
	EventResize  EventKind = 1 // the device has another size
	EventRemoved EventKind = 2 // the server closed the device: its I/O fails
	EventDrain   EventKind = 3 // the server is about to end
	EventFailed  EventKind = 4 // the device's I/O fails until EventBack, or for good
	EventBack    EventKind = 5 // the device has failed, and serves again
	EventShared  EventKind = 6 // another session may write to the device, too

	// EventHandOver: the server is about to end, and another process of it goes on
	// within Sectors milliseconds. 0: it does not, the server goes on itself.
	EventHandOver EventKind = 7
)

// EventRsp is news.
type EventRsp []byte

// IsValid reports whether Fields may be used.
func (m EventRsp) IsValid() bool { return len(m) >= EventRspSize && TypeOf(m) == TypeEventRsp }

// EventRspFields are the fields of an EventRsp.
type EventRspFields struct {
	DeviceID uint32    // of the OPEN_RSP; 0 where Kind is about no device
	Number   uint64    // of the news, from 1, growing
	Sectors  uint64    // the size of the device now; of EventHandOver, see there
	Kind     EventKind // the kind of the event
}

// Fields reads the message.
func (m EventRsp) Fields() EventRspFields {
	return EventRspFields{
		DeviceID: le.Uint32(m[4:]), Number: le.Uint64(m[8:]), Sectors: le.Uint64(m[16:]), Kind: EventKind(le.Uint16(m[24:])),
	}
}

// Put writes the message into m. m must have room for EventRspSize bytes.
func (f EventRspFields) Put(m []byte) {
	m = putHeader(m, TypeEventRsp, EventRspSize)
	le.PutUint32(m[4:], f.DeviceID)
	le.PutUint64(m[8:], f.Number)
	le.PutUint64(m[16:], f.Sectors)
	le.PutUint16(m[24:], uint16(f.Kind))
}
