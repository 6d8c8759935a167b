package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"time"
)

const maintainer = "rnbd authors <rnbd@localhost>"

// build is what all packages of a run share.
type build struct {
	version, arch string
	date          time.Time
}

func main() {
	stage := flag.String("stage", "", "folder that make install has filled, with PREFIX=/usr")
	docs := flag.String("docs", "", "folder of the documents")
	out := flag.String("out", ".", "folder for the packages")
	version := flag.String("version", "", "version of the packages")
	arch := flag.String("arch", runtime.GOARCH, "architecture of the programs, as Go names it")
	date := flag.Int64("date", 0, "time of all files, in seconds since 1970")
	flag.Parse()
	b := &build{version: *version, arch: *arch, date: time.Unix(*date, 0).UTC()}
	if err := b.run(*stage, *docs, *out); err != nil {
		fmt.Fprintln(os.Stderr, "pack:", err)
		os.Exit(1)
	}
}

func (b *build) run(stage, docs, out string) error {
	if b.version == "" || rpmArch[b.arch] == "" {
		return fmt.Errorf("version %q, architecture %q: both are needed", b.version, b.arch)
	}
	files, err := readTree(stage, "")
	if err != nil {
		return err
	}
	owner := map[string]string{}
	for i := range packages {
		p := &packages[i]
		var own []entry
		for _, f := range files {
			if p.takes(f.path) {
				if o := owner[f.path]; o != "" {
					return fmt.Errorf("%s belongs to %s and to %s", f.path, o, p.name)
				}
				owner[f.path] = p.name
				own = append(own, f)
			}
		}
		if p.docs {
			if own, err = readTree(docs, "usr/share/doc/"+p.name); err != nil {
				return err
			}
		}
		if len(own) == 0 {
			return fmt.Errorf("package %s has no files", p.name)
		}
		if err := b.write(p, withFolders(own, p.folders), out); err != nil {
			return fmt.Errorf("package %s: %w", p.name, err)
		}
	}
	for _, f := range files {
		if owner[f.path] == "" {
			return fmt.Errorf("%s belongs to no package", f.path)
		}
	}
	image, err := b.image(files)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(out, fmt.Sprintf("rnbd_%s_%s.oci.tar", b.version, b.arch)), image, 0o644)
}

// write makes the package in both formats.
func (b *build) write(p *pkg, entries []entry, out string) error {
	deb, err := b.deb(p, entries)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(out, fmt.Sprintf("%s_%s_%s.deb", p.name, b.version, b.arch)), deb, 0o644); err != nil {
		return err
	}
	rpm, err := b.rpm(p, entries)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(out, fmt.Sprintf("%s-%s-1.%s.rpm", p.name, b.version, rpmArch[b.arch])), rpm, 0o644)
}
