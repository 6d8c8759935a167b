package server

import (
	"errors"
	"fmt"
	"net/url"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-server/volume"
)

// sessionMarker is replaced by the session's name in a search path. The rest
// of the path is dropped, as in Linux (docs/extend/protocol/rnbd.md, "Names").
const sessionMarker = "%SESSNAME%"

// identityMarker is replaced by the folder of the identity that the client has proved,
// as identityFolder.
const identityMarker = "%IDENTITY%"

// identityFolder returns the name of the folder of an identity: the identity with
// slashes and other bytes that are not letters, digits or "-_.~$&+=:@" as %XX. Two
// identities never have one folder. EACCES: there is no identity, or one that is no
// safe name.
func identityFolder(identity string) (string, error) {
	fail := func(why string) (string, error) {
		return "", fmt.Errorf("identity %q %s, and each has a folder of its own: %w", identity, why, syscall.EACCES)
	}
	name := url.PathEscape(identity)
	switch {
	case identity == "":
		return "", fmt.Errorf("the client has proved no identity, and each has a folder of its own: %w", syscall.EACCES)
	case strings.HasPrefix(identity, "."):
		return fail("begins with a dot")
	case strings.ContainsFunc(identity, func(r rune) bool { return unicode.IsControl(r) || r == unicode.ReplacementChar }):
		return fail("has control characters")
	case strings.ContainsAny(identity, "*?[]{}\\"):
		return fail("has wildcards")
	case len(name) > 255:
		return fail("is too long for a folder")
	}
	return name, nil
}

// jailFor returns the jail of a client with an identity; empty: it has proved none.
func (j jail) jailFor(identity string) (jail, error) {
	if !strings.Contains(j.searchPath, identityMarker) {
		return j, nil
	}
	folder, err := identityFolder(identity)
	if err != nil {
		return j, err
	}
	j.searchPath = strings.ReplaceAll(j.searchPath, identityMarker, folder)
	return j, nil
}

// maxPath is the largest length of search path and name together, in bytes.
const maxPath = 4096

// jail resolves the names that clients send. The zero value serves nothing.
type jail struct {
	searchPath string   // empty: "/", block devices only
	devices    []string // patterns of the block devices that are served without a search path
	pools      []*volume.Pool
}

// offersNode reports whether the block device at path, which name led to, is served without
// a search path.
func (j jail) offersNode(name, nodePath string) bool {
	return slices.ContainsFunc(j.devices, func(pattern string) bool {
		byName, _ := path.Match(pattern, "/"+strings.TrimLeft(name, "/")) // New has checked the patterns
		byPath, _ := path.Match(pattern, nodePath)
		return byName || byPath
	})
}

// filesAllowed reports whether regular files are served: only below a search
// path that was given explicitly.
func (j jail) filesAllowed() bool { return j.searchPath != "" }

// sessionRoot returns the folder of the session's names.
func (j jail) sessionRoot(session string) string {
	if j.searchPath == "" {
		return "/"
	}
	before, _, found := strings.Cut(j.searchPath, sessionMarker)
	if !found {
		return j.searchPath
	}
	return strings.TrimRight(before, "/") + "/" + session
}

// node is the result of a lookup: an O_PATH descriptor, and the identity for
// the access rules.
type node struct {
	file  *os.File // O_PATH, owned by the holder of the node
	path  string   // the path that the name led to, for people
	id    nodeID
	block bool
	size  uint64 // bytes; 0: none, or not known
	// volume is the node's volume, as in OPEN_RSP; 0: not known.
	volume  uint64
	diskSeq string // of a block device, as diskSeq
	// meta is what is known of a volume of a pool, by whatever name it was opened. pooled
	// reports that the name was that of a volume.
	meta   volume.Meta
	pooled bool
}

// nodeID identifies a node independent of its name: the device number of a
// block device, file system and inode of a file.
type nodeID struct {
	dev, ino uint64
	opaque   string // for plugins that know names only
}

