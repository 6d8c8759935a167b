package rnbdwire

import (
	"bytes"
	"fmt"
)

// Messages by which a client asks for the names that it may open:
// docs/extend/protocol/rnbd.md, "Lists of names".

// List asks for a page of the names that a server offers.
type List []byte

// IsValid reports whether the accessors may be used: the name must end.
func (m List) IsValid() bool {
	return len(m) >= ListSize && TypeOf(m) == TypeList && bytes.IndexByte(m[8:8+NameSize], 0) >= 0
}

// After is the last name that the client has; empty: it has none.
func (m List) After() string {
	name := m[8 : 8+NameSize]
	return string(name[:bytes.IndexByte(name, 0)])
}

// ListFields are the fields of a List.
type ListFields struct {
	After string // at most 254 bytes, no NUL
}

// Put writes the message into m, which has room for ListSize bytes.
func (f ListFields) Put(m []byte) error {
	if n := len(f.After); n >= NameSize || bytes.IndexByte([]byte(f.After), 0) >= 0 {
		return fmt.Errorf("device name of %d bytes: it has at most %d, without NUL", n, NameSize-1)
	}
	copy(putHeader(m, TypeList, ListSize)[8:], f.After)
	return nil
}

// ListEntry is one name that a server offers.
type ListEntry struct {
	Sectors uint64 // size in units of 512 bytes
	Readers uint16 // sessions that have it open read-only
	Writers uint16 // sessions that have it open for writing
	Block   bool   // a block device, else a file
	Name    string // 1 to 254 bytes, no NUL
	User    string // name of a session that has it open, a writer if there is one; at most 255 bytes
}

// Bits of ListRsp.Flags.
const (
	ListMore       = 1 << 0 // names follow behind the last one of the page
	ListCut        = 1 << 1 // the server has more names than it lists
	ListUnsearched = 1 << 2 // names are paths of block devices, which are not listed
)

// ListRsp is a page: docs/extend/protocol/rnbd.md, "Lists of names".
type ListRsp []byte

const (
	listRspHead = headerSize + 4 + 4 + 4
	listEntry   = 16
	listBlock   = 1 << 0
	listMaxUser = 255
)

// Flags are ListMore, ListCut and ListUnsearched.
func (m ListRsp) Flags() uint32 { return le.Uint32(m[8:]) }

// Entries reads the page. The error says what is malformed.
func (m ListRsp) Entries() ([]ListEntry, error) {
	if len(m) < listRspHead || TypeOf(m) != TypeListRsp {
		return nil, fmt.Errorf("list of %d bytes, type %#x: it is none", len(m), TypeOf(m))
	}
	count, used := le.Uint32(m[4:]), le.Uint32(m[12:])
	if uint64(used) > uint64(len(m)-listRspHead) || uint64(count)*(listEntry+1) > uint64(used) {
		return nil, fmt.Errorf("list of %d bytes says %d names in %d bytes", len(m), count, used)
	}
	rest := m[listRspHead:][:used]
	out := make([]ListEntry, 0, count)
	for range count {
		if len(rest) < listEntry {
			return nil, fmt.Errorf("list ends behind %d of %d names", len(out), count)
		}
		name, user := int(rest[13]), int(rest[14])
		if name == 0 || name >= NameSize || len(rest) < listEntry+name+user {
			return nil, fmt.Errorf("name %d of the list has %d bytes", len(out), name)
		}
		e := ListEntry{
			Sectors: le.Uint64(rest), Readers: le.Uint16(rest[8:]), Writers: le.Uint16(rest[10:]), Block: rest[12]&listBlock != 0,
			Name: string(rest[listEntry:][:name]), User: string(rest[listEntry+name:][:user]),
		}
		if bytes.IndexByte([]byte(e.Name), 0) >= 0 {
			return nil, fmt.Errorf("name %d of the list has a NUL", len(out))
		}
		out, rest = append(out, e), rest[listEntry+name+user:]
	}
	if len(rest) > 0 {
		return nil, fmt.Errorf("list has %d bytes behind its last name", len(rest))
	}
	return out, nil
}

// ListPage makes a ListRsp in memory.
type ListPage struct {
	mem   []byte
	used  int
	count uint32
}

// NewListPage returns an empty page in mem, which has at least ListRspMin bytes and
// belongs to the page until Finish.
func NewListPage(mem []byte) *ListPage {
	clear(mem)
	return &ListPage{mem: mem}
}

// Add appends e. False: there is no room for it, or e cannot be written.
func (p *ListPage) Add(e ListEntry) bool {
	if len(e.User) > listMaxUser {
		e.User = e.User[:listMaxUser]
	}
	at := listRspHead + p.used
	size := listEntry + len(e.Name) + len(e.User)
	if e.Name == "" || len(e.Name) >= NameSize || at+size > len(p.mem) {
		return false
	}
	m := p.mem[at:]
	le.PutUint64(m, e.Sectors)
	le.PutUint16(m[8:], e.Readers)
	le.PutUint16(m[10:], e.Writers)
	if e.Block {
		m[12] = listBlock
	}
	m[13], m[14] = uint8(len(e.Name)), uint8(len(e.User))
	copy(m[listEntry:], e.Name)
	copy(m[listEntry+len(e.Name):], e.User)
	p.used += size
	p.count++
	return true
}

// Finish writes the head of the page with flags.
func (p *ListPage) Finish(flags uint32) {
	le.PutUint16(p.mem, TypeListRsp)
	le.PutUint32(p.mem[4:], p.count)
	le.PutUint32(p.mem[8:], flags)
	le.PutUint32(p.mem[12:], uint32(p.used))
}
