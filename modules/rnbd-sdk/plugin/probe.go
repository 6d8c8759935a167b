package plugin

import "google.golang.org/grpc"

// Probe gives a program that checks plugins what hosts keep to themselves: calls and
// messages that no host makes. Process.Probe returns it.
type Probe struct{ p *Process }

// Probe returns the process's probe.
func (p *Process) Probe() Probe { return Probe{p} }

// Conn returns the connection that carries the calls of package pluginpb.
func (b Probe) Conn() grpc.ClientConnInterface { return b.p.link }

// SendDescriptors passes copies of fds to the plugin, and returns the token that a call
// names them by. fds stay the caller's.
func (b Probe) SendDescriptors(fds ...int) (token uint64, err error) { return b.p.fds.send(fds...) }

// HangUp closes the host's end of the control socket, as the death of a host does. The
// process is not killed: it has to end by itself.
func (b Probe) HangUp() {
	b.p.stopping.Store(true)
	b.p.fds.close()
}
