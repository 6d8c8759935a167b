package main

import (
	"bytes"
	"strings"

	"github.com/google/rpmpack"
)

// rpmArch are RPM's names of architectures.
var rpmArch = map[string]string{"amd64": "x86_64", "arm64": "aarch64"}

// rpmPackage returns the package in RPM's format.
func (b *packageBuild) rpmPackage(p *packageSpec, entries []fileEntry, arch string) ([]byte, error) {
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
		case e.dir && !p.ownsFolder(e.path):
			continue // of the distribution
		case e.dir:
			f.Mode |= 0o40000
		case isConfig(e.path):
			f.Type = rpmpack.ConfigFile | rpmpack.NoReplaceFile
		case strings.HasPrefix(e.path, p.docFolder()+"/licences/"):
			f.Type = rpmpack.LicenceFile
		case strings.HasPrefix(e.path, "usr/share/doc/"), strings.HasPrefix(e.path, "usr/share/man/"):
			f.Type = rpmpack.DocFile
		}
		r.AddFile(f)
	}
	if preun := p.rpmPreun(); preun != "" {
		r.AddPreun(preun)
	}
	if len(p.units) > 0 {
		p.addRPMScripts(r)
	}
	var out bytes.Buffer
	err = r.Write(&out)
	return out.Bytes(), err
}

// rpmLive ends a script where no service manager runs.
const rpmLive = "[ -d /run/systemd/system ] || exit 0\n"

// addRPMScripts adds scripts that do the same as those of Debian. RPM has no
// purge: a removal takes the state away, and changed configuration stays.
func (p *packageSpec) addRPMScripts(r *rpmpack.RPM) {
	r.AddPostin(rpmLive + "systemctl daemon-reload || :\n[ \"$1\" -lt 2 ] || systemctl try-restart " + strings.Join(p.units, " ") + " || :\n")
	r.AddPostun("if [ \"$1\" -eq 0 ]; then\n\trm -rf " + strings.Join(p.state, " ") + "\n\trmdir " + strings.Join(commonFolders, " ") + " 2>/dev/null || :\nfi\n" +
		rpmLive + "systemctl daemon-reload || :\n")
}

// rpmPreun is the script of an erasure; empty for none. RPM erases the others of
// several packages when one is refused, so each package that the client needs
// refuses it.
func (p *packageSpec) rpmPreun() string {
	var script strings.Builder
	if p.serves {
		script.WriteString("if [ -d /run/systemd/system ]; then\n" + p.unusedCheck() + "fi\n")
	}
	if len(p.units) > 0 {
		script.WriteString("if command -v systemctl >/dev/null; then systemctl disable " + p.allUnits() + " || :; fi\n" +
			rpmLive + "systemctl stop " + p.allUnits() + " || :\n")
	}
	if script.Len() == 0 {
		return ""
	}
	return "[ \"$1\" -eq 0 ] || exit 0\n" + script.String()
}
