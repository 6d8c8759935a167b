//go:build !pumpdebug

package pump

// debug_on.go has the checks of builds with the tag pumpdebug.

func (p *Pump) checkOwner()     {}
func (p *Pump) checkArmed(bool) {}
func (p *Pump) setArmed(bool)   { _ = p.checks }

type checks struct{}
