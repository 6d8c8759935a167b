package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/ipoib/port"
	"github.com/rnbd-go/rnbd/modules/ipoib/registry"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/private"
)

// The control API of the daemon: HTTP and JSON on a unix socket that its owner
// alone can open.

// linkInfo describes an interface.
type linkInfo struct {
	Name      string `json:"name"`
	Parent    string `json:"parent,omitempty"`
	PKey      string `json:"pkey"`
	MAC       string `json:"mac,omitempty"` // of a TAP device
	Address   string `json:"address"`
	Broadcast string `json:"broadcast"`
	Mode      string `json:"mode"`
	MTU       int    `json:"mtu"`
	Umcast    bool   `json:"umcast"`
	RxPackets uint64 `json:"rx_packets"`
	TxPackets uint64 `json:"tx_packets"`
	RxDropped uint64 `json:"rx_dropped"`
	TxDropped uint64 `json:"tx_dropped"`
}

// linkRequest describes a link to be made.
type linkRequest struct {
	Name   string `json:"name"`
	Parent string `json:"parent"`
	PKey   int    `json:"pkey"`
	linkSettings
}

// linkSettings are the settings of an interface. A nil setting is not changed.
type linkSettings struct {
	Mode   *string `json:"mode,omitempty"`
	MTU    *int    `json:"mtu,omitempty"`
	Umcast *bool   `json:"umcast,omitempty"`
}

// groupInfo describes a multicast group.
type groupInfo struct {
	Link     string    `json:"link"`
	MGID     string    `json:"mgid"`
	Created  time.Time `json:"created"`
	Queued   int       `json:"queued"`
	Complete bool      `json:"complete"`
	SendOnly bool      `json:"send_only"`
}

// peerInfo describes a neighbour.
type peerInfo struct {
	Link    string `json:"link"`
	IP      string `json:"ip,omitempty"`  // tun
	MAC     string `json:"mac,omitempty"` // tap: made for the neighbour
	Address string `json:"address,omitempty"`
	State   string `json:"state,omitempty"` // tap: ip-neigh(8) has it
	Queued  int    `json:"queued"`
}

// requestFailure is the answer to a request that failed.
type requestFailure struct {
	Error string        `json:"error"`
	Errno syscall.Errno `json:"errno"`
}

func infoOf(l *port.Link) linkInfo {
	s, mac := l.Stats(), ""
	if m, ok := l.MAC(); ok {
		mac = m.String()
	}
	return linkInfo{Name: l.Name(), MAC: mac, Parent: l.Parent, PKey: fmt.Sprintf("0x%04x", l.PKey()), Address: l.Address().String(), Broadcast: l.Broadcast().String(),
		Mode: l.Mode().String(), MTU: l.MTU(), Umcast: l.Umcast(), RxPackets: s.RxPackets, TxPackets: s.TxPackets,
		RxDropped: s.RxDropped + s.RxUnknownType, TxDropped: s.TxDropped + s.TxErrors}
}

// apiServer serves the API.
type apiServer struct {
	set   *port.Set
	bonds *bondSet
	http  *http.Server

	mu       sync.Mutex
	captures map[string]bool // names of the interfaces with a capture
}

// startServer serves the API of a daemon at a path. reg is its registry; it may be nil.
func startServer(path string, set *port.Set, b *bondSet, reg *registry.Server) (*apiServer, error) {
	s := &apiServer{set: set, bonds: b, captures: map[string]bool{}}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /links", jsonHandler(s.listLinks))
	mux.HandleFunc("POST /links", jsonHandler(s.addLink))
	mux.HandleFunc("PATCH /links", jsonHandler(s.setLink))
	mux.HandleFunc("DELETE /links", jsonHandler(s.delLink))
	mux.HandleFunc("GET /groups", jsonHandler(s.listGroups))
	mux.HandleFunc("GET /peers", jsonHandler(s.listPeers))
	mux.HandleFunc("GET /pcap", s.serveCapture)
	mux.HandleFunc("GET /bonds", jsonHandler(s.listBonds))
	mux.HandleFunc("POST /bonds", jsonHandler(s.writeBond))
	mux.HandleFunc("GET /routes", s.serveRoutes)
	registryRoutes(mux, func() *registry.Server { return reg })
	var err error
	s.http, err = serveAPI(path, mux)
	return s, err
}

