// Package lab runs the real daemons and plugins as processes, for tests and
// the demonstration.
//
//	l := lab.New(t)                       // a folder, binaries built once
//	s := l.Server(lab.ServerOptions{SearchPath: dir})
//	c := l.Client(lab.ClientOptions{})
//	d := c.Map("disk.img", s)
//	s.Kill(); s.Start()
//
// Everything listens on loopback or in the lab's folder and ends with the lab;
// only processes that the lab started are signalled.
package lab
