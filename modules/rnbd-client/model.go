package client

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

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
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// The structs of the client. They point to one another, so they stand together;
// their methods are in the files of their stage. Nothing is decided here: who may
// touch a field, and under which lock, is beside the field.

// Client maps devices. New makes it, Close ends it.
type Client struct {
	cfg       Config
	log       *slog.Logger
	token     string // distinguishes this client from others of the host
	started   time.Time
	pumps     []*pumpShare
	frontends []*frontend
	fabrics   atomic.Pointer[map[string]verbs.Device] // by name; replaced as a whole

	// devices by index; pumps read it.
	devices [MaxDevices]atomic.Pointer[Device]

	gates atomic.Uint32 // number of changes of gates of all devices

	// Locks are taken in this order: saving, mapMu, mu, session.mu,
	// frontend.mu, attachment.mu, Device.mu. No lock is held during a wait for
	// a server, a front end or a name that a user chose. saving is held while
	// the state file is written.

	leaveNothing atomic.Bool // Close takes disks in use away, too

	// Guarded by mapMu: see client_handover.go. With either set the state file is another
	// process's.
	away      bool // another process has, or is to get, the devices
	returning bool // TakeOver has begun, and ServeUsers was not called

	saving    sync.Mutex  // held by the writer of the state file
	unsaved   atomic.Bool // something has changed since it was written
	unwritten string      // why it cannot be written; guarded by saving

	mapMu    sync.Mutex              // mapDone unlocks it
	places   map[uint32]*reservation // of mappings, by index
	retired  map[uint32]*Device      // by index: unmapped devices with requests under way
	retiring sync.WaitGroup          // of retired; Add only with mapMu held
	waiting  []savedDevice           // mappings to be made again: of the last daemon, and remapped by force; see setWaiting
	reserved []string                // names that mappings get only if they ask for them
	foreign  []savedLeftover         // disks of the last daemon that no front end here can remove
	waitMu   sync.Mutex              // held with mapMu to change waiting; either is enough to read it

	files     keptFiles       // of mappings that are to be made again
	life      context.Context // ends with Close
	endLife   context.CancelFunc
	restoring sync.WaitGroup
	watch     *requestWatchdog // nil: HungAfter is zero
	watchers  sync.WaitGroup

	mu       sync.Mutex // guards sessions and their devices
	sessions map[string]*session
	changing map[string]chan struct{} // names of sessions that are being opened or closed
	ended    endedSessions
}

// keptFiles has the mounts of devices that are to be mapped again, by the identities of the mappings.
type keptFiles struct {
	mu   sync.Mutex
	byID map[string]*mountedFile
}

// endedSessions has the end times of sessions of this client that ended lately,
// by name.
type endedSessions map[string]time.Time

// pumpShare is the part of the client that belongs to one pump.
type pumpShare struct {
	client *Client
	index  int
	pump   *pump.Pump
	poller *rtrs.Poller
	// sources is indexed by the number in RTRS's tags. The pump owns it.
	// Entries of dead front ends stay until their requests have ended.
	sources []*ringSource
	// Owned by the pump: lane.go.
	lanes  *sessionLane // to be served
	stuck  *sessionLane // lanes with devices that wait for permits or their window
	parked deviceList   // devices with a closed gate, at the last change counted in gates
	gates  uint32
	number uint64 // of the last write, see again.go

	// Read by the watchdog. The requests that have begun and those that have ended are as
	// many while none is in flight.
	failed       watchdog.Recent[*Device]
	begun, ended tally.Count
}

// busy reports whether a request is in flight. Any goroutine.
func (p *pumpShare) busy() bool {
	ended := p.ended.Load() // first: it is never ahead
	return p.begun.Load() != ended
}

