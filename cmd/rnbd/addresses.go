package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Addresses of servers on the command line. The name of a host may have several
// addresses, and a server may listen at one of them only. A command tries them in
// the order of the name service, as ssh and curl do.

// pathChoice has the paths of one word of the command line: one for an address, one
// per address for the name of a host. A command uses one of them.
type pathChoice []string

// cutPathFabric cuts a path at the "%" before the name of its fabric. A "%" within
// brackets belongs to an IPv6 zone.
func cutPathFabric(path string) (addresses, fabric string, found bool) {
	end := strings.LastIndex(path, "]") + 1
	rest, fabric, found := strings.Cut(path[end:], "%")
	return path[:end] + rest, fabric, found
}

// isAddress reports whether s is an address, for the daemon to parse, and not
// the name of a host or a session.
func isAddress(s string) bool {
	s, _, _ = cutPathFabric(s)
	if i := strings.IndexAny(s, "@,"); i >= 0 {
		s = s[i+1:]
	}
	if strings.HasPrefix(s, "ip:") || strings.HasPrefix(s, "gid:") {
		return true
	}
	if inner, ok := strings.CutPrefix(s, "["); ok {
		s, _, _ = strings.Cut(inner, "]")
	} else if strings.Count(s, ":") == 1 {
		s, _, _ = strings.Cut(s, ":")
	}
	_, err := netip.ParseAddr(s)
	return err == nil
}

// resolvePaths returns the choice of paths for each of words.
func resolvePaths(ctx context.Context, words []string) ([]pathChoice, error) {
	var all []pathChoice
	for _, w := range words {
		choice, err := resolvePath(ctx, w)
		if err != nil {
			return nil, err
		}
		all = append(all, choice)
	}
	return all, nil
}

// lookupLimit bounds the time of the name service.
const lookupLimit = 5 * time.Second

// resolvePath returns the paths of [SRC@]ADDRESS[:PORT][%FABRIC], where ADDRESS
// may be the name of a host. With a source, it returns those of its family.
func resolvePath(ctx context.Context, word string) (pathChoice, error) {
	if isAddress(word) {
		return pathChoice{word}, nil
	}
	rest, fabric, hasFabric := cutPathFabric(word)
	source, host, hasSource := strings.Cut(rest, "@")
	if !hasSource {
		source, host = "", rest
	}
	host, port, hasPort := strings.Cut(host, ":")
	ctx, cancel := context.WithTimeout(ctx, lookupLimit)
	defer cancel()
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil || len(addrs) == 0 {
		return nil, usageError{fmt.Errorf("%q is no IP address, no session and no host that is known", word)}
	}
	var choice pathChoice
	for _, a := range addrs {
		if a = a.Unmap(); hasSource && a.Is6() != strings.Contains(source, ":") {
			continue
		}
		path := a.String()
		if a.Zone() != "" {
			path = "[" + path + "]"
		}
		if hasPort {
			path = net.JoinHostPort(a.String(), port)
		}
		if hasSource {
			path = source + "@" + path
		}
		if hasFabric {
			path += "%" + fabric
		}
		if !slices.Contains(choice, path) {
			choice = append(choice, path)
		}
	}
	if len(choice) == 0 {
		return nil, usageError{fmt.Errorf("%q: %s has no address of the source's family", word, host)}
	}
	return choice, nil
}

// maxCombinations bounds the calls of tryPaths.
const maxCombinations = 16

// tryPaths calls try with a path for each of choices, until the error is nil or
// isUnanswered does not report it. Each call but the last gets
// an equal part of the time that ctx leaves.
func tryPaths(ctx context.Context, choices []pathChoice, try func(ctx context.Context, paths []string) error) error {
	all := combinations(choices)
	var errs []error
	for i, paths := range all {
		attempt, cancel := partOf(ctx, len(all)-i)
		err := try(attempt, paths)
		cancel()
		if err == nil || !isUnanswered(err) {
			return err
		}
		if errs = append(errs, err); ctx.Err() != nil {
			break
		}
	}
	if len(errs) == 1 {
		return errs[0]
	}
	return unansweredError(errs)
}

// combinations returns the lists with a path of each choice, the choices of the
// resolver's first preference first.
func combinations(choices []pathChoice) [][]string {
	all := [][]string{nil}
	for _, choice := range choices {
		var longer [][]string
		for _, path := range choice {
			for _, begin := range all {
				longer = append(longer, append(slices.Clone(begin), path))
			}
		}
		all = longer[:min(len(longer), maxCombinations)]
	}
	return all
}

// partOf returns ctx with one of n equal parts of its time.
func partOf(ctx context.Context, n int) (context.Context, context.CancelFunc) {
	end, ok := ctx.Deadline()
	if !ok || n == 1 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, time.Until(end)/time.Duration(n))
}

// isUnanswered reports whether err says that no server answered at an address.
func isUnanswered(err error) bool {
	for _, errno := range []syscall.Errno{
		syscall.ECONNREFUSED, syscall.ECONNRESET, syscall.ECONNABORTED, syscall.EHOSTUNREACH, syscall.EHOSTDOWN, syscall.ENETUNREACH,
		syscall.ENETDOWN, syscall.ETIMEDOUT, syscall.EADDRNOTAVAIL, syscall.EAFNOSUPPORT,
	} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return errors.Is(err, context.DeadlineExceeded)
}

// unansweredError has the errors of all addresses of a name.
type unansweredError []error

func (e unansweredError) Error() string {
	var texts []string
	for _, err := range e {
		texts = append(texts, err.Error())
	}
	return fmt.Sprintf("none of %d addresses works: %s", len(e), strings.Join(texts, "; "))
}

func (e unansweredError) Unwrap() []error { return e }
