package rnbdwire

// Messages that keep a repeated write from taking effect after a later write
// of another client: docs/extend/protocol/rnbd.md, "Writes that are repeated".

// Writer names the client of a session, and asks whether others may write to one of its
// devices, with a mark of the server's time.
type Writer []byte

// IsValid reports whether the accessors may be used.
func (m Writer) IsValid() bool { return len(m) >= WriterSize && TypeOf(m) == TypeWriter }

// NoDevice is the DeviceID of a Writer that names the client, before the first OPEN.
const NoDevice = 1<<32 - 1

// DeviceID is the id of the OPEN_RSP, or NoDevice.
func (m Writer) DeviceID() uint32 { return le.Uint32(m[4:]) }

// Writer is the client's number, the same when the session is made again.
func (m Writer) Writer() uint64 { return le.Uint64(m[8:]) }

// WriterFields are the fields of a Writer.
type WriterFields struct {
	DeviceID uint32 // NoDevice: none
	Writer   uint64 // random, not 0
}

// Put writes the message into m. m must have room for WriterSize bytes.
func (f WriterFields) Put(m []byte) {
	m = putHeader(m, TypeWriter, WriterSize)
	le.PutUint32(m[4:], f.DeviceID)
	le.PutUint64(m[8:], f.Writer)
}

// WriterRsp answers a Writer.
type WriterRsp []byte

// IsValid reports whether Fields may be used.
func (m WriterRsp) IsValid() bool { return len(m) >= WriterRspSize && TypeOf(m) == TypeWriterRsp }

// Mark is a moment by the clock of a server. Clocks of different servers, and of
// one before and after a restart, do not compare.
type Mark struct {
	Server uint64 // a random number of the server's process; 0: no mark
	Time   uint64 // nanoseconds
}

// WriterRspFields are the fields of a WriterRsp.
type WriterRspFields struct {
	Shared bool // another client may write to the device, too
	Mark   Mark // when the server answered
}

const sharedFlag = 1 << 0

// Fields reads the message.
func (m WriterRsp) Fields() WriterRspFields {
	return WriterRspFields{le.Uint32(m[4:])&sharedFlag != 0, getMark(m[8:])}
}

// Put writes the message into m. m must have room for WriterRspSize bytes.
func (f WriterRspFields) Put(m []byte) {
	m = putHeader(m, TypeWriterRsp, WriterRspSize)
	if f.Shared {
		le.PutUint32(m[4:], sharedFlag)
	}
	f.Mark.put(m[8:])
}

func getMark(m []byte) Mark { return Mark{le.Uint64(m), le.Uint64(m[8:])} }

func (k Mark) put(m []byte) {
	le.PutUint64(m, k.Server)
	le.PutUint64(m[8:], k.Time)
}

// IOOnce is a block request that changes the device, with a number: a server
// that has carried it out in this session answers as before and does no more.
type IOOnce []byte

// IsValid reports whether the accessors may be used.
func (m IOOnce) IsValid() bool { return len(m) >= IOOnceSize && TypeOf(m) == TypeIOOnce }

// IO is the request; its type is not TypeIO.
func (m IOOnce) IO() IO { return IO(m[:IOSize]) }

// Number is that of the request, the same whenever it is sent; not 0.
func (m IOOnce) Number() uint64 { return le.Uint64(m[IOSize:]) }

// PutIOOnce makes an IOOnce of the IO at the start of m. m must have room for
// IOOnceSize bytes.
func PutIOOnce(m []byte, number uint64) {
	le.PutUint16(m, TypeIOOnce)
	le.PutUint64(m[IOSize:IOOnceSize], number)
}

// IOAgain is an IOOnce that was sent before: in a session that has been lost, or
// when the device was open under another id.
type IOAgain []byte

// IsValid reports whether the accessors may be used.
func (m IOAgain) IsValid() bool { return len(m) >= IOAgainSize && TypeOf(m) == TypeIOAgain }

// IO is the request; its type is not TypeIO.
func (m IOAgain) IO() IO { return IO(m[:IOSize]) }

// Number is that of the request, as it was sent first.
func (m IOAgain) Number() uint64 { return le.Uint64(m[IOSize:]) }

// Fields reads the fields that an IOOnce does not have.
func (m IOAgain) Fields() AgainFields {
	return AgainFields{Since: getMark(m[IOOnceSize:]), Shared: m[sharedAt]&sharedFlag != 0}
}

// sharedAt is the place of a flag in the padding of an IO.
const sharedAt = 26

// AgainFields say when a request that is repeated may have been carried out.
type AgainFields struct {
	Since  Mark // not before; the zero Mark: not known
	Shared bool // another client may have written to the device since
}

// PutIOAgain makes an IOAgain of the IO at the start of m. m must have room
// for IOAgainSize bytes.
func PutIOAgain(m []byte, number uint64, f AgainFields) {
	le.PutUint16(m, TypeIOAgain)
	m[sharedAt] = 0
	if f.Shared {
		m[sharedAt] = sharedFlag
	}
	le.PutUint64(m[IOSize:], number)
	f.Since.put(m[IOOnceSize:IOAgainSize])
}
