package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

var volumeFields = []report.Field[*controlpb.Volume]{
	report.F("name", "Volume", "POOL/VOLUME or POOL/VOLUME@SNAPSHOT, as clients open it", func(v *controlpb.Volume) any { return volumeName(v) }),
	report.F("pool", "Pool", "where it is", func(v *controlpb.Volume) any { return v.Pool }),
	report.F("size", "Size", "bytes that clients see", func(v *controlpb.Volume) any { return report.Bytes(v.Size) }),
	report.F("allocated", "Allocated", "bytes on the disk; shared ones count for each volume", func(v *controlpb.Volume) any { return report.Bytes(v.Allocated) }),
	report.F("writers", "Writers", "clients that have it open to write", func(v *controlpb.Volume) any { return report.Count(uint64(v.Writers)) }),
	report.F("readers", "Readers", "clients that have it open to read", func(v *controlpb.Volume) any { return report.Count(uint64(v.Readers)) }),
	report.F("source", "Source", "volume or snapshot that it was copied from", func(v *controlpb.Volume) any { return v.Source }),
	report.F("copied", "Copied", "how: reflink, which shares the blocks, or copy", func(v *controlpb.Volume) any { return v.Copied }),
	report.F("published", "Published", "identities that may open it; rules: the access rules decide", func(v *controlpb.Volume) any { return publishedText(v) }),
	report.F("owner", "Owner", "identity that made it; empty: an administrator of the host", func(v *controlpb.Volume) any { return v.Owner }),
	report.F("created", "Created", "time, empty where it is not known", func(v *controlpb.Volume) any { return createdText(v) }),
}

func volumeName(v *controlpb.Volume) string {
	name := v.Pool + "/" + v.Name
	if v.Snapshot != "" {
		name += "@" + v.Snapshot
	}
	return name
}

func publishedText(v *controlpb.Volume) string {
	if !v.Private {
		return "rules"
	}
	var list []string
	for _, g := range v.Grants {
		list = append(list, g.Identity+" "+g.Access)
	}
	return strings.Join(list, ", ")
}

func createdText(v *controlpb.Volume) string {
	if v.CreatedUnixNs == 0 {
		return ""
	}
	return time.Unix(0, v.CreatedUnixNs).UTC().Format(time.RFC3339)
}

// volumeNoun makes the commands about volumes.
func volumeNoun() *noun {
	return &noun{
		name: "volume", plural: "volumes", short: "Volumes in the pools of a server", newer: true,
		fields: report.Infos(volumeFields),
		usual:  func(daemonSet) []string { return []string{"name", "size", "allocated", "writers", "readers", "source"} },
		wide:   []string{"copied", "published", "owner", "created"},
		verbs:  append(volumeVerbs(), publishVerbs()...),
	}
}

