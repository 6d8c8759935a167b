package main

import (
	"bytes"
	"compress/gzip"
	"crypto/md5"
	"fmt"
	"path"
	"slices"
	"strings"
)

// debPackage returns the package in the format of deb(5).
func (b *packageBuild) debPackage(p *packageSpec, files []fileEntry, arch string) ([]byte, error) {
	own, err := b.debFiles(p)
	if err != nil {
		return nil, err
	}
	entries := withFolders(append(slices.Clone(files), own...), p.folders...)
	control, err := tarOf(withFolders(b.debControl(p, entries, arch)), "./", b.date)
	if err != nil {
		return nil, err
	}
	data, err := tarOf(entries, "./", b.date)
	if err != nil {
		return nil, err
	}
	if control, err = gzipBytes(control, bulk); err != nil {
		return nil, err
	}
	if data, err = gzipBytes(data, bulk); err != nil {
		return nil, err
	}
	return arArchive([]arMember{{"debian-binary", []byte("2.0\n")}, {"control.tar.gz", control}, {"data.tar.gz", data}}, b.date), nil
}

// debFiles are files for Debian alone: a change log, and overrides for lintian.
func (b *packageBuild) debFiles(p *packageSpec) ([]fileEntry, error) {
	log, err := gzipBytes(fmt.Appendf(nil, "%s (%s) unstable; urgency=medium\n\n  * Release %s.\n\n -- %s  %s\n",
		p.name, b.version, b.version, maintainer, b.date.Format("Mon, 02 Jan 2006 15:04:05 -0700")), gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	files := []fileEntry{regularFile(path.Join(p.docFolder(), "changelog.gz"), log)}
	if len(p.overrides) > 0 {
		var text strings.Builder
		for _, o := range p.overrides {
			tag, reason, _ := strings.Cut(o, ": ")
			fmt.Fprintf(&text, "# %s\n%s: %s\n", reason, p.name, tag)
		}
		files = append(files, regularFile("usr/share/lintian/overrides/"+p.name, []byte(text.String())))
	}
	return files, nil
}

// debControl are the files that dpkg reads.
func (b *packageBuild) debControl(p *packageSpec, entries []fileEntry, arch string) []fileEntry {
	var sums, conffiles bytes.Buffer
	size := 0
	for _, e := range entries {
		if e.dir {
			size += 1024
			continue
		}
		size += (len(e.body) + 1023) &^ 1023
		fmt.Fprintf(&sums, "%x  %s\n", md5.Sum(e.body), e.path)
		if isConfig(e.path) {
			fmt.Fprintf(&conffiles, "/%s\n", e.path)
		}
	}
	control := []fileEntry{regularFile("control", []byte(b.debText(p, size/1024, arch))), regularFile("md5sums", sums.Bytes())}
	if conffiles.Len() > 0 {
		control = append(control, regularFile("conffiles", conffiles.Bytes()))
	}
	if len(p.units) > 0 {
		for name, text := range p.debScripts() {
			control = append(control, fileEntry{path: name, mode: 0o755, body: []byte(text)})
		}
	}
	return control
}

func (b *packageBuild) debText(p *packageSpec, kib int, arch string) string {
	var c strings.Builder
	line := func(key string, values ...string) {
		if text := strings.Join(values, ", "); text != "" {
			fmt.Fprintf(&c, "%s: %s\n", key, text)
		}
	}
	line("Package", p.name)
	if p.name != packages[0].name {
		line("Source", packages[0].name)
	}
	line("Version", b.version)
	line("Architecture", arch)
	line("Maintainer", maintainer)
	line("Installed-Size", fmt.Sprint(kib))
	var needs []string
	for _, r := range p.requires {
		needs = append(needs, fmt.Sprintf("%s (= %s)", r, b.version))
	}
	line("Depends", needs...)
	line("Recommends", p.recommends...)
	line("Suggests", p.suggests...)
	section := p.section
	if section == "" {
		section = "admin"
	}
	line("Section", section)
	line("Priority", "optional")
	line("Homepage", "https://"+strings.TrimSuffix(ours, "/"))
	line("Description", p.short)
	c.WriteString(" " + strings.ReplaceAll(p.long, "\n", "\n ") + "\n")
	return c.String()
}

// live is true where a service manager runs the system that is installed to.
const live = `[ -z "$DPKG_ROOT" ] && [ -d /run/systemd/system ]`

// debScripts are those of the maintainer. They start and enable nothing that the
// administrator has not. Links of enabled units are remembered until the purge, by
// deb-systemd-helper. Services of an upgraded package are started again;
// policy-rc.d is asked, by deb-systemd-invoke. A removal that is refused has stopped
// nothing.
func (p *packageSpec) debScripts() map[string]string {
	return map[string]string{
		"postinst": `#!/bin/sh
set -e
if [ "$1" = configure ]; then
	for unit in ` + p.allUnits() + `; do
		deb-systemd-helper update-state $unit >/dev/null || true
	done
	if ` + live + `; then
		systemctl --system daemon-reload >/dev/null || true
		[ -z "$2" ] || deb-systemd-invoke try-restart ` + strings.Join(p.units, " ") + ` >/dev/null || true
	fi
fi
`,
		"prerm": `#!/bin/sh
set -e
if [ "$1" = remove ] && ` + live + `; then
` + p.unusedCheck() + `	deb-systemd-invoke stop ` + p.allUnits() + ` >/dev/null || true
fi
`,
		"postrm": `#!/bin/sh
set -e
if [ "$1" = purge ]; then
	for unit in ` + p.allUnits() + `; do
		deb-systemd-helper purge $unit >/dev/null || true
	done
	rm -rf ` + inRoot(slices.Concat(p.config, p.state)) + `
	for dir in ` + strings.Join(commonFolders, " ") + `; do
		rmdir "$DPKG_ROOT$dir" 2>/dev/null || true
	done
fi
if ` + live + `; then
	systemctl --system daemon-reload >/dev/null || true
fi
`,
	}
}

func inRoot(paths []string) string {
	var out []string
	for _, p := range paths {
		out = append(out, `"$DPKG_ROOT"`+p)
	}
	return strings.Join(out, " ")
}
