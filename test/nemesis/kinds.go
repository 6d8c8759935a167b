package nemesis

import (
	"syscall"
	"time"
)

// kind is a kind of faults. A fault acts while it lasts: on packets by wire, on
// the slow disk by disk, on processes and sessions by begin and end.
type kind struct {
	rooted  bool // needs namespaces, wires or slow disks
	path    bool // concerns one path
	instant bool // has no end
	unit    string
	low     float64 // of Size
	high    float64 // 0: it has no Size

	// fails reports whether requests of a device may fail under loss=queue.
	fails func(device string) bool
	wire  func(f *Fault, path int, e *[2]effect)
	disk  func(f *Fault, d *medium)
	begin func(w *world, f *Fault) error
	end   func(w *world, f *Fault) error
}

// medium is the state of the slow disk.
type medium struct {
	delay time.Duration
	hung  bool
	errno syscall.Errno
}

func milliseconds(f *Fault) time.Duration { return time.Duration(f.Size * float64(time.Millisecond)) }

// onPath is a kind that acts on both directions of one path.
func onPath(unit string, low, high float64, act func(f *Fault, e *effect)) kind {
	return kind{rooted: true, path: true, unit: unit, low: low, high: high, wire: func(f *Fault, path int, e *[2]effect) {
		if path == f.Path {
			act(f, &e[toServer])
			act(f, &e[toClient])
		}
	}}
}

// cutOf is a cut of one direction of one path.
func cutOf(direction int) kind {
	return kind{rooted: true, path: true, wire: func(f *Fault, path int, e *[2]effect) {
		if path == f.Path {
			e[direction].cut = true
		}
	}}
}

// onDisk is a kind that acts on the slow disk.
func onDisk(k kind, act func(f *Fault, m *medium)) kind {
	k.rooted, k.disk = true, act
	return k
}

func onSlow(device string) bool { return device == slowDevice }
func onAny(string) bool         { return true }

// kinds by name.
var kinds map[string]kind

func init() { // its functions look at it
	kinds = map[string]kind{
		"server kill":     {begin: (*world).killServer, end: (*world).startServer},
		"server term":     {begin: (*world).endServer, end: (*world).startServer},
		"server stop":     {begin: (*world).freezeServer, end: (*world).thawServer},
		"server crash":    {instant: true, begin: (*world).restartServer},
		"server settings": {fails: onAny, begin: (*world).otherSettings, end: (*world).usualSettings},
		"client stop":     {begin: (*world).freezeClient, end: (*world).thawClient},

		"front end kill":  {instant: true, begin: (*world).killFrontend},
		"front end stop":  {begin: (*world).freezeFrontend, end: (*world).thawFrontend},
		"front end storm": {unit: " kills", low: 2, high: 6, begin: (*world).stormFrontend},
		"plugin kill":     {instant: true, begin: (*world).killPlugin},
		"plugin stop":     {begin: (*world).freezePlugin, end: (*world).thawPlugin},
		"plugin storm":    {unit: " kills", low: 2, high: 6, begin: (*world).stormPlugin},

		"cut":           onPath("", 0, 0, func(_ *Fault, e *effect) { e.cut = true }),
		"cut to server": cutOf(toServer),
		"cut to client": cutOf(toClient),
		"flap":          onPath(" ms", 20, 1000, func(f *Fault, e *effect) { e.flap = milliseconds(f) }),
		"loss":          onPath(" %", 0.5, 30, func(f *Fault, e *effect) { e.lose += f.Size / 100 }),
		"corrupt":       onPath(" %", 0.1, 5, func(f *Fault, e *effect) { e.corrupt += f.Size / 100 }),
		"duplicate":     onPath(" %", 0.5, 30, func(f *Fault, e *effect) { e.duplicate += f.Size / 100 }),
		"reorder":       onPath(" %", 0.5, 30, func(f *Fault, e *effect) { e.reorder += f.Size / 100 }),
		"delay":         onPath(" ms", 1, 300, func(f *Fault, e *effect) { e.delay += milliseconds(f) }),
		"black hole": {rooted: true, wire: func(_ *Fault, _ int, e *[2]effect) { // of all paths
			e[toServer].cut, e[toClient].cut = true, true
		}},
		"reset":     {rooted: true, path: true, instant: true, begin: (*world).reset},
		"reset all": {rooted: true, instant: true, begin: (*world).resetAll},

		"path disconnect":    {path: true, begin: (*world).disconnectPath, end: (*world).reconnectPath},
		"path reconnect":     {path: true, instant: true, begin: (*world).reconnectPath},
		"path delete":        {path: true, begin: (*world).deletePath, end: (*world).addPath},
		"server disconnects": {path: true, instant: true, begin: (*world).serverDisconnects},
		"session reconnect":  {instant: true, begin: (*world).reconnectSession},
		"remap":              {instant: true, begin: (*world).remap},

		"disk slow": onDisk(kind{unit: " ms", low: 1, high: 1000}, func(f *Fault, m *medium) { m.delay = max(m.delay, milliseconds(f)) }),
		"disk hang": onDisk(kind{}, func(_ *Fault, m *medium) { m.hung = true }),
		"disk full": onDisk(kind{fails: onSlow}, func(_ *Fault, m *medium) { m.errno = syscall.ENOSPC }),
		"disk fail": onDisk(kind{fails: onSlow}, func(_ *Fault, m *medium) { m.errno = syscall.EIO }),
	}
}
