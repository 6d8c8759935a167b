package uring

// SQE is a submission entry in the kernel's layout. The comments give the
// contents of a field for the operations of this package.
type SQE struct {
	Opcode   uint8
	Flags    uint8 // IOSQE_*
	IOPrio   uint16
	FD       int32  // descriptor, or index of a registered file with FixedFile
	Off      uint64 // file offset; URING_CMD: command in the low half
	Addr     uint64 // buffer; FALLOCATE: length
	Len      uint32 // bytes; FALLOCATE: mode
	OpFlags  uint32 // RWF_*, FSYNC flags
	UserData uint64
	BufIndex uint16
	_        uint16
	_        uint32
	cmd      [16]byte // command area; runs on into the next 64 bytes with SQE128
}

// CQE is a completion entry in the kernel's layout.
type CQE struct {
	UserData uint64
	Res      int32 // result, or a negative errno
	Flags    uint32
}

// FixedFile in SQE.Flags says that FD is the index of a registered file.
const FixedFile = 1 << 0

// Async in SQE.Flags has a thread of the kernel start the operation, because
// the start may block. Without it the caller of Submit starts it.
const Async = 1 << 4

const (
	opNop       = 0
	opFsync     = 3
	opReadFixed = 4
	opWriteFix  = 5
	opFallocate = 17
	opRead      = 22
	opWrite     = 23
	opUringCmd  = 46

	fsyncDatasync = 1
)

// Nop completes with 0.
func (s *SQE) Nop() { s.Opcode = opNop }

// Read fills buf from offset off of fd.
func (s *SQE) Read(fd int32, buf []byte, off uint64, rwFlags uint32) {
	s.transfer(opRead, fd, buf, off, rwFlags)
}

// Write stores buf at offset off of fd.
func (s *SQE) Write(fd int32, buf []byte, off uint64, rwFlags uint32) {
	s.transfer(opWrite, fd, buf, off, rwFlags)
}

// ReadFixed is Read to memory within registered buffer number index.
func (s *SQE) ReadFixed(fd int32, buf []byte, off uint64, rwFlags uint32, index uint16) {
	s.transfer(opReadFixed, fd, buf, off, rwFlags)
	s.BufIndex = index
}

// WriteFixed is Write from memory within registered buffer number index.
func (s *SQE) WriteFixed(fd int32, buf []byte, off uint64, rwFlags uint32, index uint16) {
	s.transfer(opWriteFix, fd, buf, off, rwFlags)
	s.BufIndex = index
}

// ReadPages is Read of n bytes to the beginning of registered buffer number
// index. A driver has registered it: no process has its memory.
func (s *SQE) ReadPages(fd int32, n uint32, off uint64, index uint16) {
	s.Opcode, s.FD, s.Off, s.Len, s.BufIndex = opReadFixed, fd, off, n, index
}

// WritePages is Write of n bytes from the beginning of such a buffer.
func (s *SQE) WritePages(fd int32, n uint32, off uint64, index uint16) {
	s.Opcode, s.FD, s.Off, s.Len, s.BufIndex = opWriteFix, fd, off, n, index
}

func (s *SQE) transfer(op uint8, fd int32, buf []byte, off uint64, rwFlags uint32) {
	s.Opcode, s.FD, s.Off = op, fd, off
	s.Addr, s.Len, s.OpFlags = addressOf(buf), uint32(len(buf)), rwFlags
}

// Fsync makes fd's completed writes durable; with datasync, without metadata
// that is not needed to read them.
func (s *SQE) Fsync(fd int32, datasync bool) {
	s.Opcode, s.FD = opFsync, fd
	if datasync {
		s.OpFlags = fsyncDatasync
	}
}

// Fallocate is fallocate(2) with FALLOC_FL_ modes.
func (s *SQE) Fallocate(fd int32, mode uint32, off, n uint64) {
	s.Opcode, s.FD, s.Off, s.Addr, s.Len = opFallocate, fd, off, n, mode
}

// URingCmd sends driver command op to fd; its payload goes to Ring.Cmd.
func (s *SQE) URingCmd(fd int32, op uint32) {
	s.Opcode, s.FD, s.Off = opUringCmd, fd, uint64(op)
}