// Device is a mapped device.
type Device struct {
	client  *Client
	log     *slog.Logger
	index   uint32
	name    string
	path    string // on the server
	mode    blk.AccessMode
	loss    Loss
	session *session
	arena   *shm.Arena
	region  *rtrs.Region
	slot    int               // size of a slot of the arena, in bytes
	options map[string]string // of the front end, as the user gave them
	ioMode  string            // asked for by the user; empty: the server chooses
	// pollQueues is the number in the request of the mapping.
	pollQueues int
	// identity names the mapping to front ends. Later processes get the same.
	identity string
	// leaves reports that the next process of the daemon goes on with it: set once, by
	// depart.
	leaves atomic.Bool

	choices []frontendChoice // of a front end, while d is being mapped

	// Read by the pumps.
	fe           atomic.Pointer[frontend]        // nil: used through NewIO
	att          atomic.Pointer[attachment]      // attachment of the device at fe
	host         atomic.Pointer[frontendProcess] // the process that may send requests; nil: none, or used through NewIO
	id           atomic.Uint32                   // on the server
	limits       atomic.Pointer[blk.Limits]
	gate         atomic.Uint32
	denied       atomic.Bool                  // set by pumps: the server does not know the device
	writerNotice atomic.Pointer[writerNotice] // see again.go; nil: the server has not answered
	refused      atomic.Int64                 // writes not repeated by the server and not logged yet
	writerEvents atomic.Uint64                // number of events that others may write
	unreported   atomic.Bool                  // acknowledged writes were lost, and no flush has failed since: durable.go
	reported     atomic.Bool                  // set by pumps: a flush has failed for that, and it is not logged yet
	// flushFailed is the time, by the clock of pumps, of the last answer, of the server or for
	// lost writes, that a flush has failed; 0: there was none, or users know. untold reports
	// that a front end may have taken such an answer with it, which is not logged yet.
	flushFailed atomic.Int64
	untold      atomic.Bool
	shares      []deviceShare // by pump

	latency []pumpLatencies // by pump; only that pump writes

	mu           sync.Mutex // taken after all other locks; held to change limits
	state        State
	openedIn     uint64 // epoch of the session in which the server opened it as id; 0: not open there
	needsRemap   bool
	expired      bool        // closed, and the time of loss=queue has run out: opens again when no user has the device open
	reopening    bool        // reopenUntilOpen runs
	deniedOpen   bool        // closed by onDenied
	failing      bool        // open, but failed on the server
	stopped      bool        // open, and its requests wait for a hand-over of the server
	patience     *time.Timer // timer of loss=queue; runs while closed, and not for ever
	patienceEnds time.Time
	lastError    string
	location     string       // where users find it, reported by the front end
	passedOver   []string     // front ends of "auto" that do not work here, with the reason
	served       uint64       // last size from the server, in bytes
	known        *deviceFacts // nil: not opened yet
	settled      uint64       // acknowledged writes whose loss, or success, users know; see durable.go
	losses       uint64       // how often acknowledged writes were lost
	lossWhy      error        // of the last of them; nil: of an earlier process, or none
	asking       bool         // askAgain runs

	asksExtents chan struct{} // has room for the EXTENTS that may be under way: one
}

// deviceShare is the part of a device that belongs to one pump.
type deviceShare struct {
	// Only that pump writes these fields.
	inflight atomic.Int64 // requests of front ends without an answer
	rx, tx   tally.Count  // 512-byte sectors read, written
	cached   tally.Count  // acknowledged writes that need a flush
	flushed  tally.Count  // the most of them, of all pumps, that a flush of this pump has covered
	failures watchdog.Failures

	// Owned by the pump: lane.go.
	waiting requestList
	sent    int      // requests that hold a permit
	placed  bool     // it is in a list of devices
	next    *Device  // in that list
	_       [64]byte // the next share is on another cache line
}

// pumpLatencies are the latencies of a device's requests on one pump.
type pumpLatencies struct {
	queue latency.Ops // from the front end's ring to sending
	wire  latency.Ops // from sending to the answer
}

// writerNotice is the server's last answer about other writers of a device. A
// write keeps the answer that was current when it was first sent.
type writerNotice struct {
	mark         rnbdwire.Mark // of the server's answer
	writerEvents uint64        // Device.writerEvents before the question to the server
}

