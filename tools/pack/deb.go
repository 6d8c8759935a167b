package main

import (
	"bytes"
	"crypto/md5"
	"fmt"
	"strings"
)

// deb returns the package in the format of deb(5).
func (b *build) deb(p *pkg, entries []entry) ([]byte, error) {
	var sums, conffiles bytes.Buffer
	size := 0
	for _, e := range entries {
		if e.dir {
			continue
		}
		size += len(e.body)
		fmt.Fprintf(&sums, "%x  %s\n", md5.Sum(e.body), e.path)
		if isConfig(e.path) {
			fmt.Fprintf(&conffiles, "/%s\n", e.path)
		}
	}
	control := []entry{{path: "control", mode: 0o644, body: []byte(b.debControl(p, size))}, {path: "md5sums", mode: 0o644, body: sums.Bytes()}}
	if conffiles.Len() > 0 {
		control = append(control, entry{path: "conffiles", mode: 0o644, body: conffiles.Bytes()})
	}
	if len(p.units) > 0 {
		for name, text := range p.scripts() {
			control = append(control, entry{path: name, mode: 0o755, body: []byte(text)})
		}
	}
	members := []arMember{{"debian-binary", []byte("2.0\n")}}
	for name, part := range map[string][]entry{"control.tar.gz": withFolders(control, nil), "data.tar.gz": entries} {
		archive, err := tarOf(part, "./", b.date)
		if err != nil {
			return nil, err
		}
		if archive, err = zip(archive); err != nil {
			return nil, err
		}
		members = append(members, arMember{name, archive})
	}
	if members[1].name != "control.tar.gz" { // the order of a map is none
		members[1], members[2] = members[2], members[1]
	}
	return ar(members, b.date.Unix()), nil
}

func (b *build) debControl(p *pkg, size int) string {
	var c strings.Builder
	fmt.Fprintf(&c, "Package: %s\nVersion: %s\nArchitecture: %s\nMaintainer: %s\nInstalled-Size: %d\n", p.name, b.version, b.arch, maintainer, (size+1023)/1024)
	if len(p.requires) > 0 {
		var list []string
		for _, r := range p.requires {
			list = append(list, fmt.Sprintf("%s (= %s)", r, b.version))
		}
		fmt.Fprintf(&c, "Depends: %s\n", strings.Join(list, ", "))
	}
	fmt.Fprintf(&c, "Section: admin\nPriority: optional\nDescription: %s\n %s\n", p.short, strings.ReplaceAll(p.long, "\n", "\n "))
	return c.String()
}

// live is true where a service manager runs the system that is installed to.
const live = `[ -z "$DPKG_ROOT" ] && [ -d /run/systemd/system ]`

// scripts are those of the maintainer. They start nothing that the
// administrator has not enabled.
func (p *pkg) scripts() map[string]string {
	units, all := strings.Join(p.units, " "), strings.Join(append(append([]string{}, p.units...), p.sockets...), " ")
	return map[string]string{
		"postinst": "#!/bin/sh\nset -e\nif [ \"$1\" = configure ] && " + live + "; then\n\tsystemctl daemon-reload\n\t[ -z \"$2\" ] || systemctl try-restart " + units + " || true\nfi\n",
		"prerm":    "#!/bin/sh\nset -e\nif [ \"$1\" = remove ] && " + live + "; then\n\tsystemctl disable --now " + all + " || true\nfi\n",
		"postrm": "#!/bin/sh\nset -e\nif [ \"$1\" = purge ]; then\n\trm -rf " + inRoot(p.remains) + "\n\trmdir \"$DPKG_ROOT/etc/rnbd\" 2>/dev/null || true\nfi\nif " +
			live + "; then\n\tsystemctl daemon-reload || true\nfi\n",
	}
}

func inRoot(paths []string) string {
	var out []string
	for _, p := range paths {
		out = append(out, `"$DPKG_ROOT`+p+`"`)
	}
	return strings.Join(out, " ")
}

type arMember struct {
	name string
	body []byte
}

// ar returns an archive in the format of ar(5).
func ar(members []arMember, date int64) []byte {
	var b bytes.Buffer
	b.WriteString("!<arch>\n")
	for _, m := range members {
		fmt.Fprintf(&b, "%-16s%-12d%-6d%-6d%-8s%-10d`\n", m.name, date, 0, 0, "100644", len(m.body))
		b.Write(m.body)
		if len(m.body)%2 == 1 {
			b.WriteByte('\n')
		}
	}
	return b.Bytes()
}
