package client

import (
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// MapLine is what a line written to map_device asks for.
type MapLine struct {
	MapRequest

	InputMode string // of the older line: "mq" or "rq", empty if it had none
}

const (
	maxLineName  = 255 // longer names are refused; the last of 255 is cut off
	maxLinePaths = 6
)

// ParseMapLine reads a map_device line: words KEY=VALUE with blanks between
// them, in any order, but dest_port counts only for the paths after it
// (docs/control-tree.md, "map_device"). The errors are the kernel's: EINVAL;
// EPROTONOSUPPORT for a destination that is neither ip: nor gid:; ENOMEM for
// the seventh path. The keys input_mode and io_mode of the older line are
// understood too.
func ParseMapLine(line string) (MapLine, error) {
	m := MapLine{MapRequest: MapRequest{Mode: blk.ReadWrite, Port: DefaultPort}}
	if strings.ContainsRune(line, 0) {
		return MapLine{}, fmt.Errorf("map line: it has a NUL byte: %w", syscall.EINVAL)
	}
	for word := range strings.SplitSeq(strings.Trim(line, " \t\n\v\f\r"), " ") {
		if word == "" {
			continue
		}
		key, value, _ := strings.Cut(word, "=")
		if err := m.set(key, value); err != nil {
			return MapLine{}, fmt.Errorf("map line: %q: %w", word, err)
		}
	}
	switch {
	case m.Session == "":
		return MapLine{}, fmt.Errorf("map line: sessname= is missing: %w", syscall.EINVAL)
	case m.Path == "":
		return MapLine{}, fmt.Errorf("map line: device_path= is missing: %w", syscall.EINVAL)
	}
	return m, nil
}

func (m *MapLine) set(key, value string) (err error) {
	if value == "" {
		return fmt.Errorf("write KEY=VALUE: %w", syscall.EINVAL)
	}
	switch key {
	case "sessname":
		if strings.ContainsAny(value, "/.") {
			return fmt.Errorf("a session's name has no '/' and no '.': %w", syscall.EINVAL)
		}
		m.Session, err = lineName(value)
	case "device_path":
		m.Path, err = lineName(value)
	case "path":
		return m.addPath(value)
	case "dest_port":
		m.Port, err = linePort(value)
	case "access_mode":
		var ok bool
		if m.Mode, ok = blk.ParseAccessMode(value); !ok {
			return fmt.Errorf("use ro, rw or migration: %w", syscall.EINVAL)
		}
	case "nr_poll_queues":
		m.PollQueues, err = linePollQueues(value)
	case "input_mode":
		m.InputMode, err = oneOf(value, "mq", "rq")
	case "io_mode":
		m.IOMode, err = oneOf(value, "fileio", "blockio")
	default:
		return fmt.Errorf("there is no key %q: %w", key, syscall.EINVAL)
	}
	return err
}

func lineName(v string) (string, error) {
	if len(v) > maxLineName {
		return "", fmt.Errorf("%d characters are more than %d: %w", len(v), maxLineName, syscall.EINVAL)
	}
	return v[:min(len(v), maxLineName-1)], nil
}

func linePort(v string) (uint16, error) {
	n, err := strconv.ParseUint(v, 10, 16)
	if err != nil {
		return 0, fmt.Errorf("a port is a number from 0 to 65535: %w", syscall.EINVAL)
	}
	return uint16(n), nil
}

func linePollQueues(v string) (int, error) {
	n, err := strconv.Atoi(v)
	if cpus := possibleCPUs(); err != nil || n < -1 || n > cpus {
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

func (m *MapLine) addPath(v string) error {
	if len(m.Paths) == maxLinePaths {
		return fmt.Errorf("more than %d paths: %w", maxLinePaths, syscall.ENOMEM)
	}
	p, err := parseKernelPath(v, m.Port)
	if err != nil {
		return err
	}
	m.Paths = append(m.Paths, p.String())
	return nil
}

// parseKernelPath reads a path as control files write it: [SRC@]DST[%FABRIC],
// or "," for "@". An address is ip: and an IPv4 or IPv6 address, or gid: and a
// GID. The port is not part of it.
func parseKernelPath(s string, port uint16) (p pathSpec, err error) {
	addrs, fabric, hasFabric := strings.Cut(s, "%")
	if p.fabric = fabric; hasFabric && fabric == "" {
		return p, fmt.Errorf("no fabric after %%: %w", syscall.EINVAL)
	}
	if strings.ContainsAny(fabric, "%@,") {
		return p, fmt.Errorf("%q is no name of a fabric: %w", fabric, syscall.EINVAL)
	}
	dst := addrs
	if i := strings.IndexAny(addrs, "@,"); i >= 0 {
		dst = addrs[i+1:]
		if p.src, err = parseKernelAddr(addrs[:i]); err != nil {
			return p, fmt.Errorf("source %q is not ip:ADDRESS or gid:GID: %w", addrs[:i], syscall.EINVAL)
		}
	}
	a, err := parseKernelAddr(dst)
	if err != nil {
		return p, fmt.Errorf("destination %q: %w", dst, err)
	}
	if p.src.IsValid() && !verbs.SameFamily(p.src, a) {
		return p, fmt.Errorf("source and destination are of different families: %w", syscall.EINVAL)
	}
	p.dst = netip.AddrPortFrom(a, port)
	return p, nil
}

func parseKernelAddr(s string) (a netip.Addr, err error) {
	text, isIP := strings.CutPrefix(s, "ip:")
	if !isIP {
		var isGID bool
		if text, isGID = strings.CutPrefix(s, "gid:"); !isGID {
			return a, fmt.Errorf("it has to begin with ip: or gid:: %w", syscall.EPROTONOSUPPORT)
		}
	}
	a, err = netip.ParseAddr(text)
	if err != nil || a.Zone() != "" || !isIP && !a.Is6() {
		return a, fmt.Errorf("not an address: %w", syscall.EINVAL)
	}
	if !isIP {
		return verbs.GID(a), nil
	}
	return a.Unmap(), nil
}

// possibleCPUs is the number of CPUs that the system may ever have, which is
// what counts one value per CPU in control files.
var possibleCPUs = sync.OnceValue(func() int {
	text, err := os.ReadFile("/sys/devices/system/cpu/possible") // "0-3", or "0"
	if err != nil {
		return runtime.NumCPU()
	}
	list := strings.TrimSpace(string(text))
	last, err := strconv.Atoi(list[strings.LastIndexAny(list, "-,")+1:])
	if err != nil {
		return runtime.NumCPU()
	}
	return last + 1
})