func volumeVerbs() []*verb {
	return []*verb{
		{
			name: "list", aliases: []string{"ls"}, on: onServer, words: outputWords, max: 1, flags: listFlags, args: "[POOL[/VOLUME]]", run: listVolumes,
			short:   "List volumes",
			long:    "List the volumes of all pools, of one pool, or one volume.",
			example: "  rnbd volume list\n  rnbd volume list fast all json",
		},
		{
			name: "show", on: onServer, words: outputWords, min: 1, max: 1, args: "POOL/VOLUME", run: showVolume,
			short:   "Show all about a volume or a snapshot",
			example: "  rnbd volume show fast/db1",
		},
		{
			name: "create", on: onServer, min: 2, max: 2, args: "POOL/VOLUME SIZE[UNIT]", flags: privateFlag, run: createVolume, interrupted: volumeLeft,
			short:   "Create a volume of zeros",
			long:    "Create a volume of zeros that occupies no space yet. Clients open it as\nPOOL/VOLUME. One that exists with that size is left as it is.",
			example: "  rnbd volume create fast/db1 10G",
		},
		{
			name: "delete", aliases: []string{"rm"}, on: onServer, min: 1, max: 1, args: "POOL/VOLUME", flags: deleteFlags, run: deleteVolume, interrupted: volumeLeft,
			short:   "Delete a volume",
			long:    "Delete a volume that no client has open. One that does not exist is no error.",
			example: "  rnbd volume delete fast/db1",
		},
		{
			name: "resize", on: onServer, min: 2, max: 2, args: "POOL/VOLUME SIZE[UNIT]", flags: shrinkFlag, run: resizeVolume, interrupted: volumeLeft,
			short:   "Change the size of a volume",
			long:    "Change the size of a volume. Clients that have it open are told.",
			example: "  rnbd volume resize fast/db1 20G",
		},
		{
			name: "clone", on: onServer, min: 2, max: 3, args: "POOL/VOLUME[@SNAPSHOT] VOLUME [SIZE[UNIT]]", flags: privateFlag, run: cloneVolume, interrupted: volumeLeft,
			short:   "Make a volume of another one, or of a snapshot",
			long:    "Make a volume of another one of its pool, or of a snapshot. On XFS and btrfs both\nshare their blocks; elsewhere the data is copied, which takes as long as that does\nand needs the source to be closed.",
			example: "  rnbd volume clone fast/db1@monday db2",
		},
		{
			name: "snapshot", on: onServer, words: outputWords, min: 1, max: 2, args: "create|delete|list [POOL/VOLUME@SNAPSHOT]", flags: listFlags, run: snapshotVolume, interrupted: volumeLeft,
			short:   "Create, delete or list snapshots",
			long:    "Create, delete or list snapshots of volumes. A snapshot has every write that a\nclient had an answer to before the command, and no write in part: it is what a\nmachine finds after a power cut. On XFS and btrfs it is made at once, while clients\nuse the volume, and shares its blocks; elsewhere the data is copied, and the volume\nhas to be closed. Clients open a snapshot read-only as POOL/VOLUME@SNAPSHOT.",
			example: "  rnbd volume snapshot create fast/db1@monday\n  rnbd volume snapshot list fast\n  rnbd volume snapshot delete fast/db1@monday",
		},
	}
}

func publishVerbs() []*verb {
	return []*verb{
		{
			name: "publish", on: onServer, min: 2, max: 2, args: "POOL/VOLUME IDENTITY [ro|rw|migration]", words: accessWords, run: publishVolume, interrupted: volumeLeft,
			short:   "Allow an identity to open a volume",
			long:    "Allow an identity, as TLS proves it, to open a volume. From then on only those that\nit is published to may open it, whatever the access rules say.",
			example: "  rnbd volume publish fast/db1 spiffe://example.org/node1 rw",
		},
		{
			name: "unpublish", on: onServer, min: 2, max: 2, args: "POOL/VOLUME IDENTITY", run: unpublishVolume, interrupted: volumeLeft,
			short:   "Take a volume away from an identity",
			long:    "Take a volume away from an identity, and close it there. The command ends when none\nof that client's writes can reach the volume any more.",
			example: "  rnbd volume unpublish fast/db1 spiffe://example.org/node1",
		},
	}
}

// volumeLeft is the state after a signal.
const volumeLeft = "the volume is as before, or as asked for"

func privateFlag(f *pflag.FlagSet) {
	f.Bool("private", false, "nobody may open it before rnbd volume publish")
}

func shrinkFlag(f *pflag.FlagSet) {
	f.Bool("shrink", false, "also to a smaller size; what is beyond it is lost")
}

func deleteFlags(f *pflag.FlagSet) {
	f.Bool("keep-snapshots", false, "although it has snapshots, which stay")
}

// splitVolume splits POOL/VOLUME and POOL/VOLUME@SNAPSHOT.
func splitVolume(s string) (pool, volume, snapshot string, err error) {
	pool, rest, ok := strings.Cut(s, "/")
	if !ok || pool == "" || rest == "" {
		return "", "", "", usageError{fmt.Errorf("%q: write POOL/VOLUME, as fast/db1", s)}
	}
	volume, snapshot, _ = strings.Cut(rest, "@")
	return pool, volume, snapshot, nil
}

