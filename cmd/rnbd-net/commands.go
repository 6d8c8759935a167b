package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/ipoib/dev"
	"github.com/rnbd-go/rnbd/modules/ipoib/mcast"
	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/private"
)

var errNoDaemon = errors.New(`no daemon: start one with "rnbd-net run"`)

// callDaemon sends a request to the daemon and returns the body of its answer.
func callDaemon(cmd *cobra.Command, method, path string, query url.Values, body any) (io.ReadCloser, error) {
	socket, _ := cmd.Flags().GetString("socket")
	return askAt(cmd, socket, method, path, query, body)
}

// askAt is ask for the daemon at a socket.
func askAt(cmd *cobra.Command, socket, method, path string, query url.Values, body any) (io.ReadCloser, error) {
	client := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return private.Dial(ctx, socket)
	}}}
	sent, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	u := url.URL{Scheme: "http", Host: "rnbd-net", Path: path, RawQuery: query.Encode()}
	r, err := http.NewRequestWithContext(cmd.Context(), method, u.String(), bytes.NewReader(sent))
	if err != nil {
		return nil, err
	}
	answer, err := client.Do(r)
	switch {
	case errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ECONNREFUSED):
		return nil, fmt.Errorf("%s: %w", socket, errNoDaemon)
	case err != nil:
		return nil, errors.Unwrap(err) // without the URL, since users do not know it
	case answer.StatusCode != http.StatusOK:
		defer answer.Body.Close()
		var f requestFailure
		if err := json.NewDecoder(answer.Body).Decode(&f); err != nil {
			return nil, fmt.Errorf("the daemon answered %s", answer.Status)
		}
		return nil, &remoteError{f}
	}
	return answer.Body, nil
}

// remoteError is a failure reported by the daemon.
type remoteError struct{ f requestFailure }

func (e *remoteError) Error() string { return e.f.Error }
func (e *remoteError) Unwrap() error { return e.f.Errno }

// fetchList fetches a list about the interface in the arguments, or about all.
func fetchList[T any](cmd *cobra.Command, path string, arguments []string) (out []T, err error) {
	query := url.Values{}
	if len(arguments) > 0 {
		query.Set("name", arguments[0])
	}
	body, err := callDaemon(cmd, http.MethodGet, path, query, nil)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	return out, json.NewDecoder(body).Decode(&out)
}

// printResult prints v as JSON or as a table.
func printResult(cmd *cobra.Command, v any, table func(w io.Writer) error) error {
	if o, _ := cmd.Flags().GetString("output"); o == "json" {
		e := json.NewEncoder(cmd.OutOrStdout())
		e.SetIndent("", "  ")
		return e.Encode(v)
	}
	return table(cmd.OutOrStdout())
}

// printColumns prints rows in columns. The first row is the heading.
func printColumns(w io.Writer, heading string, rows []string) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, heading)
	for _, r := range rows {
		fmt.Fprintln(t, r)
	}
	return t.Flush()
}

func newLinkShow() *cobra.Command {
	return &cobra.Command{Use: "show [NAME]", Aliases: []string{"list"}, Short: "show interfaces", Args: argCount(0, 1),
		RunE: func(cmd *cobra.Command, a []string) error {
			list, err := fetchList[linkInfo](cmd, "/links", a)
			if err != nil {
				return err
			}
			return printResult(cmd, list, func(w io.Writer) error {
				var rows []string
				for _, l := range list {
					rows = append(rows, fmt.Sprintf("%s\t%s\t%s\t%s\t%d\t%d\t%d\t%s", l.Name, l.Parent, l.PKey, l.Mode, l.MTU, l.RxPackets, l.TxPackets, l.Address))
				}
				return printColumns(w, "Link\tParent\tP_Key\tMode\tMTU\tRX\tTX\tAddress", rows)
			})
		}}
}

func newLinkAdd() *cobra.Command {
	return &cobra.Command{Use: "add NAME link PARENT [pkey P_KEY] [mode MODE] [mtu MTU] [umcast 0|1]", Short: "make a child interface", Args: argCount(3, 11),
		Example: "  rnbd-net link add storage link ib0 pkey 0x8001 mode connected",
		RunE: func(cmd *cobra.Command, a []string) error {
			q := linkRequest{Name: a[0]}
			for a = a[1:]; len(a) > 0; a = a[2:] {
				var err error
				switch {
				case len(a) == 1:
					err = fmt.Errorf("%s: no value; usage: %s", a[0], cmd.UseLine())
				case a[0] == "link":
					q.Parent = a[1]
				case a[0] == "pkey":
					q.PKey, err = parsePKey(a[1])
				default:
					err = q.parseSetting(cmd, a[0], a[1])
				}
				if err != nil {
					return usageError{err}
				}
			}
			body, err := callDaemon(cmd, http.MethodPost, "/links", nil, q)
			if err != nil {
				return err
			}
			return body.Close()
		}}
}

