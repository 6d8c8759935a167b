package plugin

import "fmt"

// The versions of the ABI. docs/extend/abi/plugin-v1.md lists the changes that are
// allowed within one.
const (
	// ProtocolVersion is the application protocol: the gRPC services of
	// package pluginpb and the order of their calls.
	ProtocolVersion = 1
	// RingVersion is the layout of rings.
	RingVersion = 1
)

// Kind is the kind of a plugin.
type Kind int

const (
	KindIO       Kind = 1 // storage, in the server
	KindFrontend Kind = 2 // how devices appear to users, in the client
)

func (k Kind) String() string {
	switch k {
	case KindIO:
		return "io plugin"
	case KindFrontend:
		return "front-end plugin"
	}
	return fmt.Sprintf("plugin of unknown kind %d", int(k))
}

// CrashClass is the part of the acknowledged writes that survives when the
// plugin's process is killed. Only disks of KeepsAcknowledged go on after a
// crash: the requests that were not answered are given to the next process.
// For the other classes the device fails until it is mapped again.
type CrashClass int

const (
	LosesAll          CrashClass = 0 // memory of the process; the default
	KeepsFlushed      CrashClass = 1 // flushed writes, and those with FUA
	KeepsAcknowledged CrashClass = 2 // every answered write, as a file or block device does
)

func (c CrashClass) String() string {
	switch c {
	case LosesAll:
		return "loses-all"
	case KeepsFlushed:
		return "keeps-flushed"
	case KeepsAcknowledged:
		return "keeps-acknowledged"
	}
	return fmt.Sprintf("crash class %d", int(c))
}

// NameKind is the meaning of a device's name.
type NameKind int

const (
	// NamesPath: a path. The host resolves it under its search path and
	// gives the plugin an O_PATH descriptor.
	NamesPath NameKind = 0
	// NamesOpaque: a string for the plugin; the host touches no path.
	NamesOpaque NameKind = 1
)

func (n NameKind) String() string {
	switch n {
	case NamesPath:
		return "path"
	case NamesOpaque:
		return "opaque"
	}
	return fmt.Sprintf("name kind %d", int(n))
}

// NodeKind is a set of kinds of file.
type NodeKind uint32

const (
	BlockDevices NodeKind = 1 << iota
	RegularFiles
)

// Info describes a plugin.
type Info struct {
	Name    string // short, as in "blockio"
	Version string // of the plugin
	Kind    Kind   // set by ServeIO and ServeFrontend
	Crash   CrashClass
	Names   NameKind
	Matches NodeKind // nodes that paths may name; nothing for opaque names
	// ListsNames reports that the plugin is a Lister. ServeIO sets it.
	ListsNames bool
}
