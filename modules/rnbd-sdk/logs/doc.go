// Package logs selects the lines that a daemon writes.
//
// A daemon has subsystems, each with a logger and a level of its own. The level
// can be changed at run time. A message that is logged again and again is
// written a few times a second; when the second is over, one line has the
// number of those left out.
//
//	lines := logs.Stderr(func(w io.Writer) slog.Handler { return slog.NewTextHandler(w, logs.Everything) })
//	l := logs.New(lines.Handler(), slog.LevelInfo)
//	rtrs := l.Logger("rtrs")
//	err := l.SetLevel("rtrs", slog.LevelDebug)
//
// Stderr returns a Writer, which waits for no reader of the log: one that stalls or goes
// away costs lines, and does not stop the process.
//
// All methods may be called from any goroutine. A line that is below its level
// costs one atomic load.
package logs