// serveAPI serves a control API at a path. It replaces the socket of a daemon that
// has ended.
func serveAPI(path string, mux *http.ServeMux) (*http.Server, error) {
	l, err := private.Listen(path, 0)
	if errors.Is(err, unix.EADDRINUSE) {
		return nil, fmt.Errorf("control socket %s: another daemon listens there; give this one another --socket: %w", path, unix.EADDRINUSE)
	}
	if err != nil {
		return nil, fmt.Errorf("control socket %s: %w", path, err)
	}
	s := &http.Server{Handler: mux}
	go s.Serve(&apiListener{l, path})
	return s, nil
}

// apiListener removes the name of its socket before it stops listening.
type apiListener struct {
	net.Listener
	path string
}

func (l *apiListener) Close() error {
	os.Remove(l.path)
	return l.Listener.Close()
}

// closeAPI ends a control API. The listener removes its socket.
func closeAPI(s *http.Server) error {
	if err := s.Close(); !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// jsonHandler returns a handler that answers with the result of f.
func jsonHandler(f func(r *http.Request) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		v, err := f(r)
		if err != nil {
			writeError(w, err)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		json.NewEncoder(w).Encode(v)
	}
}

func writeError(w http.ResponseWriter, err error) {
	f := requestFailure{Error: err.Error(), Errno: syscall.EIO}
	errors.As(err, &f.Errno)
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusBadRequest)
	json.NewEncoder(w).Encode(f)
}

// requestedLinks returns the interface named by a request, or all.
func (s *apiServer) requestedLinks(r *http.Request) ([]*port.Link, error) {
	name := r.URL.Query().Get("name")
	if name == "" {
		return s.set.Links(), nil
	}
	l, err := s.set.Link(name)
	return []*port.Link{l}, err
}

func (s *apiServer) listLinks(r *http.Request) (any, error) {
	links, err := s.requestedLinks(r)
	if err != nil {
		return nil, err
	}
	out := []linkInfo{}
	for _, l := range links {
		out = append(out, infoOf(l))
	}
	return out, nil
}

func (s *apiServer) addLink(r *http.Request) (any, error) {
	var q linkRequest
	if err := json.NewDecoder(http.MaxBytesReader(nil, r.Body, 4096)).Decode(&q); err != nil {
		return nil, fmt.Errorf("request: %w: %w", err, unix.EINVAL)
	}
	l, err := s.set.AddLink(q.Parent, q.Name, q.PKey)
	if err != nil {
		return nil, err
	}
	if err := s.bonds.applySettings(l, q.linkSettings); err != nil {
		return nil, errors.Join(err, s.set.DelLink(q.Name))
	}
	return infoOf(l), nil
}

func (s *apiServer) setLink(r *http.Request) (any, error) {
	var q linkSettings
	if err := json.NewDecoder(http.MaxBytesReader(nil, r.Body, 4096)).Decode(&q); err != nil {
		return nil, fmt.Errorf("request: %w: %w", err, unix.EINVAL)
	}
	l, err := s.set.Link(r.URL.Query().Get("name"))
	if err != nil {
		return nil, err
	}
	if err := s.bonds.applySettings(l, q); err != nil {
		return nil, err
	}
	return infoOf(l), nil
}

func (s *apiServer) delLink(r *http.Request) (any, error) {
	name := r.URL.Query().Get("name")
	if err := s.bonds.removeSlave(name); err != nil {
		return nil, err
	}
	return struct{}{}, s.set.DelLink(name)
}