// withVolume runs f with the server and the parts of the first argument.
func (c *call) withVolume(f func(ctx context.Context, s controlpb.ServerDaemonClient, pool, volume, snapshot string) error) error {
	return c.withVolumeOf(c.args[0], f)
}

func (c *call) withVolumeOf(name string, f func(ctx context.Context, s controlpb.ServerDaemonClient, pool, volume, snapshot string) error) error {
	pool, volume, snapshot, err := splitVolume(name)
	if err != nil {
		return err
	}
	return c.with(func(ctx context.Context, d *daemons) error { return f(ctx, d.server, pool, volume, snapshot) })
}

// noSnapshot refuses the name of a snapshot where a volume is meant.
func noSnapshot(c *call, snapshot string) error {
	if snapshot != "" {
		return usageError{fmt.Errorf("%s: %q is a snapshot, and a volume is needed", c.name, c.args[0])}
	}
	return nil
}

func sizeArgument(text string) (uint64, error) {
	size, err := report.ParseSize(text, 0)
	if err != nil {
		return 0, usageError{err}
	}
	return size, nil
}

func createVolume(c *call) error {
	size, err := sizeArgument(c.args[1])
	if err != nil {
		return err
	}
	return c.withVolume(func(ctx context.Context, s controlpb.ServerDaemonClient, pool, volume, snapshot string) error {
		if err := noSnapshot(c, snapshot); err != nil {
			return err
		}
		_, err := s.CreateVolume(ctx, &controlpb.CreateVolumeRequest{Pool: pool, Name: volume, Size: size, Private: c.text("private") == "true"})
		return err
	})
}

func deleteVolume(c *call) error {
	return c.withVolume(func(ctx context.Context, s controlpb.ServerDaemonClient, pool, volume, snapshot string) error {
		if err := noSnapshot(c, snapshot); err != nil {
			return err
		}
		_, err := s.DeleteVolume(ctx, &controlpb.DeleteVolumeRequest{Pool: pool, Name: volume, KeepSnapshots: c.text("keep-snapshots") == "true"})
		return err
	})
}

func resizeVolume(c *call) error {
	size, err := sizeArgument(c.args[1])
	if err != nil {
		return err
	}
	return c.withVolume(func(ctx context.Context, s controlpb.ServerDaemonClient, pool, volume, snapshot string) error {
		if err := noSnapshot(c, snapshot); err != nil {
			return err
		}
		_, err := s.ResizeVolume(ctx, &controlpb.ResizeVolumeRequest{Pool: pool, Name: volume, Size: size, Shrink: c.text("shrink") == "true"})
		return err
	})
}

func cloneVolume(c *call) (err error) {
	var size uint64
	if c.arg(2) != "" {
		if size, err = sizeArgument(c.arg(2)); err != nil {
			return err
		}
	}
	return c.withVolume(func(ctx context.Context, s controlpb.ServerDaemonClient, pool, volume, snapshot string) error {
		source, to := volume, strings.TrimPrefix(c.args[1], pool+"/")
		if snapshot != "" {
			source += "@" + snapshot
		}
		v, err := s.CloneVolume(ctx, &controlpb.CloneVolumeRequest{Pool: pool, Source: source, Name: to, Size: size, Private: c.text("private") == "true"})
		return c.tellCopied(v, err)
	})
}

// tellCopied says how a volume was copied.
func (c *call) tellCopied(v *controlpb.Volume, err error) error {
	switch {
	case err != nil:
		return err
	case v.Copied == "reflink":
		return c.tell("%s shares the blocks of %s/%s", volumeName(v), v.Pool, v.Source)
	}
	return c.tell("%s is a copy of the data of %s/%s: the file system of the pool cannot share blocks", volumeName(v), v.Pool, v.Source)
}

