package main

import (
	"bytes"
	"strings"

	"github.com/google/rpmpack"
)

// rpmArch are RPM's names of architectures.
var rpmArch = map[string]string{"amd64": "x86_64", "arm64": "aarch64"}

// rpm returns the package in RPM's format.
func (b *build) rpm(p *pkg, entries []entry) ([]byte, error) {
	meta := rpmpack.RPMMetaData{
		Name: p.name, Version: b.version, Release: "1", Arch: rpmArch[b.arch], Summary: p.short, Description: p.long,
		Vendor: maintainer, Licence: "Apache-2.0", Compressor: "gzip", BuildTime: b.date, BuildHost: "localhost", OS: "linux",
	}
	for _, r := range p.requires {
		if err := meta.Requires.Set(r + " = " + b.version + "-1"); err != nil {
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
		case e.dir && !owns(p, e.path):
			continue // of the distribution
		case e.dir:
			f.Mode |= 0o40000
		case isConfig(e.path):
			f.Type = rpmpack.ConfigFile | rpmpack.NoReplaceFile
		}
		r.AddFile(f)
	}
	if len(p.units) > 0 {
		units, all := strings.Join(p.units, " "), strings.Join(append(append([]string{}, p.units...), p.sockets...), " ")
		const manager = "[ -d /run/systemd/system ] || exit 0\n"
		r.AddPostin(manager + "systemctl daemon-reload || :\n[ \"$1\" -lt 2 ] || systemctl try-restart " + units + " || :\n")
		r.AddPreun(manager + "[ \"$1\" -gt 0 ] || systemctl disable --now " + all + " || :\n")
		r.AddPostun(manager + "systemctl daemon-reload || :\n")
	}
	var out bytes.Buffer
	err = r.Write(&out)
	return out.Bytes(), err
}

// owns reports whether a folder belongs to the package alone.
func owns(p *pkg, dir string) bool {
	for _, f := range p.folders {
		if f == dir {
			return true
		}
	}
	return strings.HasPrefix(dir, "usr/share/doc/"+p.name)
}
