//go:build pumpdebug

package pump

import "fmt"

// check panics unless ok. It is part of builds with the tag pumpdebug.
func (p *Pump) check(ok bool, rule string) {
	if !ok {
		panic(fmt.Sprintf("pump %s in mode %d: %s", p.cfg.Name, p.mode.Load(), rule))
	}
}

// checkOwner panics unless the calling thread owns the pump.
func (p *Pump) checkOwner() { p.check(p.onThread(), "work by a thread that is not the owner") }

// checkArmed panics unless the sources are armed, or not.
func (p *Pump) checkArmed(want bool) {
	p.check(p.checks.armed || !want, "sources are not armed")
	p.check(!p.checks.armed || want, "sources are armed")
}

// setArmed notes whether the sources are armed.
func (p *Pump) setArmed(armed bool) { p.checks.armed = armed }

// checks is state of the checks only.
type checks struct{ armed bool }
