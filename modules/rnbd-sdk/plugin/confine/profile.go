package confine

import (
	"fmt"
	"strings"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/cgroup"
)

// Mode is whether plugins are confined.
type Mode string

// Off takes no measure, Try those that the host has, Strict fails if one is missing.
const (
	Off    Mode = "off"
	Try    Mode = "try"
	Strict Mode = "strict"
)

// ParseMode reads a mode.
func ParseMode(s string) (Mode, error) {
	switch m := Mode(s); m {
	case Off, Try, Strict:
		return m, nil
	}
	return "", fmt.Errorf("confinement %q: use %s, %s or %s", s, Strict, Try, Off)
}

// Argument is the hidden argument of a program that is its own launcher.
const Argument = "confine-exec"

// Access is the kind of access that a Rule allows.
type Access string

// Read allows reading, Write also changing files that exist and the controls of
// devices, Own everything but execution, Run reading and execution.
const (
	Read  Access = "read"
	Write Access = "write"
	Own   Access = "own"
	Run   Access = "run"
)

// Rule allows access to a file, or to everything below a folder.
type Rule struct {
	Path     string
	Access   Access
	Required bool // a path that does not exist is an error, else it is left out
}

// User is the user of a process.
type User struct {
	Name   string
	UID    uint32
	GID    uint32
	Groups []uint32
}

// Profile has the rights that a process keeps.
type Profile struct {
	Strict bool
	// Files are the rules for paths. If Disks is set they are not applied.
	Files []Rule
	// Disks is set for front ends that show block devices of this host. They keep
	// the sight of other processes, to find the users of a disk, and a device node
	// appears only when a disk is made. No landlock domain allows the first.
	Disks   bool
	Network bool // keeps the network of the host
	// Programs is set for plugins that start other programs, which inherit the limits of
	// the plugin, and connect to them by unix sockets.
	Programs bool
	URing    bool  // may use io_uring; the filter of system calls does not see its requests
	Caps     []int // capabilities to keep, if there
	User     *User // nil: that of the host

	Groups *cgroup.Tree `json:"-"` // the host's own, of which the plugin gets one; nil: that of the host
	Group  string       // the folder of it

	Path   string   // the plugin's own argument 0
	Args   []string // the others
	Script bool     // the executable is a script: execve stays allowed
}

// Measure is one limit and whether it holds.
type Measure struct {
	Name  string
	Holds bool
	Text  string // what holds, or why not
}

// Report lists the measures that hold for a process. nil: it is not confined.
type Report struct {
	Measures []Measure
	Err      string // why the plugin was not executed
}

// Missing returns the measures that do not hold.
func (r *Report) Missing() (out []string) {
	for _, m := range r.Measures {
		if !m.Holds {
			out = append(out, m.Name+" ("+m.Text+")")
		}
	}
	return out
}

// String returns a line for people: the measures that hold, and those that do not.
func (r *Report) String() string {
	if r == nil {
		return "off"
	}
	var held []string
	for _, m := range r.Measures {
		if m.Holds {
			held = append(held, m.Name)
		}
	}
	s := strings.Join(held, ", ")
	if missing := r.Missing(); len(missing) > 0 {
		s += "; without " + strings.Join(missing, ", ")
	}
	return s
}
