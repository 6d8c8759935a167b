package client

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"syscall"
	"unicode/utf8"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/private"
)

// The format of the state file: what one daemon leaves for the next.

const stateVersion = 1

// savedState is the contents of the state file.
type savedState struct {
	Version int           `json:"version"`
	Devices []savedDevice `json:"devices"`
	// Leftovers are disks to be removed.
	Leftovers []savedLeftover `json:"leftovers,omitempty"`
}

// savedDevice is a mapping with a device node for its users.
type savedDevice struct {
	Name       string            `json:"name"`
	Path       savedName         `json:"path"`
	Session    savedName         `json:"session"`
	Paths      []string          `json:"paths"`
	Port       uint16            `json:"port,omitempty"`
	PollQueues int               `json:"poll_queues,omitempty"`
	Access     string            `json:"access"`
	IOMode     string            `json:"io_mode,omitempty"`
	Loss       string            `json:"loss"`
	Frontend   string            `json:"frontend"`
	Settings   map[string]string `json:"settings,omitempty"`
	Slots      int               `json:"slots"`
	Identity   string            `json:"identity"`
	Location   string            `json:"location"`
	Known      *deviceFacts      `json:"known,omitempty"`
	// Clean reports that no acknowledged write needed a flush when the record was made. It is
	// not in the state file, for writes may follow. Unreported is that of Device.
	Clean      bool `json:"clean,omitempty"`
	Unreported bool `json:"unreported,omitempty"`
	// Remapped reports that a remap by force took the device from its users: the front end
	// makes a new disk for it.
	Remapped      bool `json:"remapped,omitempty"`
	sessionTuning      // of the session

	failure string // of the last try to map it
}

// savedLeftover is the record of such a disk in the state file.
type savedLeftover struct {
	Name     string            `json:"name"`
	Frontend string            `json:"frontend"`
	Settings map[string]string `json:"settings,omitempty"`
	Slots    int               `json:"slots"`
	SlotSize int               `json:"slot_size"`
	Limits   blk.Limits        `json:"limits"`
	Identity string            `json:"identity"`
	Location string            `json:"location"` // "?": not known
}

// savedName is a name of any bytes. In JSON one that is UTF-8 is a string, and another
// one an object with its bytes in base64.
type savedName string

type savedBytes struct {
	Bytes []byte `json:"bytes"`
}

// MarshalJSON implements json.Marshaler.
func (n savedName) MarshalJSON() ([]byte, error) {
	if utf8.ValidString(string(n)) {
		return json.Marshal(string(n))
	}
	return json.Marshal(savedBytes{[]byte(n)})
}

// UnmarshalJSON implements json.Unmarshaler.
func (n *savedName) UnmarshalJSON(text []byte) error {
	if len(text) > 0 && text[0] == '{' {
		var b savedBytes
		err := json.Unmarshal(text, &b)
		*n = savedName(b.Bytes)
		return err
	}
	return json.Unmarshal(text, (*string)(n))
}

func loadState(name string) (state savedState, err error) {
	b, err := private.Read(name)
	if errors.Is(err, fs.ErrNotExist) {
		return state, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &state)
	}
	switch {
	case err == nil && state.Version > stateVersion:
		err = fmt.Errorf("state file %s has version %d, this program knows %d: %w", name, state.Version, stateVersion, errNewerState)
	case err == nil && state.Version != stateVersion:
		err = fmt.Errorf("it has version %d, this daemon knows %d", state.Version, stateVersion)
	}
	return state, err
}

// errNewerState is the error of a state file of a newer rnbd. The disks of the
// last daemon are left as they are, since this daemon may not understand the
// file.
var errNewerState = fmt.Errorf("it is of a newer rnbd, whose disks may be in use: run that one, or unmap them with it first: %w", syscall.EINVAL)

// checkState refuses the state of a newer rnbd, before anything is started that
// could change a disk.
func checkState(name string) error {
	if name == "" {
		return nil
	}
	if _, err := loadState(name); errors.Is(err, errNewerState) {
		return err
	}
	return nil
}

// writeState replaces the file as a whole. If there is nothing to record it
// removes the file.
func writeState(name string, state *savedState) error {
	if len(state.Devices)+len(state.Leftovers) == 0 {
		return private.Remove(name)
	}
	b, err := json.MarshalIndent(state, "", "\t")
	if err != nil {
		return err
	}
	return private.Replace(name, append(b, '\n'))
}