func (s *apiServer) listGroups(r *http.Request) (any, error) {
	links, err := s.requestedLinks(r)
	if err != nil {
		return nil, err
	}
	out := []groupInfo{}
	for _, l := range links {
		for _, g := range l.Groups() {
			out = append(out, groupInfo{l.Name(), g.MGID.String(), g.Created, g.Queued, g.Complete, g.SendOnly})
		}
	}
	return out, nil
}

func (s *apiServer) listPeers(r *http.Request) (any, error) {
	links, err := s.requestedLinks(r)
	if err != nil {
		return nil, err
	}
	out := []peerInfo{}
	for _, l := range links {
		for _, n := range l.Neighbors() {
			p := peerInfo{Link: l.Name(), IP: n.IP.String(), State: n.State.String(), Queued: n.Queued}
			if n.Address.ValidUnicast() {
				p.Address = n.Address.String()
			}
			out = append(out, p)
		}
		for _, n := range l.EthernetPeers() {
			out = append(out, peerInfo{Link: l.Name(), MAC: n.MAC.String(), Address: n.Address.String()})
		}
	}
	return out, nil
}

// captureRecords buffers captured records for a reader. Records without room are
// dropped.
type captureRecords chan []byte

func (r captureRecords) Write(b []byte) (int, error) {
	select {
	case r <- append([]byte(nil), b...):
	default:
	}
	return len(b), nil
}

// withoutHeader drops the first write of a capture, the header of the file.
type withoutHeader struct {
	captureRecords
	began bool
}

func (w *withoutHeader) Write(b []byte) (int, error) {
	if !w.began {
		w.began = true
		return len(b), nil
	}
	return w.captureRecords.Write(b)
}

// captured returns the interfaces whose frames are those of name: the interface itself, or
// the slaves of the bond.
func (s *apiServer) captured(name string) (links []*port.Link, err error) {
	l, err := s.set.Link(name)
	if err == nil {
		return []*port.Link{l}, nil
	}
	x := s.bonds.net.Bond(name)
	if x == nil {
		return nil, err
	}
	for _, slave := range x.Status().Slaves {
		l, err := s.set.Link(slave.Name)
		if err != nil {
			return nil, err
		}
		links = append(links, l)
	}
	if len(links) == 0 {
		return nil, fmt.Errorf("capture frames of %s: the bond has no slave: %w", name, unix.ENODEV)
	}
	return links, nil
}

// beginCapture has links write their frames to out until end is called.
func (s *apiServer) beginCapture(links []*port.Link, out captureRecords) (end func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range links {
		if s.captures[l.Name()] {
			return nil, fmt.Errorf("capture frames of %s: a capture is under way: %w", l.Name(), unix.EBUSY)
		}
	}
	end = func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, l := range links {
			l.Capture(nil)
			delete(s.captures, l.Name())
		}
	}
	for i, l := range links {
		s.captures[l.Name()] = true
		var w io.Writer = out
		if i > 0 {
			w = &withoutHeader{captureRecords: out}
		}
		err = errors.Join(err, l.Capture(w))
	}
	return end, err
}

// serveCapture sends a capture until the client disconnects.
func (s *apiServer) serveCapture(w http.ResponseWriter, r *http.Request) {
	links, err := s.captured(r.URL.Query().Get("name"))
	if err != nil {
		writeError(w, err)
		return
	}
	records := make(captureRecords, 4096)
	end, err := s.beginCapture(links, records)
	if end != nil {
		defer end()
	}
	if err != nil {
		writeError(w, err)
		return
	}
	w.Header().Set("Content-Type", "application/vnd.tcpdump.pcap")
	for {
		select {
		case <-r.Context().Done():
			return
		case b := <-records:
			if _, err := w.Write(b); err != nil {
				return
			}
			if len(records) == 0 {
				w.(http.Flusher).Flush()
			}
		}
	}
}
