package main

import (
	"bytes"
	"crypto/sha256"
	"debug/buildinfo"
	"fmt"
	"path"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/google/licensecheck"
)

// sbomSuffix ends the name of a bill of materials behind that of the program.
const sbomSuffix = ".cdx.json"

// billOfMaterials returns the bill of materials of a program as JSON of CycloneDX 1.5: the
// modules that the program's own build information names, with their licences,
// and the standard library of Go. The same program gives the same bytes: the time
// is that of the build, and the serial number is derived from the contents.
func (b *packageBuild) billOfMaterials(program fileEntry) ([]byte, error) {
	info, err := buildinfo.Read(bytes.NewReader(program.body))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", program.path, err)
	}
	main := b.moduleComponent(cdx.ComponentTypeApplication, info.Main.Path, "v"+b.version)
	main.Name, main.Version = path.Base(program.path), b.version
	main.Licenses = licenceIDs("Apache-2.0")
	main.Hashes = &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: fmt.Sprintf("%x", sha256.Sum256(program.body))}}
	main.Properties = buildProperties(info)
	parts, err := b.linkedModules(info)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", program.path, err)
	}
	var refs []string
	for _, c := range parts {
		refs = append(refs, c.BOMRef)
	}
	bom := cdx.NewBOM()
	bom.Metadata = &cdx.Metadata{
		Timestamp: b.date.Format(time.RFC3339),
		Supplier:  &cdx.OrganizationalEntity{Name: strings.TrimSpace(maintainer[:strings.Index(maintainer, "<")])},
		Component: &main,
	}
	bom.Components, bom.Dependencies = &parts, &[]cdx.Dependency{{Ref: main.BOMRef, Dependencies: &refs}}
	text, err := encodeSBOM(bom)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(text)
	sum[6], sum[8] = sum[6]&0x0f|0x80, sum[8]&0x3f|0x80 // a UUID of version 8 (RFC 9562, section 5.8)
	bom.SerialNumber = fmt.Sprintf("urn:uuid:%x-%x-%x-%x-%x", sum[:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16])
	return encodeSBOM(bom)
}

func encodeSBOM(bom *cdx.BOM) ([]byte, error) {
	var out bytes.Buffer
	err := cdx.NewBOMEncoder(&out, cdx.BOMFileFormatJSON).SetPretty(true).EncodeVersion(bom, cdx.SpecVersion1_5)
	return out.Bytes(), err
}

// linkedModules are the modules that a program is linked with, sorted by name, and
// the standard library.
func (b *packageBuild) linkedModules(info *debug.BuildInfo) (parts []cdx.Component, err error) {
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		if strings.HasPrefix(m.Path, ours) { // released with this program, from the same commit
			c := b.moduleComponent(cdx.ComponentTypeLibrary, m.Path, "v"+b.version)
			c.Licenses = licenceIDs("Apache-2.0")
			parts = append(parts, c)
			continue
		}
		texts, err := b.licences.moduleTexts(m.Path, m.Version)
		if err != nil {
			return nil, err
		}
		c := b.moduleComponent(cdx.ComponentTypeLibrary, m.Path, m.Version)
		c.Licenses = licencesIn(texts)
		c.Properties = &[]cdx.Property{{Name: "go.sum", Value: m.Sum}}
		parts = append(parts, c)
	}
	texts, err := readLicences(b.licences.goroot)
	if err != nil {
		return nil, err
	}
	std := b.moduleComponent(cdx.ComponentTypeLibrary, "stdlib", strings.TrimPrefix(info.GoVersion, "go"))
	std.Licenses = licencesIn(texts)
	parts = append(parts, std)
	slices.SortFunc(parts, func(x, y cdx.Component) int { return strings.Compare(x.Name, y.Name) })
	return parts, nil
}

// moduleComponent is a Go module. Its package URL is its reference, too.
func (b *packageBuild) moduleComponent(kind cdx.ComponentType, name, version string) cdx.Component {
	url := "pkg:golang/" + name + "@" + strings.ReplaceAll(version, "+", "%2B")
	return cdx.Component{BOMRef: url, Type: kind, Name: name, Version: version, PackageURL: url}
}

// buildProperties are the settings that the program was built with.
func buildProperties(info *debug.BuildInfo) *[]cdx.Property {
	list := []cdx.Property{{Name: "go.version", Value: info.GoVersion}}
	for _, s := range info.Settings {
		if strings.HasPrefix(s.Key, "GO") || s.Key == "CGO_ENABLED" {
			list = append(list, cdx.Property{Name: "go." + s.Key, Value: s.Value})
		}
	}
	return &list
}

func licenceIDs(ids ...string) *cdx.Licenses {
	var list cdx.Licenses
	for _, id := range ids {
		list = append(list, cdx.LicenseChoice{License: &cdx.License{ID: id}})
	}
	return &list
}

// unknownLicence stands in place of the identifier of a text that is not recognised.
const unknownLicence = "not recognised"

// licencesIn returns the SPDX identifiers of the texts. Notices and grants of
// patents add to a licence, and are none.
func licencesIn(texts []fileEntry) *cdx.Licenses {
	var ids []string
	for _, t := range texts {
		stem, _, _ := strings.Cut(strings.ToUpper(t.path), ".")
		if stem == "NOTICE" || stem == "PATENTS" {
			continue
		}
		for _, m := range licensecheck.Scan(t.body).Match {
			if !m.IsURL && !slices.Contains(ids, m.ID) {
				ids = append(ids, m.ID)
			}
		}
	}
	if len(ids) == 0 {
		return &cdx.Licenses{{License: &cdx.License{Name: unknownLicence}}}
	}
	slices.Sort(ids)
	return licenceIDs(ids...)
}
