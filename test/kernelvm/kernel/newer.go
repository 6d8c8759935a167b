package kernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
)

// backports is where Debian has kernels that are younger than those of its
// releases, for the mirror that the host uses. apt checks the signature, and the
// packages by it.
const backports = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s trixie-backports main\n"

// recipeNewer changes when the contents of a newer kernel's folder do.
const recipeNewer = "1"

var preparedNewer = sync.OnceValues(func() (Kernel, error) { return withCache(prepareNewerIn) })

// PrepareNewer returns the kernel of Debian's backports, fetching it if the
// cache has none; that of the cache stays until it is removed there. It has
// Debian's modules alone. Needs apt-get and a network, 120 MB of packages.
func PrepareNewer() (Kernel, error) { return preparedNewer() }

func prepareNewerIn(cache string) (Kernel, error) {
	suffix := "-newer" + recipeNewer
	if dir, release, err := cached(cache, suffix); err == nil {
		return newerAt(dir, release), nil
	}
	work, err := os.MkdirTemp(cache, "fetch")
	if err != nil {
		return Kernel{}, err
	}
	defer os.RemoveAll(work)
	b := builder{dir: work, root: filepath.Join(work, "root")}
	a := apt{dir: filepath.Join(work, "apt")}
	if err := a.open(); err != nil {
		return Kernel{}, err
	}
	if b.release, err = a.one("linux-image-amd64", `Depends: linux-image-(\S+)$`); err != nil {
		return Kernel{}, err
	}
	if err := b.fetchNewer(&a); err != nil {
		return Kernel{}, fmt.Errorf("kernel %s: %w", b.release, err)
	}
	dir := filepath.Join(cache, b.release+suffix)
	if err := os.RemoveAll(dir); err != nil {
		return Kernel{}, err
	}
	if err := os.Rename(work, dir); err != nil {
		return Kernel{}, err
	}
	return newerAt(dir, b.release), complete(dir, b.release)
}

func newerAt(dir, release string) Kernel {
	modules := filepath.Join(dir, "root", "usr", "lib", "modules")
	return Kernel{Release: release, Image: filepath.Join(modules, release, "vmlinuz"), Modules: modules}
}

// fetchNewer unpacks the packages that the image consists of, and nothing that
// it needs to be installed.
func (b builder) fetchNewer(a *apt) error {
	names, err := a.all("linux-image-"+b.release, `Depends: (linux-(?:base|binary|modules)-`+regexp.QuoteMeta(b.release)+`)$`)
	if err != nil {
		return err
	}
	deb := filepath.Join(b.dir, "deb")
	if err := a.download(deb, names); err != nil {
		return err
	}
	for _, name := range names {
		if err := b.unpack(deb, name); err != nil {
			return err
		}
	}
	if err := os.Symlink("usr/lib", filepath.Join(b.root, "lib")); err != nil { // for depmod
		return err
	}
	if err := command(b.dir, "depmod", "-b", b.root, b.release); err != nil {
		return err
	}
	for _, done := range []string{deb, a.dir} {
		if err := os.RemoveAll(done); err != nil {
			return err
		}
	}
	return nil
}

// apt is a package index of its own, of the host's mirror: the host's
// installed packages have no part in it.
type apt struct {
	dir string
}

func (a *apt) options() []string {
	var out []string
	for _, o := range []string{
		"Dir::Etc::SourceList=" + filepath.Join(a.dir, "sources.list"), "Dir::Etc::SourceParts=-",
		"Dir::State::Lists=" + filepath.Join(a.dir, "lists"), "Dir::State::Status=/dev/null",
		"Dir::Cache=" + filepath.Join(a.dir, "cache"), "APT::Sandbox::User=root",
	} {
		out = append(out, "-o", o)
	}
	return out
}

func (a *apt) open() error {
	for _, d := range []string{"lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(a.dir, d), 0o755); err != nil {
			return err
		}
	}
	from, err := mirror()
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(a.dir, "sources.list"), fmt.Appendf(nil, backports, from), 0o644); err != nil {
		return err
	}
	return command(a.dir, "apt-get", append(a.options(), "update", "-qq")...)
}

// mirror is where the host has Debian's packages from.
func mirror() (string, error) {
	out, err := output("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Label: Debian")
	if err != nil {
		return "", err
	}
	from, _, _ := strings.Cut(out, "\n")
	if from == "" {
		return "", errors.New("apt knows no mirror of Debian: run apt-get update")
	}
	return from, nil
}

// all returns the matches of the first group of line in the dependencies of
// pkg.
func (a *apt) all(pkg, line string) (found []string, err error) {
	out, err := output("apt-cache", append(a.options(), "depends", pkg)...)
	if err != nil {
		return nil, err
	}
	for _, m := range regexp.MustCompile("(?m)"+line).FindAllStringSubmatch(out, -1) {
		found = append(found, m[1])
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("package %s depends on nothing like %s:\n%s", pkg, line, out)
	}
	return found, nil
}

func (a *apt) one(pkg, line string) (string, error) {
	found, err := a.all(pkg, line)
	if err != nil {
		return "", err
	}
	return found[0], nil
}

// download gets packages into a new folder.
func (a *apt) download(dir string, names []string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return command(dir, "apt-get", append(append(a.options(), "download", "-qq"), names...)...)
}
