package browser

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"sync"
)

// message is a call, an answer or an event of the DevTools protocol.
type message struct {
	ID      int             `json:"id,omitempty"`
	Session string          `json:"sessionId,omitempty"`
	Method  string          `json:"method,omitempty"`
	Params  any             `json:"params,omitempty"`
	Result  json.RawMessage `json:"result,omitempty"`
	Error   *struct {
		Message string `json:"message"`
	} `json:"error,omitempty"`
}

// pipe carries messages. Each ends with a zero byte.
type pipe struct {
	to io.Writer

	mu      sync.Mutex
	last    int
	waiting map[int]chan message
	events  map[string]func(method string, params json.RawMessage) // by session
	err     error                                                  // the pipe has ended
}

func newPipe(to io.Writer) *pipe {
	return &pipe{to: to, waiting: map[int]chan message{}, events: map[string]func(string, json.RawMessage){}}
}

// run reads messages until the browser ends.
func (p *pipe) run(from io.Reader) {
	r := bufio.NewReader(from)
	for {
		text, err := r.ReadBytes(0)
		if err != nil {
			p.end(fmt.Errorf("the browser has ended: %w", err))
			return
		}
		var m struct {
			message
			Params json.RawMessage `json:"params"`
		}
		if err := json.Unmarshal(text[:len(text)-1], &m); err != nil {
			p.end(err)
			return
		}
		p.mu.Lock()
		answer, event := p.waiting[m.ID], p.events[m.Session]
		delete(p.waiting, m.ID)
		p.mu.Unlock()
		switch {
		case m.ID != 0 && answer != nil:
			answer <- m.message
		case m.ID == 0 && event != nil:
			event(m.Method, m.Params)
		}
	}
}

func (p *pipe) end(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = err
	for _, answer := range p.waiting {
		close(answer)
	}
	clear(p.waiting)
}

// send sends a call. The channel gets its answer, and is closed if the browser
// ends.
func (p *pipe) send(session, method string, params any) (<-chan message, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil {
		return nil, p.err
	}
	p.last++
	text, err := json.Marshal(message{ID: p.last, Session: session, Method: method, Params: params})
	if err != nil {
		return nil, err
	}
	answer := make(chan message, 1)
	p.waiting[p.last] = answer
	_, err = p.to.Write(append(text, 0))
	return answer, err
}

// call waits for the answer, and decodes it into result, which may be nil.
func (p *pipe) call(session, method string, params, result any) error {
	answer, err := p.send(session, method, params)
	if err != nil {
		return fmt.Errorf("%s: %w", method, err)
	}
	m, ok := <-answer
	switch {
	case !ok:
		p.mu.Lock()
		defer p.mu.Unlock()
		return fmt.Errorf("%s: %w", method, p.err)
	case m.Error != nil:
		return fmt.Errorf("%s: %s", method, m.Error.Message)
	case result == nil:
		return nil
	}
	return json.Unmarshal(m.Result, result)
}
