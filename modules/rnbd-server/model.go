package server

import (
	"context"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/access"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/tally"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/watchdog"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// The structs of the server. They point to one another, so they stand together;
// their methods are in the files of their stage. Nothing is decided here: who may
// touch a field, and under which lock, is beside the field.

// Server exports devices. New makes it, Close ends it.
type Server struct {
	cfg     Config
	log     *slog.Logger
	jail    jail
	pumps   []*pumpShare
	plugins []*ioPlugin
	front   atomic.Pointer[listeners] // nil: the server does not listen

	// sessions by index; pumps read it, SessionUp and SessionDown write.
	sessions [MaxSessions]atomic.Pointer[session]

	nodes   nodeLocks     // order the OPENs and CLOSEs of each node
	lookUps chan struct{} // a token for each lookup of a name
	lists   chan struct{} // a token for each LIST
	opens   atomic.Int64  // OPENs under way
	refused refusalCounts
	// unknownFlags is the number of requests with flags that are not known.
	unknownFlags atomic.Uint64
	rules        atomic.Pointer[ruleSet]
	owners       sessionOwners
	sharesMu     sync.Mutex      // guards the counts of budgets, mapping.share, and the change of rules
	quotas       sync.Mutex      // held while a volume is made or grows that counts in a quota
	admins       context.Context // of OPENs; ends with the server
	stopAdmins   func()

	// The order of locks is documented at ioPlugin.
	number uint64 // of this server's clock, told to clients; not 0

	incarnation incarnation

	mu        sync.Mutex // guards devices, guards, their users, writers, usages and forgotten
	devices   map[deviceKey]*device
	guards    map[deviceKey]*guard
	writers   writerCounts
	histories map[nodeID]*writerHistory
	// forgotten is the time until which clients may have written to nodes
	// without a history.
	forgotten int64

	admin   sync.WaitGroup // requests answered off the pumps
	stopped atomic.Bool    // no plugin runs any more
	leaving atomic.Bool    // a hand-over is under way: no device is opened whose writes it would lose

	fdatasync func(fd int) error // fdatasync(2); tests have others

	watchdog     *requestWatchdog // nil: HungAfter is zero
	stopWatchdog func()           // ends it and waits for its end
	stopWatch    func()           // ends watchSizes and waits for its end
	nodeOpened   chan struct{}    // has a token when a device with a node was opened
}

// listeners is the transport of a server, and the places where it listens.
type listeners struct {
	rtrs   *rtrs.Server
	listen []Listen
	bound  []string // fabric://addr:port of each listener
}

// pumpShare is the part of the server that belongs to one pump.
type pumpShare struct {
	pump   *pump.Pump
	poller *rtrs.Poller
	pacer  *pumpTimer
	// Read by the watchdog. The requests that have begun and those that have ended are as
	// many while none is in flight.
	failed       watchdog.Recent[*device]
	begun, ended tally.Count
}

// busy reports whether a request is in flight. Any goroutine.
func (p *pumpShare) busy() bool {
	ended := p.ended.Load() // first: it is never ahead
	return p.begun.Load() != ended
}

// session is one RTRS session: its chunks, the requests in them, and its open
// devices.
type session struct {
	name      string
	transport *rtrs.SrvSession
	arena     *shm.Arena
	index     uint32 // in Server.sessions, and the arena's number in every plugin
	chunkSize uint64
	fabric    string // of the first path

	// reqs[chunk] is the request in that chunk. A chunk belongs to one pump
	// at a time: RTRS claims it before it delivers the request.
	reqs []request
	// lanes[queue] is this session's share of an ioQueue; owned by its pump.
	lanes []sessionLane

	// table[id] is the mapping with that device id; nil: unknown. It is
	// copied on write. Pumps read it.
	table atomic.Pointer[[]*mapping]

	mu     sync.Mutex // guards the changes of table and attached, and events
	events eventQueue

	// rulesMu makes it one step to check a joining path and to admit it.
	rulesMu  sync.Mutex
	admitted int // id of the path that was admitted last; guarded by rulesMu

	// arenaMu is held while a handle of the arena is made for a plugin, so that
	// the arena is not freed meanwhile. It is taken before mu and ioPlugin.mu.
	arenaMu sync.Mutex
	// ended reports that only retired requests keep the session. It is set
	// with arenaMu and mu held, so that SessionDown finds everything that was
	// added before.
	ended atomic.Bool
	// holds counts the reasons to keep the session: the transport, and each
	// message that opens or closes devices and is not answered yet.
	holds   atomic.Int32
	version atomic.Uint32 // of the protocol, 0 before SESS_INFO
	writer  atomic.Uint64 // number by which the client identifies itself; 0: none yet
	lookUps chan struct{} // a token for each lookup of a name
	listing atomic.Bool   // a LIST is under way
	reasons openReasons   // of OPENs that were refused
}

// eventQueue has the events of one session. session.mu guards it.
type eventQueue struct {
	last    uint64        // number of the latest event
	drain   uint64        // number of EventDrain; 0: none
	leave   uint64        // number of EventHandOver; 0: none
	grace   time.Duration // in it
	holds   bool          // the client holds its requests back
	listens bool          // the client has asked for events
	heard   chan struct{} // not nil: closed with the next EVENT, and with the session
	waiting *rtrs.Op      // its parked EVENT; nil: none
	seen    uint64        // number of the last event that the client has seen
}

// mapping is a device opened by one session.
type mapping struct {
	id      uint32
	name    string // name in the OPEN
	mode    blk.AccessMode
	dev     *device
	session *session
	// closed makes new requests fail with ENOTCONN.
	closed atomic.Bool
	// released reports that closeMapping has ended: nothing of the mapping reaches the
	// device any more, and another client may write.
	released atomic.Bool
	identity string                 // what the client had proved at the OPEN; empty: nothing
	private  bool                   // a publication of the volume allows it; the rules do not apply
	budget   atomic.Pointer[budget] // of its rule; nil: nothing holds up its requests
	share    *budget                // where it is counted; guarded by Server.sharesMu
	flows    []mappingFlow          // by pump
	event    mappingEvent           // guarded by session.mu

	asking atomic.Pointer[extentsCall] // an EXTENTS under way; nil: none

	writers     *writerHistory // of the node; nil: opened read-only
	writer      uint64         // number of the client
	named       bool           // the client has sent its number
	wroteBefore atomic.Int64   // time until which writes stored no time in flows; 0: they all did
	refusals    atomic.Int64   // repetitions refused
	// told is the last flushError that the mapping was answered with, known the last that
	// the client is sure to know. See flusherrors.go.
	told, known  atomic.Uint64
	writerNotice uint64      // number of the event that others may write; guarded by session.mu
	cut          atomic.Bool // outlive runs: the session has lost its paths with requests in flight
}

// extentsCall is an EXTENTS under way.
type extentsCall struct {
	cancel context.CancelFunc
	ended  chan struct{} // closed at its end
}

// mappingEvent is the latest event of one mapping. session.mu guards it.
type mappingEvent struct {
	number uint64 // 0: none
	kind   rnbdwire.EventKind
}

// writerHistory is the record of the writers of one node. Times are latency.Now.
//
// Writes store a time in their flow only while two mappings may write, and for a while afterwards.
// The order matters: a write stores its time, then reads repeats; a repetition increments repeats,
// then reads the times of others. So one of them sees the other. At its end a write stores its time
// before it leaves flow.inflight, and a repetition reads inflight before the time.
type writerHistory struct {
	shared  atomic.Bool  // two mappings may write, or could until lately
	repeats atomic.Int32 // repetitions in flight, and mappings without a path that have requests in flight
	flushes flushErrors
	losses  atomic.Uint64 // flushErrors that came with no answer of a plugin

	mu      sync.Mutex      // taken after all other locks
	writers []*mapping      // mappings that may write
	by      uint64          // writer of those
	held    []func()        // functions that continue the writes waiting for the end of repetitions
	gone    departedWriters // mappings that were closed
	calm    *time.Timer     // runs stopTiming; nil before the first mapping is closed
	// lossText is the last of losses in words.
	lossText string
}

// departedWriters has the times of the last writes of closed mappings.
type departedWriters struct {
	latest uint64 // the writer that wrote last
	at     int64  // its last write, or its close; 0: there is none
	others int64  // the same of the others
}

// device is a node opened by an io plugin, for all mappings that use it.
type device struct {
	key    deviceKey
	index  uint32 // in the plugin's process
	name   string // name of the first OPEN
	path   string
	file   *os.File // O_PATH; nil for opaque names. Kept for the next process.
	plugin *ioPlugin
	volume uint64 // volume of the node when it was opened
	// verifier is a rnbdwire.Verifier, see durable.go.
	verifier atomic.Uint64
	diskSeq  string // of a block device, when it was opened
	limits   atomic.Pointer[blk.Limits]

	word    atomic.Uint32 // a devState; changed by move, read by pumps
	why     failureReason // when failing or failed; guarded by plugin.mu
	openErr string        // of failedOpen and failedChanged; guarded by plugin.mu
	told    bool          // clients know that it has failed; guarded by plugin.mu
	guard   *guard        // present while there are users
	retired atomic.Int64  // requests of lost paths that have not ended; counted by pumps
	users   int           // guarded by Server.mu

	extentsToken chan struct{} // has a token while the plugin is asked for extents
	hangs        atomic.Bool   // the plugin may be at an earlier question still

	watching atomic.Bool // watch is at work
	sizeMu   sync.Mutex  // one call to the plugin about the size at a time
	nodeSize uint64      // size of the node in bytes, when last checked; guarded by sizeMu
	untaken  uint64      // such a size that the plugin did not take, when last logged; guarded by sizeMu

	latency  []pumpLatencies     // by pump; only that pump writes
	failures []watchdog.Failures // likewise
	loads    []pumpLoad          // by pump
}

// deviceKey identifies a device: openings with the same key share it. A
// read-only opening of a node has its own key, since the server may not be
// able to write to the node.
type deviceKey struct {
	id       nodeID
	readOnly bool
}

// pumpLatencies are the latencies of a device's requests on one pump.
type pumpLatencies struct {
	queue  latency.Ops // from the client's request to the plugin's ring
	plugin latency.Ops // from there to the plugin's completion
}

// failureReason is the reason why a device is failing or failed.
type failureReason uint8

const (
	failedLost    failureReason = iota // the plugin loses acknowledged writes; for good
	failedShrunk                       // requests may lie beyond its end; for good
	failedChanged                      // another volume, or limits that users do not know; for good
	failedPlugin                       // the plugin is given up; until it is reset
	failedOpen                         // it does not open again; tries continue
)

// mappingFlow is the I/O of one mapping on one pump. Only that pump writes it.
type mappingFlow struct {
	inflight atomic.Int64
	rx, tx   tally.Count  // sectors of 512 bytes: written by the client, read by the client
	wroteAt  atomic.Int64 // see writerHistory

	lane       *sessionLane
	load       *pumpLoad
	next       *mappingFlow // in the lane
	head, tail int32        // chunks of the requests that wait; -1: none
	sent       int32        // requests in the plugin
	listed     bool         // in the lane
}

// pumpLoad counts the requests of one device in the plugin on one pump.
type pumpLoad struct {
	sent int32
	_    [60]byte // padding to a cache line
}

// sessionLane is the share of one session in one ioQueue.
type sessionLane struct {
	s           *session
	first, last *mappingFlow // flows with waiting requests, in turn
	sent        int32        // requests in the plugin
	active      int32        // flows with requests that wait or are in the plugin
	listed      bool         // in ioQueue.waiting
}

// request is the state of the I/O in one chunk.
type request struct {
	op    *rtrs.Op
	m     *mapping
	sqe   shm.SQE
	next  int32 // chunk of the next request in the flow; -1: last
	state reqState
	// retired reports that the path has ended without the request. Its
	// completion changes nothing for a client.
	retired bool
	// preflush reports that the plugin gets a flush first, and sqe when the flush
	// has succeeded.
	preflush bool
	// repeats reports that the write was sent before and counts in
	// writerHistory.repeats.
	repeats bool
	// number is the number of the write. done is the number of the last write
	// in this chunk that a plugin has finished, and doneErrno its result. 0
	// means none.
	number, done uint64
	doneErrno    blk.Errno
	// maybe is the number of the last write in this chunk that ended while a
	// dead plugin had it: it may have been carried out. 0 means none.
	// maybeSince is the time at which the plugin was first asked.
	maybe      uint64
	maybeSince int64
	// tells is the flushError that the last request in this chunk was answered with, and
	// teller its mapping; nil: with none.
	teller *mapping
	tells  uint64
	// arrived is the time at which the request came from the client, sent
	// that at which the plugin was first asked; 0: not yet.
	arrived, sent int64
	budget        *budget // that counts the request in its queue depth; nil: none
	// owner is the queue that has the request, as ioQueue.ownerNumber; 0: none.
	// Only that queue's pump uses the rest of the struct. owner is atomic,
	// because a pump reads it of requests of other pumps when it looks for
	// its own.
	owner atomic.Int32
}

// reqState is the position of a request.
type reqState uint8

const (
	reqIdle    reqState = iota
	reqBacklog          // waits in its mapping's flow for room in the ring
	reqSent             // in the ring or in the plugin
	reqParked           // waits for its device to return after a plugin's death
	reqHeld             // a write that waits for the end of another client's repetition
)

// ioQueue is one pump's ring to one plugin process.
type ioQueue struct {
	server *Server
	plugin *ioPlugin
	pump   int
	index  int // in session.lanes
	ring   *shm.Ring
	sub    *shm.Submitter // nil: the plugin is down
	flush  shm.SQE        // scratch of entry
	// last is the session that used the queue last, at the time lastAt.
	// sharedUntil is the end of the time in which sessions count as sharing the
	// queue, modestUntil that in which one of them counts as modest. Times are
	// those of the pump's clock.
	last                                  *sessionLane
	now, lastAt, sharedUntil, modestUntil time.Duration
	// waiting are the lanes with a backlog, served round-robin from turn.
	waiting []*sessionLane
	turn    int
	cqes    [64]shm.CQE
}

// ioPlugin is one storage plugin, with its open devices and the sessions whose
// memory it is shown. supervise keeps its process running.
//
// Locks of the package are taken in this order: device.sizeMu, session.arenaMu,
// session.mu, ioPlugin.mu, Server.mu, nodeLocks.mu. None is held during a system
// call on a name that a client chose. ioPlugin.mu and Server.mu are held for a
// few lines at a time, never during a call to a plugin or to a pump, and never
// one inside the other. A nodeLock is taken before all of them. session.rulesMu
// is taken inside none of them, and none inside it.
type ioPlugin struct {
	server *Server
	cfg    PluginConfig
	log    *slog.Logger
	queues []*ioQueue                  // by pump
	told   atomic.Pointer[plugin.Info] // by the first process; nil: none has run yet
	sup    *supervise.Supervisor

	life    context.Context // ends with stop
	endLife context.CancelFunc
	opens   chan struct{}  // tokens for devices that are opened again
	work    sync.WaitGroup // goroutines that wait for fences; Add only while in is not nil, or by the supervisor

	mu      sync.Mutex          // guards the rest, and the states of devices
	in      *supervise.Instance // the process that serves; nil: none
	dead    *supervise.Instance // the last process that has ended
	indices indexAllocator
	devices map[uint32]*device
	// shown has the sessions with an arena that every new process is shown.
	shown map[*session]*arenaShow
	// mappings is how many the sessions have, leaving is closed when the process has let go
	// of the arena of a session that has none left.
	mappings map[*session]int
	leaving  map[*session]chan struct{}
}

// arenaShow is the state of a session's arena in a process of a plugin.
type arenaShow struct {
	in   *supervise.Instance // nil: no process has it
	done chan struct{}       // closed when in has answered
	err  error               // of the answer; read after done
}

// budget is the common share of all clients of a rule.
type budget struct {
	pace   atomic.Pointer[rateLimits]
	ops    tokenBucket
	bytes  tokenBucket
	queued atomic.Int64  // requests in plugins
	waited atomic.Uint64 // requests that had to wait

	// Guarded by Server.sharesMu.
	sessions map[*session]int // devices by session
	devices  int
}

// ruleSet are the rules in force, with the budget of each.
type ruleSet struct {
	*access.Rules
	budgets []*budget // by rule
}

// refusalCounts counts the refusals by Config's limits.
type refusalCounts struct{ opens, devices atomic.Uint64 }

// nodeLocks order the OPENs and CLOSEs of one node one after another. Those of
// different nodes run at the same time. A nodeLock is held during calls to the
// plugin. It is not a mutex, because it concerns one node and waiters may give
// up.
type nodeLocks struct {
	mu    sync.Mutex
	nodes map[nodeID]*nodeLock
}

// nodeLock orders the OPENs and CLOSEs of one node.
type nodeLock struct {
	of    *nodeLocks
	id    nodeID
	users int           // callers that have it or wait for it; guarded by nodeLocks.mu
	free  chan struct{} // holds one token while no caller has it
}

// requestWatchdog is the watchdog of a server.
type requestWatchdog struct {
	server   *Server
	reporter *watchdog.Reporter
	looks    []*pumpScan // by pump
}

// pumpScan is the scan of one pump. The pump owns found until it sets done.
type pumpScan struct {
	server  *Server
	pump    int
	done    atomic.Bool
	found   []watchdog.Hung
	asked   time.Time
	isStuck bool // it was reported that the pump does not answer
}

// guard is a description of a node that the server keeps open for as long as
// the node is open. No I/O goes through it. It has three uses:
//
//   - Opened for writing it holds the lock fence.Owner. The locks of a plugin's
//     process go when its I/O has ended; another server that waits for them
//     would write then, and the next process, repeating its requests, would overwrite that.
//     So servers first take the lock that does not go with a process.
//   - It shows when the locks of a dead process have gone, where no process is
//     to be started that would wait for them.
//   - It is told of errors of write-back that a dead process was told of, and took with it:
//     flusherrors.go.
type guard struct {
	file  *os.File // nil: the node cannot be opened, or its plugin loses writes with its process
	users int      // guarded by Server.mu
	// readOnly reports that file is opened for reading, unlocked that it holds no lock.
	readOnly, unlocked bool
}
