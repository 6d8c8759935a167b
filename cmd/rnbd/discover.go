package main

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/modules/rnbd-client"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/names"
)

var exportFields = []report.Field[client.Export]{
	report.F("name", "Name", "as rnbd map takes it", func(e client.Export) any { return names.Spell(e.Name) }),
	report.F("size", "Size", "bytes", func(e client.Export) any { return report.Bytes(e.Size) }),
	report.F("kind", "Kind", "file or block", func(e client.Export) any {
		if e.Block {
			return "block"
		}
		return "file"
	}),
	report.F("free", "Free For", "access modes that it can be mapped with now", func(e client.Export) any {
		switch e.Writers {
		case 0:
			return "rw"
		case 1:
			return "ro,migration"
		}
		return "ro"
	}),
	report.F("readers", "Readers", "sessions that have it open read-only", func(e client.Export) any { return uint64(e.Readers) }),
	report.F("writers", "Writers", "sessions that have it open for writing", func(e client.Export) any { return uint64(e.Writers) }),
	report.F("user", "In Use By", "session that has it open, a writer if there is one", func(e client.Export) any {
		if e.User == "" {
			return nil
		}
		return names.Spell(e.User)
	}),
}

func newDiscover() *cobra.Command {
	c := &cobra.Command{
		Use: "discover SERVER...", Short: "List what a server offers",
		Long: `List the names that a server offers, their sizes and who has them open, without a
daemon and without mapping anything. SERVER is [SRC@]ADDRESS[:PORT][%FABRIC];
several are paths of one session. The server lists what is below its --search-path,
unless it runs with --list=false; a Linux kernel's server lists nothing.

Where the server's --search-path has %SESSNAME%, name the session by --session.`,
		Example: "  rnbd discover 10.0.0.1\n  rnbd discover 10.0.0.1 --fabric rocev2 -o json",
		Args:    args(cobra.MinimumNArgs(1)),
	}
	fabric := c.Flags().String("fabric", "", "fabric of addresses that name none")
	session := c.Flags().String("session", "", "name of the session that is asked for (default one that no other has)")
	var secure clientTLS
	secure.register(c.Flags(), "TLS: off or require")
	c.RunE = func(cmd *cobra.Command, servers []string) error {
		ctx, cancel, err := deadline(cmd)
		if err != nil {
			return err
		}
		defer cancel()
		o, err := readFlags(cmd)
		if err != nil {
			return err
		}
		offer, err := discover(ctx, servers, *fabric, *session, &secure)
		if err != nil {
			return err
		}
		return printOffer(cmd, o.Options, servers[0], offer)
	}
	return c
}

// discover asks with the client library in this process.
func discover(ctx context.Context, servers []string, fabric, session string, secure *clientTLS) (offer client.Offer, err error) {
	choices, err := resolvePaths(ctx, servers)
	if err != nil {
		return offer, err
	}
	for _, choice := range choices {
		if err := choice.setFabric(fabric); err != nil {
			return offer, err
		}
	}
	auth, err := secure.open()
	if err != nil {
		return offer, err
	}
	lib, err := newBenchClient(ctx, 0, true, auth)
	if err != nil {
		return offer, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closing)
		defer cancel()
		_ = lib.Close(ctx) // the answer is there, or its error
	}()
	err = tryPaths(ctx, choices, func(ctx context.Context, paths []string) (err error) {
		offer, err = lib.Discover(ctx, paths, session)
		return err
	})
	if errors.Is(err, syscall.EOPNOTSUPP) {
		return offer, hinted{err, "map a device by the name that the operator of the server tells"}
	}
	return offer, err
}

// setFabric sets the fabric of the paths that have none, and checks them.
func (choice pathChoice) setFabric(fabric string) error {
	for i, p := range choice {
		if _, _, found := cutPathFabric(p); !found && fabric != "" {
			choice[i] = p + "%" + fabric
		}
		if err := client.CheckPath(choice[i]); err != nil {
			return usageError{err}
		}
	}
	return nil
}

func printOffer(cmd *cobra.Command, o report.Options, server string, offer client.Offer) error {
	out := cmd.OutOrStdout()
	if o.Machine() {
		return report.List(out, o, report.Build("exports", "export", exportFields, offer.Exports))
	}
	var err error
	switch {
	case offer.Paths:
		_, err = fmt.Fprintf(out, "%s has no --search-path: any block device of its host can be mapped by its path (rnbd map /dev/... from %s)\n", server, server)
	case len(offer.Exports) == 0:
		_, err = fmt.Fprintf(out, "%s offers nothing: there is no file or block device below its --search-path\n", server)
	default:
		err = report.List(out, o, report.Build("exports", "export", exportFields, offer.Exports))
	}
	if err == nil && offer.Cut {
		_, err = fmt.Fprintln(out, "the server has more names than it lists")
	}
	return err
}