// session is one RTRS session and the devices mapped through it.
type session struct {
	client    *Client
	name      string
	log       *slog.Logger
	transport *rtrs.Session
	lanes     []*sessionLane // by pump
	window    atomic.Pointer[permitWindow]

	version uint8
	// features are the extensions of the server that is connected now.
	features atomic.Uint32
	writer   uint64 // number of the session's client for servers; the same for every transport
	// downs counts losses of the last path, see epoch.
	downs      atomic.Uint64
	redundancy pathWatch
	unlisten   func() // ends listen
	// ready reports that the server has answered SESS_INFO since the session is
	// connected.
	ready atomic.Bool
	turns chan struct{} // tokens of devices that are being opened again
	// leaving reports that the server hands over to its next process: requests
	// wait, whatever their loss policy is. See handover.go.
	leaving atomic.Bool

	port       uint16 // for paths that control files add
	pollQueues int
	fabric     string // of the first path
	spelling   pathSpelling
	tuning     liveTuning

	devices []*Device // guarded by Client.mu

	mu       sync.Mutex  // guards the fields below
	removing map[int]int // by id of a path, the number of its removals under way

	// opening is the number of OPENs under way. early has the events of
	// unknown devices that came meanwhile: see awaitOpen.
	opening int
	early   []rnbdwire.EventRspFields

	leavingEnds *time.Timer // ends leaving; nil: there was no hand-over

	// closing are the CLOSEs that the server may still execute: see awaitClosed.
	closing map[*pendingClose]struct{}

	recorded map[int]recordedPath // by id of a path; used by onEvent alone

	// News from RTRS. run handles them one by one.
	wasUp  bool
	back   bool // used by run alone: the state after the events handled so far
	events []rtrs.EventKind
	signal chan struct{}
	done   chan struct{}
}

// pendingClose is a CLOSE that was sent.
type pendingClose struct {
	path    string
	epoch   uint64 // of the session; in another one the server does not have it
	settled chan struct{}
}

// recordedPath is a path as it was recorded last.
type recordedPath struct{ name, state string }

// sessionLane is the part of a session on one pump. The pump owns it.
type sessionLane struct {
	session *session
	pump    *pumpShare
	queue   *rtrs.Queue

	turn, full deviceList
	blocked    bool         // RTRS had no permit and will call unblock
	pooled     int          // permits in use beyond the first one of each device
	sent       atomic.Int32 // permits in use; other pumps read it
	listed     bool         // in pump.lanes
	next       *sessionLane // there
	stuck      bool         // in pump.stuck
	nextStuck  *sessionLane // there
}

// permitWindow bounds the permits of a session that a device may hold.
type permitWindow struct {
	total int  // for all requests of the session; the rest is for OPEN, CLOSE and fences
	lane  int  // those of one pump
	pool  int  // of these, the ones shared by devices beyond the first permit of each
	alone bool // the session has one device
}

// requestList is a queue of requests of one pump, by tag: the number of their source in
// pumpShare.sources and their slot there.
type requestList struct{ head, tail uint64 }

// deviceList is a queue of devices, linked by their shares of one pump.
type deviceList struct{ head, tail *Device }

// ringSource is one ring of a front end on one pump.
type ringSource struct {
	pump  *pumpShare
	host  *frontendProcess // requests may name only devices that it is shown; nil: of an IO
	index uint32           // in pump.sources
	comp  *shm.Completer

	reqs     []request
	free     []uint32 // slots
	inflight int
	// orphaned reports that the front end is gone. Answers are dropped.
	orphaned bool
	ended    chan struct{} // of an orphan: closed when its last request has ended
	large    bool
	answered bool         // there are answers to publish
	caller   *pump.Caller // of an IO

	sqes [64]shm.SQE
	cqe  shm.CQE
	msg  [rnbdwire.IOAgainSize]byte
}

// request is the state of the I/O in one slot of a source.
type request struct {
	sqe  shm.SQE
	dev  *Device // nil: free
	next uint64  // in the list of waiting requests
	held bool    // it holds a permit; otherwise it waits
	id   uint32  // id of the device, as sent
	// number is the number of a write. writerNotice is the server's answer about
	// other writers when the write was first sent; see again.go.
	number       uint64
	writerNotice *writerNotice
	// covers is the number of acknowledged writes that a flush makes durable.
	covers uint64
	// arrived is the time at which the request came from the front end, sent
	// that at which it was first sent; 0: not yet.
	arrived, sent int64
	// lost is the time at which the request was lost with its path, or refused as of an
	// unknown device, for the first time; 0: it was not.
	lost int64
}

