package blk

// Check returns OK if a request of op at off for n bytes is within the limits l,
// or else the errno to refuse it with. A flush has no range. Beyond the end the
// errno is EIO, as in the Linux block layer (docs/extend/protocol/rnbd.md, "I/O
// errors").
func (l *Limits) Check(op Op, off, n uint64) Errno {
	if !op.Valid() {
		return EOPNOTSUPP
	}
	if op == Flush {
		return OK
	}
	if l.ReadOnly && op.Modifies() {
		return EROFS
	}
	if errno := l.checkSupported(op, n); errno != OK {
		return errno
	}
	if mask := uint64(l.LogicalBlockSize) - 1; (off|n)&mask != 0 || n == 0 {
		return EINVAL
	}
	if n > l.Size || off > l.Size-n {
		return EIO
	}
	return OK
}

func (l *Limits) checkSupported(op Op, n uint64) Errno {
	switch op {
	case Discard:
		if l.MaxDiscard == 0 {
			return EOPNOTSUPP
		}
	case WriteZeroes:
		if l.MaxWriteZeroes == 0 {
			return EOPNOTSUPP
		}
	case SecureErase:
		if !l.SecureErase {
			return EOPNOTSUPP
		}
	default:
		if l.MaxIOSize != 0 && n > uint64(l.MaxIOSize) {
			return EINVAL
		}
	}
	return OK
}
