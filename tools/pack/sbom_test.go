package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// readBill decodes a bill of materials.
func readBill(t *testing.T, text []byte) *cdx.BOM {
	t.Helper()
	bom := new(cdx.BOM)
	if err := cdx.NewBOMDecoder(bytes.NewReader(text), cdx.BOMFileFormatJSON).Decode(bom); err != nil {
		t.Fatal(err)
	}
	return bom
}

// licencesOf are the identifiers and names of licences of a component.
func licencesOf(c cdx.Component) (ids []string) {
	if c.Licenses != nil {
		for _, l := range *c.Licenses {
			ids = append(ids, l.License.ID+l.License.Name)
		}
	}
	return ids
}

// Packages and image have a bill of materials for each program, and so have the
// programs outside of packages.
func TestBillsOfMaterials(t *testing.T) {
	need(t, "dpkg-deb")
	root, programs := t.TempDir(), filepath.Join(t.TempDir(), "programs")
	b := &packageBuild{version: "1.2.3", arch: "amd64", date: when, programs: programs}
	out := t.TempDir()
	if err := b.run(stage(t), source(t), out); err != nil {
		t.Fatal(err)
	}
	run(t, "dpkg-deb", "-x", filepath.Join(out, "rnbd_1.2.3_amd64.deb"), root)
	text, err := os.ReadFile(filepath.Join(root, "usr/share/doc/rnbd/sbom/rnbd.cdx.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"rnbd", "rnbd-net", "io-fileio"} {
		program, err := os.ReadFile(filepath.Join(programs, name))
		if err != nil {
			t.Fatal(err)
		}
		outside, err := os.ReadFile(filepath.Join(programs, name+sbomSuffix))
		if err != nil {
			t.Fatal(err)
		}
		if name == "rnbd" && !bytes.Equal(outside, text) {
			t.Error("the package has another bill of materials than the program outside")
		}
		checkBill(t, name, program, outside)
	}
	f, err := os.Open(filepath.Join(out, "rnbd_1.2.3_amd64.oci.tar"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	blobs, _ := tarFiles(t, f)
	found := false
	for _, blob := range blobs {
		if len(blob) > 2 && blob[0] == 0x1f && blob[1] == 0x8b {
			_, in := tarFiles(t, bytes.NewReader(unzip(t, blob)))
			found = found || in["usr/share/doc/rnbd/sbom/rnbd.cdx.json"] != nil && in["usr/share/doc/rnbd-plugins/sbom/io-fileio.cdx.json"] != nil
		}
	}
	if !found {
		t.Error("the image has no bills of materials")
	}
}

var serial = regexp.MustCompile(`^urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)

// checkBill compares a bill of materials with testdata/program.
func checkBill(t *testing.T, name string, program, text []byte) {
	t.Helper()
	bom := readBill(t, text)
	if bom.BOMFormat != "CycloneDX" || bom.SpecVersion != cdx.SpecVersion1_5 || !serial.MatchString(bom.SerialNumber) {
		t.Errorf("%s %v, serial number %s", bom.BOMFormat, bom.SpecVersion, bom.SerialNumber)
	}
	main := bom.Metadata.Component
	if main.Name != name || main.Version != "1.2.3" || bom.Metadata.Timestamp != "2023-11-14T22:13:20Z" || main.Hashes == nil ||
		(*main.Hashes)[0].Value != fmt.Sprintf("%x", sha256.Sum256(program)) {
		t.Errorf("%s: %+v of %s", name, main, bom.Metadata.Timestamp)
	}
	parts := map[string]cdx.Component{}
	for _, c := range *bom.Components {
		parts[c.Name] = c
	}
	std := parts["stdlib"]
	if "go"+std.Version != strings.Fields(runtime.Version())[0] || fmt.Sprint(licencesOf(std)) != "[BSD-3-Clause]" {
		t.Errorf("the standard library is %+v, %v", std, licencesOf(std))
	}
	mod := parts["golang.org/x/mod"]
	if !strings.HasPrefix(mod.PackageURL, "pkg:golang/golang.org/x/mod@v0.") || fmt.Sprint(licencesOf(mod)) != "[BSD-3-Clause]" {
		t.Errorf("a module is %+v, %v", mod, licencesOf(mod))
	}
	if len(parts) != 2 || len(*(*bom.Dependencies)[0].Dependencies) != 2 {
		t.Errorf("%d parts, dependencies %+v", len(parts), *bom.Dependencies)
	}
	var all map[string]any // no field that depends on the machine
	if err := json.Unmarshal(text, &all); err != nil {
		t.Fatal(err)
	}
	if home, err := os.UserHomeDir(); err == nil && bytes.Contains(text, []byte(home)) {
		t.Errorf("it names the folder %s", home)
	}
}

func TestLicencesThatAreNotRecognised(t *testing.T) {
	if got := (*licencesIn([]fileEntry{regularFile("LICENSE", []byte("Do what you like on Sundays."))}))[0].License; got.Name != unknownLicence || got.ID != "" {
		t.Errorf("%+v", got)
	}
}
