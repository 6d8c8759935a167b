// Package logs decides which lines of a daemon are written.
//
// A daemon has subsystems, each with a logger and a level of its own, which can
// be changed while it runs. A message that is logged again and again is
// written a few times a second; how often it was left out is said in one line
// when the second is over.
//
//	l := logs.New(slog.NewTextHandler(os.Stderr, logs.Everything), slog.LevelInfo)
//	rtrs := l.Logger("rtrs")
//	err := l.SetLevel("rtrs", slog.LevelDebug)
//
// All methods may be called from any goroutine. A line that is below its level
// costs one atomic load.
package logs
