package server

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

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
	lanes []lane

	// table[id] is the mapping with that device id; nil: unknown. It is
	// copied on write. Pumps read it.
	table atomic.Pointer[[]*mapping]

	mu    sync.Mutex // guards the changes of table and attached, and news
	inbox inbox

	// rulesMu makes it one step to judge a joining path and to admit it.
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
}

// end marks the session as ended. From then on no mapping is added, and no
// plugin is shown the arena. The arena is freed after the last request.
func (s *session) end() {
	s.arenaMu.Lock()
	defer s.arenaMu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended.Store(true)
	s.stir()
}

// identity returns the identity that the client has proved, empty for none. All paths of a
// session have the same.
func (s *session) identity() string {
	for _, p := range s.transport.Paths() {
		if p.Security.Peer != "" && p.State <= rtrs.SrvPathConnected {
			return p.Security.Peer
		}
	}
	return ""
}

// gone returns an error if the session has ended, else nil.
func (s *session) gone() error {
	if s.ended.Load() {
		return fmt.Errorf("session %q has ended: %w", s.name, syscall.ENOTCONN)
	}
	return nil
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
	budget atomic.Pointer[budget] // of its rule; nil: nothing holds up its requests
	share  *budget                // where it is counted; guarded by Server.sharesMu
	flows  []flow                 // by pump
	news   news                   // guarded by session.mu

	usage       *usage       // of the node; nil: opened read-only
	writer      uint64       // number of the client
	named       bool         // the client has sent its number
	wroteBefore atomic.Int64 // time until which writes stored no time in flows; 0: they all did
	refusals    atomic.Int64 // repetitions refused
	sharing     uint64       // number of the news that others may write; guarded by session.mu
}

// newMapping makes a mapping of dev. No pump sees it yet.
func (s *session) newMapping(dev *device, name string, mode blk.AccessMode) *mapping {
	m := &mapping{name: name, mode: mode, dev: dev, session: s, flows: make([]flow, len(dev.loads))}
	m.writer = s.writer.Load()
	if m.named = m.writer != 0; !m.named {
		m.writer = rand.Uint64()
	}
	for i, q := range dev.plugin.queues {
		f := &m.flows[i]
		f.lane, f.load, f.head, f.tail = &s.lanes[q.index], &dev.loads[i], -1, -1
	}
	return m
}

// inflight returns the number of requests in flight on all pumps.
func (m *mapping) inflight() (n int64) {
	for i := range m.flows {
		n += m.flows[i].inflight.Load()
	}
	return n
}

// lookup returns the mapping with id, or nil. Any pump may call it.
func (s *session) lookup(id uint32) *mapping {
	t := s.table.Load()
	if t == nil || uint64(id) >= uint64(len(*t)) {
		return nil
	}
	m := (*t)[id]
	if m == nil || m.closed.Load() {
		return nil
	}
	return m
}

// all returns all mappings with an id, closed or not.
func (s *session) all() (out []*mapping) {
	if t := s.table.Load(); t != nil {
		for _, m := range *t {
			if m != nil {
				out = append(out, m)
			}
		}
	}
	return out
}

// mappings returns the open mappings. The caller holds mu or accepts a
// snapshot.
func (s *session) mappings() (out []*mapping) {
	if t := s.table.Load(); t != nil {
		for _, m := range *t {
			if m != nil && !m.closed.Load() {
				out = append(out, m)
			}
		}
	}
	return out
}

// byName returns the open mapping of exactly that name. The caller holds mu or
// accepts a snapshot.
func (s *session) byName(name string) *mapping {
	for _, m := range s.mappings() {
		if m.name == name {
			return m
		}
	}
	return nil
}

// add shows m to the pumps. It fails if the session has ended, since m would
// never be closed. It fails with EBUSY if the name was opened at the same
// time and led elsewhere. It calls room with the number of mappings and
// returns its error.
func (s *session) add(m *mapping, room func(n int) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.gone(); err != nil {
		return err
	}
	if s.byName(m.name) != nil {
		return fmt.Errorf("the name has just been opened, and led to another node: %w", syscall.EBUSY)
	}
	if err := room(len(s.mappings())); err != nil {
		return err
	}
	s.reserve(m)
	return nil
}

// freshIDs is the number of ids that a listening client gets before one is used
// again. Otherwise news about a closed device could be taken for news about
// another one.
const freshIDs = 4096

// reserve gives m the lowest free id and shows it to the pumps. A mapping
// that was closed by force keeps its id, so that the id is not used again in
// this session. The caller holds mu.
func (s *session) reserve(m *mapping) {
	var old []*mapping
	if t := s.table.Load(); t != nil {
		old = *t
	}
	id := len(old)
	for i, o := range old {
		if o == nil && (!s.inbox.listens || len(old) >= freshIDs) {
			id = i
			break
		}
	}
	next := make([]*mapping, max(len(old), id+1))
	copy(next, old)
	m.id = uint32(id)
	next[id] = m
	s.table.Store(&next)
}

// release frees m's id. The caller holds mu.
func (s *session) release(m *mapping) {
	old := *s.table.Load()
	next := make([]*mapping, len(old))
	copy(next, old)
	next[m.id] = nil
	s.table.Store(&next)
}
