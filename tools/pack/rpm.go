package main

import (
	"bytes"
	"strings"

	"github.com/google/rpmpack"
)

// rpmArch are RPM's names of architectures.
var rpmArch = map[string]string{"amd64": "x86_64", "arm64": "aarch64"}

// rpm returns the package in RPM's format.
func (b *build) rpm(p *pkg, entries []entry, arch string) ([]byte, error) {
	meta := rpmpack.RPMMetaData{
		Name: p.name, Version: b.version, Release: "1", Arch: arch, Summary: p.short, Description: p.long, URL: "https://" + strings.TrimSuffix(ours, "/"),
		Vendor: maintainer, Packager: maintainer, Licence: "Apache-2.0", Compressor: "gzip:6", BuildTime: b.date, BuildHost: "rnbd.invalid", OS: "linux",
	}
	for _, r := range p.requires {
		if err := meta.Requires.Set(r + " = " + b.version + "-1"); err != nil {
			return nil, err
		}
	}
	for _, r := range p.recommends {
		if err := meta.Recommends.Set(r); err != nil {
			return nil, err
		}
	}
	r, err := rpmpack.NewRPM(meta)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		f := rpmpack.RPMFile{Name: "/" + e.path, Body: e.body, Mode: uint(e.mode), Owner: "root", Group: "root", MTime: uint32(b.date.Unix())}
		switch {
		case e.dir && !p.owns(e.path):
			continue // of the distribution
		case e.dir:
			f.Mode |= 0o40000
		case isConfig(e.path):
			f.Type = rpmpack.ConfigFile | rpmpack.NoReplaceFile
		case strings.HasPrefix(e.path, p.doc()+"/licences/"):
			f.Type = rpmpack.LicenceFile
		case strings.HasPrefix(e.path, "usr/share/doc/"), strings.HasPrefix(e.path, "usr/share/man/"):
			f.Type = rpmpack.DocFile
		}
		r.AddFile(f)
	}
	if len(p.units) > 0 {
		p.addRPMScripts(r)
	}
	var out bytes.Buffer
	err = r.Write(&out)
	return out.Bytes(), err
}

// addRPMScripts adds scripts that do the same as those of Debian. RPM has no
// purge: a removal takes the state away, and changed configuration stays.
func (p *pkg) addRPMScripts(r *rpmpack.RPM) {
	const live = "[ -d /run/systemd/system ] || exit 0\n"
	r.AddPostin(live + "systemctl daemon-reload || :\n[ \"$1\" -lt 2 ] || systemctl try-restart " + strings.Join(p.units, " ") + " || :\n")
	r.AddPreun("[ \"$1\" -eq 0 ] || exit 0\nif command -v systemctl >/dev/null; then systemctl disable " + p.allUnits() + " || :; fi\n" +
		live + "systemctl stop " + p.allUnits() + " || :\n")
	r.AddPostun("if [ \"$1\" -eq 0 ]; then\n\trm -rf " + strings.Join(p.state, " ") + "\n\trmdir " + strings.Join(commonFolders, " ") + " 2>/dev/null || :\nfi\n" +
		live + "systemctl daemon-reload || :\n")
}
