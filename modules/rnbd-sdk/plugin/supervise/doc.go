// Package supervise keeps one plugin process running: it starts the process,
// joins it with its rings, watches it, and starts the next one when it dies.
//
//	s := supervise.New(supervise.Config{
//		Plugin: plugin.Config{Path: path, Kind: plugin.KindIO, Pumps: 2},
//		Crash:  supervise.Limit{Count: 3, Window: time.Minute},
//		Joined: func(ctx context.Context, in *supervise.Instance) error { ... },
//		Left:   func(in *supervise.Instance, cause error) { ... },
//	})
//	err := s.Start(ctx)
//	...
//	in, err := s.Current()
//	...
//	err = s.Stop(ctx)
//
// A crash is the end of a process that had been joined; a limit of crashes
// within a time makes the supervisor give the plugin up, until Reset. A start
// that fails is no crash: it is tried again for ever, with growing pauses.
//
// Everything here waits on channels and timers, so that a plugin in process
// (Config.Launch) can be supervised under the virtual time of testing/synctest.
package supervise