// openName resolves name for session. Symbolic links are followed inside the
// jail. A name that leads out of it does not exist.
func (j jail) openName(session, name string) (*node, error) {
	fail := func(errno syscall.Errno, why string) error {
		return fmt.Errorf("open %q for session %q: %s: %w", name, session, why, errno)
	}
	if p, rest := j.pool(name); p != nil {
		return j.openVolume(p, rest)
	}
	if session == "" && strings.Contains(j.searchPath, sessionMarker) {
		return nil, fail(syscall.EINVAL, "the session has no name, and each has a folder of its own by name")
	}
	if !j.filesAllowed() && len(j.devices) == 0 {
		return nil, fail(syscall.EACCES, "the server has no --search-path, and no --block-devices that it serves without")
	}
	root := j.sessionRoot(session)
	if len(root)+len(name) >= maxPath {
		return nil, fail(syscall.EINVAL, "the name is too long")
	}
	if strings.Contains(name, "..") {
		return nil, fail(syscall.EINVAL, `".." is not allowed in names`)
	}
	dir, err := os.OpenFile(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fail(errnoOf(err), "the search path "+root+" cannot be opened")
	}
	defer dir.Close()
	fd, err := unix.Openat2(int(dir.Fd()), strings.TrimLeft(name, "/"), &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if errors.Is(err, unix.ENOSYS) {
		return nil, fail(syscall.ENOSYS, "names cannot be resolved: Linux is older than 5.6, or a filter refuses openat2, as systemd's RestrictSUIDSGID= does")
	}
	if err != nil {
		return nil, fail(errnoOf(err), "not found below "+root)
	}
	n := &node{file: os.NewFile(uintptr(fd), name)}
	if errno, why := n.identifyNode(j.filesAllowed()); errno != 0 {
		n.file.Close()
		return nil, fail(errno, why)
	}
	if !j.filesAllowed() && !j.offersNode(name, n.path) {
		n.file.Close()
		return nil, fail(syscall.EACCES, "it is none of the server's --block-devices")
	}
	n.size, _ = nodeSize(n.file)
	return n, nil
}

// identifyNode fills the node from its descriptor and refuses kinds of nodes that
// are not served.
func (n *node) identifyNode(filesAllowed bool) (syscall.Errno, string) {
	var st unix.Stat_t
	if err := unix.Fstat(int(n.file.Fd()), &st); err != nil {
		return errnoOf(err), "stat"
	}
	n.volume = volumeOf(n.file, &st)
	n.path, _ = os.Readlink(fmt.Sprintf("/proc/self/fd/%d", n.file.Fd()))
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFBLK:
		n.block, n.diskSeq = true, diskSeq(st.Rdev)
		n.id = nodeID{dev: st.Rdev}
	case unix.S_IFREG:
		if !filesAllowed {
			return syscall.ENOTBLK, "regular files are served only below an explicit --search-path"
		}
		n.id = nodeID{dev: st.Dev, ino: st.Ino}
		var err error
		if n.meta, err = volume.ReadMeta(n.file); err != nil {
			return errnoOf(err), "what is known of the volume"
		}
	default:
		return syscall.ENOTBLK, "neither a block device nor a regular file"
	}
	return 0, ""
}

// errnoOf returns the errno in err. Errors of a jail always have one.
func errnoOf(err error) syscall.Errno {
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return errno
	}
	return syscall.EIO
}

// nodeSize returns the size in bytes of the file or block device behind an
// O_PATH descriptor. A block device without a size has lost its medium; that
// does not count as a size. nodeSize blocks for ever on a network file system
// that does not answer.
func nodeSize(f *os.File) (uint64, bool) {
	if f == nil {
		return 0, false
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return 0, false
	}
	var st unix.Stat_t
	var serr error
	if err := raw.Control(func(fd uintptr) { serr = unix.Fstat(int(fd), &st) }); err != nil || serr != nil {
		return 0, false
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return uint64(st.Size), true
	}
	text, err := os.ReadFile(fmt.Sprintf("/sys/dev/block/%d:%d/size", unix.Major(st.Rdev), unix.Minor(st.Rdev)))
	if err != nil {
		return 0, false
	}
	sectors, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 54)
	return sectors * blk.SectorSize, err == nil && sectors > 0
}

// The volumes of a pool have the names POOL/VOLUME and POOL/VOLUME@SNAPSHOT for
// clients, with and without a search path. The name of a pool hides a file or folder
// of that name below the search path.

// newPools returns the pools of the configuration. The error is EINVAL.
func newPools(cfg []volume.Config, users volume.Users) ([]*volume.Pool, error) {
	var out []*volume.Pool
	for _, c := range cfg {
		p, err := volume.New(c, users)
		if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(out, func(o *volume.Pool) bool { return o.Config().Name == c.Name }) {
			return nil, fmt.Errorf("pool %q is configured twice: %w", c.Name, syscall.EINVAL)
		}
		out = append(out, p)
	}
	return out, nil
}

// pool returns the pool that a name leads to, and the rest of the name. nil: it leads to
// none.
func (j jail) pool(name string) (p *volume.Pool, rest string) {
	if len(j.pools) == 0 {
		return nil, ""
	}
	first, rest, _ := strings.Cut(path.Clean("/" + name)[1:], "/")
	i := slices.IndexFunc(j.pools, func(p *volume.Pool) bool { return p.Config().Name == first })
	if i < 0 {
		return nil, ""
	}
	return j.pools[i], rest
}

// openVolume opens a volume of a pool by its name there.
func (j jail) openVolume(p *volume.Pool, name string) (*node, error) {
	v, err := volume.ParseName(name)
	if err != nil || strings.Contains(name, "..") {
		return nil, fmt.Errorf("open %q in pool %q: no volume has such a name: %w", name, p.Config().Name, syscall.ENOENT)
	}
	f, err := p.Open(v)
	if err != nil {
		return nil, fmt.Errorf("open %q in pool %q: %w", name, p.Config().Name, err)
	}
	n := &node{file: f, pooled: true}
	errno, why := n.identifyNode(true)
	if errno == 0 && n.block {
		errno, why = syscall.ENOTBLK, "a pool of files has no block devices"
	}
	if errno != 0 {
		f.Close()
		return nil, fmt.Errorf("open %q in pool %q: %s: %w", name, p.Config().Name, why, errno)
	}
	n.size, _ = nodeSize(f)
	return n, nil
}

// checkPresent returns ENOENT if the volume behind n was deleted. The caller has the
// node's turn: it is not deleted from then on.
func (n *node) checkPresent() error {
	if !n.pooled {
		return nil
	}
	raw, err := n.file.SyscallConn()
	if err != nil {
		return err
	}
	var st unix.Stat_t
	var statErr error
	if err := raw.Control(func(fd uintptr) { statErr = unix.Fstat(int(fd), &st) }); err != nil {
		return err
	}
	if statErr == nil && st.Nlink == 0 {
		statErr = fmt.Errorf("it was deleted: %w", syscall.ENOENT)
	}
	return statErr
}
