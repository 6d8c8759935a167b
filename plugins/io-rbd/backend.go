//go:build librbd

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/ceph/go-ceph/rados"
	"github.com/ceph/go-ceph/rbd"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

const version = "0.1.0"

func main() { plugin.ServeIO(newBackend()) }

// backend is the plugin.
type backend struct {
	conf     string // path of ceph.conf
	user     string // of Ceph, without "client."
	keyring  string // path; empty: as ceph.conf says
	pool     string // of names without one
	identity string // of this server, in the metadata of images that it has locked
	fence    string // which owners of a lock may be broken
}

// Values of the setting fence.
const (
	fenceOwn    = "own"    // owners that had the identity of this server
	fenceAlways = "always" // all owners
)

func newBackend() *backend {
	host, _ := os.Hostname() // empty: the setting identity names the server
	return &backend{conf: "/etc/ceph/ceph.conf", user: "admin", pool: "rbd", identity: host, fence: fenceOwn}
}

// Describe promises that answered writes are kept: there is no cache in this process.
func (b *backend) Describe() plugin.Info {
	return plugin.Info{Name: "rbd", Version: version, Crash: plugin.KeepsAcknowledged, Names: plugin.NamesOpaque}
}

// Configure reads the settings.
func (b *backend) Configure(settings map[string]string) error {
	for key, value := range settings {
		field := map[string]*string{"conf": &b.conf, "user": &b.user, "keyring": &b.keyring, "pool": &b.pool,
			"identity": &b.identity, "fence": &b.fence}[key]
		if field == nil {
			return fmt.Errorf("setting %q is not known; known are conf, user, keyring, pool, identity and fence: %w", key, blk.EINVAL)
		}
		*field = value
	}
	if b.fence != fenceOwn && b.fence != fenceAlways {
		return fmt.Errorf("fence %q: write %s or %s: %w", b.fence, fenceOwn, fenceAlways, blk.EINVAL)
	}
	if b.identity == "" {
		return fmt.Errorf("identity is empty, and so is the name of this host: %w", blk.EINVAL)
	}
	return nil
}

// image is the name of an image.
type image struct{ pool, name, snapshot string }

// parseName reads [POOL/]IMAGE[@SNAPSHOT].
func (b *backend) parseName(device string) (image, error) {
	i := image{pool: b.pool, name: device}
	if pool, rest, ok := strings.Cut(device, "/"); ok {
		i.pool, i.name = pool, rest
	}
	i.name, i.snapshot, _ = strings.Cut(i.name, "@")
	if i.pool == "" || i.name == "" || strings.Contains(i.name, "/") {
		return i, fmt.Errorf("%q is no image: write [POOL/]IMAGE[@SNAPSHOT]: %w", device, blk.EINVAL)
	}
	return i, nil
}

// Open opens an image. It has a connection to the cluster of its own: the cluster fences
// connections, and one image that hangs delays no other.
func (b *backend) Open(ctx context.Context, r plugin.OpenRequest) (plugin.Disk, error) {
	name, err := b.parseName(r.Name)
	if err != nil {
		return nil, err
	}
	if name.snapshot != "" && !r.ReadOnly {
		return nil, fmt.Errorf("%s is a snapshot; map it read-only: %w", r.Name, blk.EROFS)
	}
	type result struct {
		d   *disk
		err error
	}
	done := make(chan result, 1)
	go func() {
		d, err := b.open(name, r.ReadOnly)
		done <- result{d, err}
	}()
	select {
	case o := <-done:
		if o.err != nil {
			return nil, fmt.Errorf("image %s: %w", r.Name, errnoOf(o.err))
		}
		return o.d, nil
	case <-ctx.Done():
		go func() {
			if o := <-done; o.err == nil {
				_ = o.d.Close()
			}
		}()
		return nil, fmt.Errorf("image %s: the cluster does not answer: %w", r.Name, blk.ETIMEDOUT)
	}
}

func (b *backend) open(name image, readOnly bool) (_ *disk, err error) {
	d := &disk{readOnly: readOnly}
	defer func() {
		if err != nil {
			d.release()
		}
	}()
	if d.conn, err = b.connect(); err != nil {
		return nil, err
	}
	if d.io, err = d.conn.OpenIOContext(name.pool); err != nil {
		return nil, fmt.Errorf("pool %s: %w", name.pool, err)
	}
	if readOnly {
		d.img, err = rbd.OpenImageReadOnly(d.io, name.name, name.snapshot)
	} else {
		d.img, err = rbd.OpenImage(d.io, name.name, rbd.NoSnapshot)
	}
	if err != nil {
		return nil, err
	}
	if !readOnly {
		if err := d.lock(b.identity, b.fence == fenceAlways); err != nil {
			return nil, err
		}
	}
	if d.size, err = d.img.GetSize(); err != nil {
		return nil, err
	}
	d.start()
	return d, nil
}

// connectTime bounds the wait for the monitors.
const connectTime = 15 * time.Second

// connect makes a connection without a cache: an answered write is in the cluster.
func (b *backend) connect() (*rados.Conn, error) {
	c, err := rados.NewConnWithUser(b.user)
	if err != nil {
		return nil, err
	}
	if err := c.ReadConfigFile(b.conf); err != nil {
		return nil, fmt.Errorf("read %s: %w", b.conf, err)
	}
	options := [][2]string{{"rbd_cache", "false"}, {"client_mount_timeout", fmt.Sprint(connectTime.Seconds())}}
	if b.keyring != "" {
		options = append(options, [2]string{"keyring", b.keyring})
	}
	for _, o := range options {
		if err := c.SetConfigOption(o[0], o[1]); err != nil {
			return nil, fmt.Errorf("set %s: %w", o[0], err)
		}
	}
	if err := c.Connect(); err != nil {
		c.Shutdown()
		return nil, fmt.Errorf("connect to the cluster of %s as client.%s: %w", b.conf, b.user, err)
	}
	return c, nil
}

// errnoOf adds the errno to an error of Ceph.
func errnoOf(err error) error {
	if e := code(err); e != blk.OK {
		return fmt.Errorf("%w: %w", err, e)
	}
	return err
}

// eblocklisted is the error of a connection that the cluster has fenced (ESHUTDOWN), and
// edquot that of a pool that is full.
const (
	eblocklisted = 108
	edquot       = 122
)

// code returns the errno of an error of Ceph; OK: it has none.
func code(err error) blk.Errno {
	var e interface{ ErrorCode() int }
	if !errors.As(err, &e) {
		return blk.OK
	}
	switch n := -e.ErrorCode(); n {
	case edquot:
		return blk.ENOSPC
	case eblocklisted:
		return blk.EIO
	default:
		if n > 0 && n < 1<<9 {
			return blk.Errno(n)
		}
	}
	return blk.EIO
}