// frontend is one front-end plugin: its sockets and its devices. sup keeps a
// process of it running.
type frontend struct {
	client *Client
	cfg    FrontendConfig
	log    *slog.Logger
	sup    *supervise.Supervisor
	// sockets belong to the daemon, so that users of a dead plugin wait in
	// the backlog and are not refused.
	sockets []listenSocket

	giving sync.Mutex // held while a process is given the sockets; before mu
	hold   bool       // no process gets the sockets yet; guarded by giving

	// mu is taken before attachment.mu. No call is made with it held.
	mu          sync.Mutex
	attachments map[uint32]*attachment // by index of the device
	current     *frontendProcess       // the process to use; nil: none
	over        bool                   // no process is started any more
	parting     atomic.Bool            // the process is to end, and the next one gets none of the devices
	undone      []savedLeftover        // disks that no process has removed

	life    context.Context // ends with stop
	endLife context.CancelFunc
	workers sync.WaitGroup // workers of attachments; Add only with mu held and over false, or by one of them
	orphans sync.WaitGroup // requests of earlier processes
}

// frontendProcess is one process of a front end. Attachments use it from the time when
// it has its rings until it has ended.
type frontendProcess struct {
	*supervise.Instance
	fe        *frontend
	sources   []*ringSource // by pump
	given     bool          // it has the sockets; guarded by frontend.giving
	adopted   bool          // it has connections of another process, not served yet; guarded by frontend.giving
	parted    chan struct{} // closed when left has returned
	tls       *plugin.TLS   // that it has; guarded by frontend.giving
	callSlots chan struct{} // a token for each call under way that is not late
}

// attachment is one device at one front end, from the first try to show it
// until no process and no driver has any part of it. It outlives processes, and
// it may outlive the device: after an unmap by force a slow process may still
// have the device, or the kernel may still have the disk of a dead process,
// with users that wait. Until it is gone it keeps its index.
//
// One goroutine, the worker (attachment_work.go), makes all its state changes
// and all calls to the process about it. Other goroutines only change its
// want and wake the worker. So a call that hangs delays this attachment and
// no other.
type attachment struct {
	fe    *frontend
	index uint32
	log   *slog.Logger
	node  bool          // users may have a disk: one that outlives the process
	wake  chan struct{} // holds a token when something has changed for the worker
	done  chan struct{} // closed when the attachment is gone

	// mu guards the rest. It is taken after frontend.mu and before Device.mu.
	// Calls that may wait are made without it.
	mu         sync.Mutex
	state      attState
	changed    chan struct{} // closed and replaced at every state change
	want       attachmentAim
	dev        *Device           // nil: the device has ended
	spec       plugin.DeviceSpec // as last told to the process
	process    *frontendProcess  // the process that has the device, may have it, or is asked to remove it
	ask        *removeCall
	cancelCall context.CancelFunc // cancels the call under way, if that can be cancelled
	told       blk.Limits         // limits that the process knows

	// Written by the worker; others read with mu held.
	first  *firstTry // under way or to be made; nil: it has ended
	tries  int       // failed tries to show it, at host
	unsure bool      // host may have it although the last try failed
	clears int       // failed tries to remove its disk
	since  time.Time // since when host is asked to remove it
	pause  time.Duration
	due    time.Time // time of the next try
	err    error     // of the last try
	undone bool      // it has ended and its disk is left

	file *mountedFile // mount of the device, the worker's; nil: none
}

// firstTry is the first try to show a device. A map waits for its end.
type firstTry struct {
	ctx   context.Context
	fresh bool          // a new disk, not one of the last daemon
	ended chan struct{} // closed after err is set
	err   error
}

// removeCall is a request to remove the device unless it is used.
type removeCall struct {
	ctx    context.Context
	answer chan error // buffered, for one error
}

// frontendChoice is a front end that may serve a device, with its settings.
type frontendChoice struct {
	fe       *frontend
	settings map[string]string
}

// reservation is the index and the name of one mapping. Client.mapMu guards it.
type reservation struct {
	d       *Device
	session string // its name
	work    mappingWork
	cancel  context.CancelCauseFunc // cancels the work
	ended   chan struct{}           // closed when the work has ended
}

// mappingWork is the work under way on a mapping.
type mappingWork uint8

const (
	mapping mappingWork = iota + 1
	unmapping
	unmappingByForce // waits only briefly
)

// requestWatchdog is the watchdog of a client.
type requestWatchdog struct {
	client   *Client
	reporter *watchdog.Reporter
	looks    []*pumpScan // by pump
}

// pumpScan is the look of one pump. The pump owns found until it sets done.
type pumpScan struct {
	pump    *pumpShare
	done    atomic.Bool
	found   []watchdog.Hung
	asked   time.Time
	isStuck bool // it was reported that the pump does not answer
}
