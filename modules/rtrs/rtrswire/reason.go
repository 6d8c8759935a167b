package rtrswire

// Reasons of refusals, an extension between our own ends: see Reasons in
// docs/extend/protocol/rtrs.md.

// ReasonCode says why a server refuses a connection or a session. A code that is not known
// counts as ReasonOther.
type ReasonCode uint16

const (
	ReasonOther     ReasonCode = iota // the errno says as much
	ReasonName                        // another client has a session of the name
	ReasonAddress                     // clients of the address are not admitted
	ReasonLimit                       // clients have as much as they may have
	ReasonClosing                     // the server ends
	ReasonNoSession                   // it has no session of the client
	ReasonProtocol                    // it takes the message for wrong
	ReasonHangs                       // requests of the path's earlier life have not ended
	ReasonSession                     // the user of the transport refuses the session
)

const (
	// MaxRefusalText is the longest text in a refusal of a connection, in bytes.
	MaxRefusalText = ConnRspLen - refusalText
	// MaxReasonText is the longest text in a REASON, in bytes.
	MaxReasonText = 120
	// ReasonHdrLen is the length of a REASON before its text.
	ReasonHdrLen = 8
	// MaxReasonLen is the length of the longest REASON.
	MaxReasonLen = ReasonHdrLen + MaxReasonText

	refusalCode = 28 // in a ConnRsp, in the place of an incarnation
	refusalText = 30
)

// PutReason writes a reason into m, a refusal that announces FeatureReason. The text is cut
// at MaxRefusalText.
func (m ConnRsp) PutReason(code ReasonCode, text string) {
	le.PutUint16(m[refusalCode:], uint16(code))
	copy(m[refusalText:ConnRspLen], plainText([]byte(text), MaxRefusalText))
}

// Reason returns the reason of a refusal. The text is printable ASCII.
func (m ConnRsp) Reason() (code ReasonCode, text string) {
	if m.Features()&FeatureReason == 0 || m.Errno() == 0 {
		return ReasonOther, ""
	}
	return ReasonCode(le.Uint16(m[refusalCode:])), plainText([]byte(cString(m[refusalText:ConnRspLen])), MaxRefusalText)
}

// ReasonMsg refuses a session. A server sends it in the place of an INFO_RSP to a client that
// announces FeatureReason.
type ReasonMsg []byte

// AppendReason appends a REASON to b. errno is positive; the text is cut at MaxReasonText.
func AppendReason(b []byte, errno int, code ReasonCode, text string) ReasonMsg {
	b = le.AppendUint16(b, uint16(MsgReason))
	b = le.AppendUint16(b, reasonVersion)
	b = le.AppendUint16(b, uint16(errno))
	b = le.AppendUint16(b, uint16(code))
	return append(b, plainText([]byte(text), MaxReasonText)...)
}

const reasonVersion = 1

// Valid reports whether m is a REASON.
func (m ReasonMsg) Valid() bool {
	return len(m) >= ReasonHdrLen && len(m) <= MaxReasonLen && MsgType(le.Uint16(m)) == MsgReason && le.Uint16(m[2:]) == reasonVersion && m.Errno() != 0
}

// Errno returns the errno of the refusal, a positive number.
func (m ReasonMsg) Errno() int { return int(le.Uint16(m[4:])) }

// Code returns the code of the reason.
func (m ReasonMsg) Code() ReasonCode { return ReasonCode(le.Uint16(m[6:])) }

// Text returns the text of the reason, in printable ASCII; empty: there is none.
func (m ReasonMsg) Text() string { return plainText(m[ReasonHdrLen:], MaxReasonText) }

// plainText returns the first n bytes of text, with '?' in the place of all that is not
// printable ASCII.
func plainText(text []byte, n int) string {
	out := make([]byte, min(len(text), n))
	for i := range out {
		out[i] = text[i]
		if out[i] < ' ' || out[i] > '~' {
			out[i] = '?'
		}
	}
	return string(out)
}