// parseSetting parses the new value of a setting of an interface.
func (s *linkSettings) parseSetting(cmd *cobra.Command, name, value string) error {
	switch name {
	case "mode":
		if _, err := dev.ParseMode(value); err != nil {
			return err
		}
		s.Mode = &value
	case "mtu":
		n, err := strconv.Atoi(value)
		if err != nil {
			return fmt.Errorf("mtu %q: want a number of bytes", value)
		}
		s.MTU = &n
	case "umcast":
		on, err := strconv.ParseBool(value)
		if err != nil {
			return fmt.Errorf("umcast %q: want 0 or 1", value)
		}
		s.Umcast = &on
	default:
		return fmt.Errorf("%s: unknown; usage: %s", name, cmd.UseLine())
	}
	return nil
}

func newLinkSet() *cobra.Command {
	return &cobra.Command{Use: "set NAME [mode datagram|connected] [mtu MTU] [umcast 0|1]", Short: "change an interface", Args: argCount(3, 7),
		Example: "  rnbd-net link set ib0 mode connected",
		RunE: func(cmd *cobra.Command, a []string) error {
			name := a[0]
			var s linkSettings
			for a = a[1:]; len(a) > 0; a = a[2:] {
				if len(a) == 1 {
					return usageError{fmt.Errorf("%s: no value; usage: %s", a[0], cmd.UseLine())}
				}
				if err := s.parseSetting(cmd, a[0], a[1]); err != nil {
					return usageError{err}
				}
			}
			body, err := callDaemon(cmd, http.MethodPatch, "/links", url.Values{"name": {name}}, s)
			if err != nil {
				return err
			}
			return body.Close()
		}}
}

// parsePKey parses a P_Key other than 0, decimal or with 0x or 0 in front.
func parsePKey(s string) (int, error) {
	v, err := strconv.ParseUint(s, 0, 16)
	if err != nil || v == 0 {
		return 0, fmt.Errorf("P_Key %q: want 0x1 to 0xffff", s)
	}
	return int(v), nil
}

func newLinkDel() *cobra.Command {
	return &cobra.Command{Use: "del NAME", Aliases: []string{"delete"}, Short: "remove a child interface", Args: argCount(1, 1),
		RunE: func(cmd *cobra.Command, a []string) error {
			body, err := callDaemon(cmd, http.MethodDelete, "/links", url.Values{"name": a}, nil)
			if err != nil {
				return err
			}
			return body.Close()
		}}
}

func newPeers() *cobra.Command {
	return &cobra.Command{Use: "peers [NAME]", Short: "show neighbours and their link-layer addresses", Args: argCount(0, 1),
		RunE: func(cmd *cobra.Command, a []string) error {
			list, err := fetchList[peerInfo](cmd, "/peers", a)
			if err != nil {
				return err
			}
			return printResult(cmd, list, func(w io.Writer) error {
				var rows []string
				for _, p := range list {
					rows = append(rows, fmt.Sprintf("%s\t%s\t%s\t%s", p.Link, cmp.Or(p.IP, p.MAC), p.State, p.Address))
				}
				return printColumns(w, "Link\tNeighbour\tState\tAddress", rows)
			})
		}}
}

func newMcg() *cobra.Command {
	return &cobra.Command{Use: "mcg NAME", Short: "show multicast groups, as the file NAME_mcg of Linux does", Args: argCount(1, 1),
		RunE: func(cmd *cobra.Command, a []string) error {
			list, err := fetchList[groupInfo](cmd, "/groups", a)
			if err != nil {
				return err
			}
			return printResult(cmd, list, func(w io.Writer) error {
				var groups []mcast.Group
				for _, g := range list {
					ip, err := netip.ParseAddr(g.MGID)
					if err != nil {
						return err
					}
					groups = append(groups, mcast.Group{MGID: wire.GID(ip.As16()), Created: g.Created, Queued: g.Queued, Complete: g.Complete, SendOnly: g.SendOnly})
				}
				return mcast.Write(w, groups, jiffiesSince)
			})
		}}
}

// jiffiesSince returns the number of ticks of 4 ms from the start of the host until
// t.
func jiffiesSince(t time.Time) uint64 {
	var up unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &up) != nil {
		return 0
	}
	return uint64(max(time.Duration(up.Nano())-time.Since(t), 0) / (4 * time.Millisecond))
}

func newPcap() *cobra.Command {
	c := &cobra.Command{Use: "pcap NAME", Short: "capture frames of an interface, or of the slaves of a bond, link type 242, until SIGINT", Args: argCount(1, 1)}
	file := c.Flags().StringP("write", "w", "-", "`file` to write to; - is the standard output")
	c.RunE = func(cmd *cobra.Command, a []string) error {
		body, err := callDaemon(cmd, http.MethodGet, "/pcap", url.Values{"name": a}, nil)
		if err != nil {
			return err
		}
		defer body.Close()
		out := cmd.OutOrStdout()
		if *file != "-" {
			f, err := os.OpenFile(*file, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
			if err != nil {
				return err
			}
			defer f.Close()
			out = f
		}
		_, err = io.Copy(out, body)
		if cmd.Context().Err() != nil {
			return nil // ended by the user
		}
		return err
	}
	return c
}
