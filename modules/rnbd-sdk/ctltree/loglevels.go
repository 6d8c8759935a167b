package ctltree

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/logs"
)

// LogLevels is a directory with a file for each subsystem of l. The file
// contains the level. A level that is written goes to set.
func LogLevels(l *logs.Logs, set func(ctx context.Context, subsystem string, level slog.Level) error) Dir {
	names := func() (names []string) {
		for _, s := range l.Levels() {
			names = append(names, s.Subsystem)
		}
		return names
	}
	return Listing{
		Names: names,
		Node: func(name string) Node {
			if !slices.Contains(names(), name) {
				return nil
			}
			return &File{
				Show: func() (string, error) { return logs.LevelName(l.Level(name)) + "\n", nil },
				Store: func(ctx context.Context, data []byte) error {
					level, err := logs.ParseLevel(Word(data))
					if err != nil {
						return fmt.Errorf("%w: %w", err, syscall.EINVAL)
					}
					return set(ctx, name, level)
				},
			}
		},
	}
}
