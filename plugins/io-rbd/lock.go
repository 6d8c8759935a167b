//go:build librbd

package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/ceph/go-ceph/rbd"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// The fence is the exclusive lock of the image. Who breaks a lock has the cluster block the
// connection of its owner first (rbd_blocklist_on_break_lock, which is set): none of its
// writes is carried out after that, also if its process was only stopped.

// ownerKey is the metadata of an image with the identity of the server that has locked it,
// and the owner of the lock.
const ownerKey = "rnbd.owner"

// lock takes the exclusive lock. An owner of the same identity is a dead process of this
// server, and its lock is broken; any other owner's only if always is set. The errno is
// EBUSY if another owner has it.
func (d *disk) lock(identity string, always bool) error {
	features, err := d.img.GetFeatures()
	if err != nil {
		return err
	}
	if features&rbd.FeatureExclusiveLock == 0 {
		return fmt.Errorf("it has no exclusive lock; use `rbd feature enable POOL/IMAGE exclusive-lock`: %w", blk.EINVAL)
	}
	owners, err := d.img.LockGetOwners()
	if err != nil && !errors.Is(err, rbd.ErrNotFound) {
		return fmt.Errorf("owners of the lock: %w", err)
	}
	for _, o := range owners {
		if !always && !d.wasOurs(identity, o.Owner) {
			return fmt.Errorf("%s has locked it; end that use, or set fence=always: %w", o.Owner, blk.EBUSY)
		}
		if err := d.img.LockBreak(rbd.LockModeExclusive, o.Owner); err != nil && !errors.Is(err, rbd.ErrNotFound) {
			return fmt.Errorf("break the lock of %s: %w", o.Owner, err)
		}
	}
	if err := d.img.LockAcquire(rbd.LockModeExclusive); err != nil {
		return fmt.Errorf("take the lock: %w", err)
	}
	if owners, err = d.img.LockGetOwners(); err != nil || len(owners) != 1 {
		return fmt.Errorf("owners of the lock that was taken: %d, %w", len(owners), err)
	}
	if err := d.img.SetMetadata(ownerKey, identity+" "+owners[0].Owner); err != nil {
		return fmt.Errorf("note the owner of the lock: %w", err)
	}
	return nil
}

// wasOurs reports whether the owner of the lock was a process of the server with that
// identity.
func (d *disk) wasOurs(identity, owner string) bool {
	noted, err := d.img.GetMetadata(ownerKey)
	if err != nil {
		return false
	}
	by, lockOwner, _ := strings.Cut(noted, " ")
	return by == identity && lockOwner == owner
}
