package main

import (
	"bytes"
	"compress/gzip"
	"flag"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
)

// maintainer is a name. Debian wants an address with it; mail to this one goes
// nowhere (RFC 2606).
const maintainer = "rnbd maintainers <maintainers@rnbd.invalid>"

// packageBuild has the values that all packages of a run share.
type packageBuild struct {
	version, arch string
	date          time.Time
	licences      licenceFinder
	programs      string // folder for the programs themselves; empty: none
}

func main() {
	stage := flag.String("stage", "", "folder that make install has filled, with PREFIX=/usr")
	source := flag.String("source", "", "folder of the repository, for documents and licence")
	out := flag.String("out", ".", "folder for the packages")
	version := flag.String("version", "", "version of the packages")
	arch := flag.String("arch", runtime.GOARCH, "architecture of the programs, as Go names it")
	date := flag.Int64("date", 0, "time of all files, in seconds since 1970")
	programs := flag.String("programs", "", "folder for the programs and their bills of materials, outside of packages")
	flag.Parse()
	b := &packageBuild{version: *version, arch: *arch, date: time.Unix(*date, 0).UTC(), programs: *programs}
	if err := b.run(*stage, *source, *out); err != nil {
		fmt.Fprintln(os.Stderr, "pack:", err)
		os.Exit(1)
	}
}

func (b *packageBuild) run(stage, source, out string) (err error) {
	if err := b.checkVersion(); err != nil {
		return err
	}
	if b.licences, err = newLicences(source); err != nil {
		return err
	}
	files, err := readTree(stage, "")
	if err != nil {
		return err
	}
	contents, err := assignFiles(files)
	if err != nil {
		return err
	}
	var image []fileEntry
	for i := range packages {
		p := &packages[i]
		own := contents[p.name]
		if p.docs {
			if own, err = readTree(filepath.Join(source, "docs"), p.docFolder()); err != nil {
				return err
			}
		}
		if len(own) == 0 {
			return fmt.Errorf("package %s has no files", p.name)
		}
		legal, err := b.legalFiles(p, own)
		if err != nil {
			return err
		}
		own = append(own, legal...)
		if p.inImage {
			image = append(image, own...)
		}
		if err := b.writePackages(p, own, out); err != nil {
			return fmt.Errorf("package %s: %w", p.name, err)
		}
	}
	archive, err := b.imageTar(image)
	if err != nil {
		return err
	}
	if err := writeSame(filepath.Join(out, fmt.Sprintf("rnbd_%s_%s.oci.tar", b.version, b.arch)), archive); err != nil {
		return err
	}
	return b.writePrograms(files)
}

// writePrograms writes the programs with a bill of materials beside each.
func (b *packageBuild) writePrograms(files []fileEntry) error {
	if b.programs == "" {
		return nil
	}
	if err := os.MkdirAll(b.programs, 0o755); err != nil {
		return err
	}
	for _, f := range files {
		if !isProgram(f.path) {
			continue
		}
		bill, err := b.billOfMaterials(f)
		if err != nil {
			return err
		}
		name := filepath.Join(b.programs, path.Base(f.path))
		if err := os.WriteFile(name, f.body, 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(name+sbomSuffix, bill, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// writeSame writes a file. One that is there with other contents is an error: a
// package for all architectures must not depend on the one that it was made with.
func writeSame(name string, body []byte) error {
	if old, err := os.ReadFile(name); err == nil && !bytes.Equal(old, body) {
		return fmt.Errorf("%s is there with other contents: remove the packages of an earlier build", name)
	}
	return os.WriteFile(name, body, 0o644)
}

// checkVersion refuses versions and architectures that a format cannot express. A hyphen
// would begin the revision of a package.
func (b *packageBuild) checkVersion() error {
	if rpmArch[b.arch] == "" {
		return fmt.Errorf("architecture %q: packages are made for amd64 and arm64", b.arch)
	}
	if b.version == "" || strings.Trim(b.version, "0123456789abcdefghijklmnopqrstuvwxyz.~+") != "" || b.version[0] < '0' || b.version[0] > '9' {
		return fmt.Errorf("version %q: it is to begin with a digit and have digits, small letters, and . ~ + only", b.version)
	}
	return nil
}

// assignFiles gives each file to its package. It is an error if there is none, or two.
func assignFiles(files []fileEntry) (map[string][]fileEntry, error) {
	contents := map[string][]fileEntry{}
	for _, f := range files {
		var owners []string
		for i := range packages {
			if p := &packages[i]; p.hasFile(f.path) {
				owners = append(owners, p.name)
				contents[p.name] = append(contents[p.name], f)
			}
		}
		if len(owners) != 1 {
			return nil, fmt.Errorf("%s belongs to %d packages %v: it is to belong to one", f.path, len(owners), owners)
		}
	}
	return contents, nil
}

// legalFiles returns the files about rights and origin of a package with these contents.
func (b *packageBuild) legalFiles(p *packageSpec, contents []fileEntry) ([]fileEntry, error) {
	programs := slices.DeleteFunc(slices.Clone(contents), func(e fileEntry) bool { return !isProgram(e.path) })
	dir := path.Join(p.docFolder(), "licences")
	texts, err := b.licences.textsOf(programs, dir)
	if err != nil {
		return nil, err
	}
	texts = append(texts, regularFile(path.Join(p.docFolder(), "copyright"), copyrightFile(texts, dir)))
	for _, program := range programs {
		bill, err := b.billOfMaterials(program)
		if err != nil {
			return nil, err
		}
		texts = append(texts, regularFile(path.Join(p.docFolder(), "sbom", path.Base(program.path)+sbomSuffix), bill))
	}
	return texts, nil
}

// writePackages makes the package in both formats.
func (b *packageBuild) writePackages(p *packageSpec, contents []fileEntry, out string) error {
	contents, err := compressManPages(contents)
	if err != nil {
		return err
	}
	arch, rpmArch := b.arch, rpmArch[b.arch]
	if p.noArch {
		arch, rpmArch = "all", "noarch"
	}
	deb, err := b.debPackage(p, contents, arch)
	if err != nil {
		return err
	}
	if err := writeSame(filepath.Join(out, fmt.Sprintf("%s_%s_%s.deb", p.name, b.version, arch)), deb); err != nil {
		return err
	}
	rpm, err := b.rpmPackage(p, withFolders(contents, p.folders...), rpmArch)
	if err != nil {
		return err
	}
	return writeSame(filepath.Join(out, fmt.Sprintf("%s-%s-1.%s.rpm", p.name, b.version, rpmArch)), rpm)
}

// compressManPages returns the files with man pages compressed, as distributions have them.
func compressManPages(files []fileEntry) ([]fileEntry, error) {
	out := slices.Clone(files)
	for i, f := range out {
		if !strings.HasPrefix(f.path, "usr/share/man/") {
			continue
		}
		body, err := gzipBytes(f.body, gzip.BestCompression)
		if err != nil {
			return nil, err
		}
		out[i].path, out[i].body = f.path+".gz", body
	}
	return out, nil
}
