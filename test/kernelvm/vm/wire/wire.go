// Package wire is the language of a host and the agent in its guest: gob
// streams of Request one way and Event the other, over a virtio serial port.
package wire

// Port is the name of the serial port.
const Port = "rnbd.agent"

// Config is for the agent as the guest's first process: /config, as JSON.
type Config struct {
	Modules []string // files of the initial ram disk to load, in order
	Tree    string   // the host's folder to use as /lib/modules
	Root    string   // block device with the root to boot (ext4), by its own init; empty: the host's files
}

// Op is the kind of a request.
type Op uint8

const (
	Start  Op = iota + 1 // run Argv; Output events, then one Done
	Signal               // send Number to the process group of the Start with the same ID
	Write                // write Data to Path in one system call; Done
	Read                 // Done with the contents of Path as Data
	Off                  // power off
)

// Request is from the host. Requests of one ID belong together.
type Request struct {
	ID     uint32
	Op     Op
	Argv   []string
	Env    []string // added to the agent's
	Dir    string
	Path   string
	Data   []byte
	Number int
}

// Event is from the agent.
type Event struct {
	ID    uint32 // 0: the agent is up
	Done  bool   // the last event of the ID
	Data  []byte // output of a process, or contents of a file
	Code  int    // exit code; 128 and the signal's number for a killed process
	Err   string // why the operation could not be done
	Errno int    // the same, 0 if it was no system call
}
