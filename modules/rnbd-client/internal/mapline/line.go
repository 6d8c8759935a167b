package mapline

import (
	"fmt"
	"strconv"
	"strings"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// Line is a parsed map_device line.
type Line struct {
	Session    string   // name of the session
	Path       string   // of the device on the server
	Paths      []string // to the server, in the text form of Path
	Mode       blk.AccessMode
	Port       uint16 // for paths added to the session later
	PollQueues int
	IOMode     string // "fileio" or "blockio"; empty: the server chooses
	InputMode  string // key of the older line: "mq" or "rq"; empty: absent
}

const (
	maxName  = 255 // longer names are refused; of 255 characters the last is cut off
	maxPaths = 6
)

// Parse reads a map_device line: words KEY=VALUE, separated by blanks, in any
// order, except that dest_port applies only to the paths after it
// (docs/use/control-tree.md, "map_device"). The older line's keys input_mode and
// io_mode are accepted. cpus is the largest nr_poll_queues. It is also the
// meaning of -1. The errors are the kernel's: EINVAL; EPROTONOSUPPORT for a
// destination that is neither ip: nor gid:; ENOMEM for the seventh path.
func Parse(line string, cpus int) (Line, error) {
	l := Line{Mode: blk.ReadWrite, Port: DefaultPort}
	if strings.ContainsRune(line, 0) {
		return Line{}, fmt.Errorf("map line: it has a NUL byte: %w", syscall.EINVAL)
	}
	for word := range strings.SplitSeq(strings.Trim(line, " \t\n\v\f\r"), " ") {
		if word == "" {
			continue
		}
		key, value, _ := strings.Cut(word, "=")
		if err := l.setKey(key, value, cpus); err != nil {
			return Line{}, fmt.Errorf("map line: %q: %w", word, err)
		}
	}
	switch {
	case l.Session == "":
		return Line{}, fmt.Errorf("map line: sessname= is missing: %w", syscall.EINVAL)
	case l.Path == "":
		return Line{}, fmt.Errorf("map line: device_path= is missing: %w", syscall.EINVAL)
	}
	return l, nil
}

func (l *Line) setKey(key, value string, cpus int) (err error) {
	if value == "" {
		return fmt.Errorf("write KEY=VALUE: %w", syscall.EINVAL)
	}
	switch key {
	case "sessname":
		if strings.ContainsAny(value, "/.") {
			return fmt.Errorf("a session's name has no '/' and no '.': %w", syscall.EINVAL)
		}
		l.Session, err = parseName(value)
	case "device_path":
		l.Path, err = parseName(value)
	case "path":
		return l.addPath(value)
	case "dest_port":
		l.Port, err = portOf(value)
	case "access_mode":
		var ok bool
		if l.Mode, ok = blk.ParseAccessMode(value); !ok {
			return fmt.Errorf("use ro, rw or migration: %w", syscall.EINVAL)
		}
	case "nr_poll_queues":
		l.PollQueues, err = pollQueues(value, cpus)
	case "input_mode":
		l.InputMode, err = oneOf(value, "mq", "rq")
	case "io_mode":
		l.IOMode, err = oneOf(value, "fileio", "blockio")
	default:
		return fmt.Errorf("there is no key %q: %w", key, syscall.EINVAL)
	}
	return err
}

func parseName(v string) (string, error) {
	if len(v) > maxName {
		return "", fmt.Errorf("%d characters are more than %d: %w", len(v), maxName, syscall.EINVAL)
	}
	return v[:min(len(v), maxName-1)], nil
}

func portOf(v string) (uint16, error) {
	n, err := strconv.ParseUint(v, 10, 16)
	if err != nil {
		return 0, fmt.Errorf("a port is a number from 0 to 65535: %w", syscall.EINVAL)
	}
	return uint16(n), nil
}

func pollQueues(v string, cpus int) (int, error) {
	n, err := strconv.Atoi(v)
	if err != nil || n < -1 || n > cpus {
		return 0, fmt.Errorf("use -1 for all CPUs, or a number from 0 to %d: %w", cpus, syscall.EINVAL)
	} else if n == -1 {
		n = cpus
	}
	return n, nil
}

func oneOf(v string, words ...string) (string, error) {
	for _, w := range words {
		if v == w {
			return v, nil
		}
	}
	return "", fmt.Errorf("use %s: %w", strings.Join(words, " or "), syscall.EINVAL)
}

func (l *Line) addPath(v string) error {
	if len(l.Paths) == maxPaths {
		return fmt.Errorf("more than %d paths: %w", maxPaths, syscall.ENOMEM)
	}
	p, err := ParseKernelPath(v, l.Port)
	if err != nil {
		return err
	}
	l.Paths = append(l.Paths, p.String())
	return nil
}
