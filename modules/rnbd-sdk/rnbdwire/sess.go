package rnbdwire

// SessInfo is the first message of a session. Its reserved bytes are not
// looked at: the kernel's client leaves them uninitialised.
type SessInfo []byte

// IsValid reports whether the accessors may be used.
func (m SessInfo) IsValid() bool { return len(m) >= SessInfoSize && TypeOf(m) == TypeSessInfo }

// Version is the sender's major version.
func (m SessInfo) Version() uint8 { return m[4] }

// SessInfoFields are the fields of a SessInfo.
type SessInfoFields struct{ Version uint8 }

// Put writes the message into m. m must have room for SessInfoSize bytes.
func (f SessInfoFields) Put(m []byte) { putHeader(m, TypeSessInfo, SessInfoSize)[4] = f.Version }

// SessInfoRsp answers a SessInfo.
type SessInfoRsp []byte

// IsValid reports whether the accessors may be used.
func (m SessInfoRsp) IsValid() bool {
	return len(m) >= SessInfoRspSize && TypeOf(m) == TypeSessInfoRsp
}

// Version is the smaller of both ends' versions.
func (m SessInfoRsp) Version() uint8 { return m[4] }

// Bits of SessInfoRspFields.Features.
const (
	FeatureEvents   = 1 << 0 // the server answers Event
	FeatureOpenAs   = 1 << 1 // the server answers OpenAs
	FeatureIdentity = 1 << 2 // OpenRsp has Volume and Properties
	FeatureOnce     = 1 << 3 // the server answers Writer, IOOnce and IOAgain
	FeatureList     = 1 << 4 // the server answers List
	FeatureExtents  = 1 << 5 // the server answers Extents
	FeatureVerifier = 1 << 6 // the server answers an Open with OpenRspFullSize bytes to a client that asks for as many
	FeatureReasons  = 1 << 8 // the server answers AskReason
)

// Features are the extensions that the server has; 0 from a kernel.
func (m SessInfoRsp) Features() uint16 {
	if le.Uint32(m[5:]) != extMagic || m[9] == 0 {
		return 0
	}
	return le.Uint16(m[10:])
}

// extMagic marks an announcement of extensions in the reserved bytes of
// SESS_INFO_RSP: magic, version, features. A kernel sends zeros there.
const (
	extMagic   = 0x58424e52 // "RNBX"
	extVersion = 1
)

// SessInfoRspFields are the fields of a SessInfoRsp.
type SessInfoRspFields struct {
	Version  uint8
	Features uint16 // 0: the extension block is left out
}

// Put writes the message into m. m must have room for SessInfoRspSize bytes.
func (f SessInfoRspFields) Put(m []byte) {
	m = putHeader(m, TypeSessInfoRsp, SessInfoRspSize)
	m[4] = f.Version
	if f.Features != 0 {
		le.PutUint32(m[5:], extMagic)
		m[9] = extVersion
		le.PutUint16(m[10:], f.Features)
	}
}