func snapshotVolume(c *call) error {
	switch c.args[0] {
	case "list":
		return c.printVolumes(c.arg(1), func(v *controlpb.Volume) bool { return v.Snapshot != "" })
	case "create":
		return c.withSnapshot(func(ctx context.Context, s controlpb.ServerDaemonClient, pool, volume, snapshot string) error {
			return c.tellCopied(s.CreateSnapshot(ctx, &controlpb.CreateSnapshotRequest{Pool: pool, Name: volume, Snapshot: snapshot}))
		})
	case "delete":
		return c.withSnapshot(func(ctx context.Context, s controlpb.ServerDaemonClient, pool, volume, snapshot string) error {
			_, err := s.DeleteSnapshot(ctx, &controlpb.DeleteSnapshotRequest{Pool: pool, Name: volume, Snapshot: snapshot})
			return err
		})
	}
	return usageError{fmt.Errorf("snapshot %q: write create, delete or list", c.args[0])}
}

// withSnapshot runs f with the snapshot that the second argument names.
func (c *call) withSnapshot(f func(ctx context.Context, s controlpb.ServerDaemonClient, pool, volume, snapshot string) error) error {
	return c.withVolumeOf(c.arg(1), func(ctx context.Context, s controlpb.ServerDaemonClient, pool, volume, snapshot string) error {
		if snapshot == "" {
			return usageError{fmt.Errorf("snapshot %s %q: write POOL/VOLUME@SNAPSHOT, as fast/db1@monday", c.args[0], c.arg(1))}
		}
		return f(ctx, s, pool, volume, snapshot)
	})
}

func listVolumes(c *call) error {
	return c.printVolumes(c.arg(0), func(v *controlpb.Volume) bool { return v.Snapshot == "" })
}

// printVolumes lists those of place, POOL or POOL/VOLUME or empty, that keep takes.
func (c *call) printVolumes(place string, keep func(*controlpb.Volume) bool) error {
	pool, volume, _ := strings.Cut(place, "/")
	return c.with(func(ctx context.Context, d *daemons) error {
		list, err := d.server.ListVolumes(ctx, &controlpb.ListVolumesRequest{Pool: pool, Name: volume, Snapshots: true})
		if err != nil {
			return err
		}
		var kept []*controlpb.Volume
		for _, v := range list.Volumes {
			if keep(v) {
				kept = append(kept, v)
			}
		}
		t, err := table(c, c.noun, volumeFields, false, kept)
		if err != nil {
			return err
		}
		return report.List(c.cmd.OutOrStdout(), c.Options, t)
	})
}

func showVolume(c *call) error {
	return c.withVolume(func(ctx context.Context, s controlpb.ServerDaemonClient, pool, volume, snapshot string) error {
		list, err := s.ListVolumes(ctx, &controlpb.ListVolumesRequest{Pool: pool, Name: volume, Snapshots: true})
		if err != nil {
			return err
		}
		for _, v := range list.Volumes {
			if v.Snapshot != snapshot {
				continue
			}
			t, err := selected(c, c.noun, volumeFields, everyField(volumeFields), []*controlpb.Volume{v})
			if err != nil {
				return err
			}
			return report.Show(c.cmd.OutOrStdout(), c.Options, t)
		}
		return notFound("volume", c.args[0], "")
	})
}

func publishVolume(c *call) error {
	return c.withVolume(func(ctx context.Context, s controlpb.ServerDaemonClient, pool, volume, snapshot string) error {
		_, err := s.PublishVolume(ctx, &controlpb.PublishVolumeRequest{Pool: pool, Name: volume, Snapshot: snapshot, Identity: c.args[1], Access: c.access})
		return err
	})
}

func unpublishVolume(c *call) error {
	return c.withVolume(func(ctx context.Context, s controlpb.ServerDaemonClient, pool, volume, snapshot string) error {
		_, err := s.UnpublishVolume(ctx, &controlpb.UnpublishVolumeRequest{Pool: pool, Name: volume, Snapshot: snapshot, Identity: c.args[1]})
		return err
	})
}
