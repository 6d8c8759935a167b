package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

var when = time.Unix(1_700_000_000, 0).UTC()

// stage is a folder as make install fills it, with a small program for all.
func stage(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	program, err := os.ReadFile(filepath.Join(folder, "program"))
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{
		"usr/share/man/man7/rnbd.7": ".TH rnbd\n", "usr/share/man/man8/rnbd-net-run.8": ".TH rnbd-net\n", "usr/share/man/man8/rnbd-list.8": ".TH rnbd-list\n",
		"usr/share/bash-completion/completions/rnbd": "complete\n", "usr/share/rnbd/plugin.proto": "syntax\n",
		"usr/lib/systemd/system/rnbd-server.service": "[Service]\n", "usr/lib/systemd/system/rnbd-client.service": "[Service]\n",
		"usr/lib/udev/rules.d/65-rnbd.rules": "# rule\n", "etc/rnbd/server.yaml": "listen:\n", "etc/rnbd/client.yaml": "loss: fail\n",
	}
	for _, p := range []string{"rnbd", "rnbd-net", "io-fileio"} {
		write(t, filepath.Join(dir, "usr/bin", p), program, 0o700)
	}
	for name, body := range files {
		write(t, filepath.Join(dir, name), []byte(body), 0o600)
	}
	return dir
}

func write(t *testing.T, path string, body []byte, mode os.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, body, mode); err != nil {
		t.Fatal(err)
	}
}

// source is a repository as far as packages have something of it.
func source(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "LICENSE"), []byte("our licence\n"), 0o600)
	write(t, filepath.Join(dir, "docs/use/operations.md"), []byte("# Operations\n"), 0o600)
	return dir
}

// pack makes version 1.2.3 into dir.
func pack(t *testing.T, dir string) {
	t.Helper()
	b := &packageBuild{version: "1.2.3", arch: "amd64", date: when}
	if err := b.run(stage(t), source(t), dir); err != nil {
		t.Fatal(err)
	}
}

var (
	once   sync.Once
	folder string // of TestMain
)

// packed returns a folder with version 1.2.3, the same for all tests.
func packed(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(folder, "packages")
	once.Do(func() {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		pack(t, dir)
	})
	return dir
}

func TestMain(m *testing.M) {
	var err error
	if folder, err = os.MkdirTemp("", "rnbd-pack-"); err != nil {
		panic(err)
	}
	code := 1
	build := exec.Command("go", "build", "-ldflags=-s -w", "-o", folder, "./testdata/program")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "%v: %v\n%s", build, err, out)
	} else {
		code = m.Run()
	}
	os.RemoveAll(folder)
	os.Exit(code)
}

// need skips the test where a program is missing. In CI that is a failure.
func need(t *testing.T, program string) {
	t.Helper()
	if _, err := exec.LookPath(program); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatalf("CI must have %s", program)
		}
		t.Skipf("%s is not installed", program)
	}
}

func run(t *testing.T, argv ...string) string {
	t.Helper()
	var out, log bytes.Buffer
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr = &out, &log
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s: %v\n%s%s", strings.Join(argv, " "), err, out.String(), log.String())
	}
	return out.String()
}

// sums are the hashes of the files of a folder.
func sums(t *testing.T, dir string) map[string]string {
	t.Helper()
	all, err := readTree(dir, "")
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, f := range all {
		out[f.path] = fmt.Sprintf("%x", sha256.Sum256(f.body))
	}
	return out
}

func TestTheSameInputGivesTheSameBytes(t *testing.T) {
	other := t.TempDir()
	pack(t, other)
	first, second := sums(t, packed(t)), sums(t, other)
	if !maps.Equal(first, second) {
		t.Errorf("%v\n%v", first, second)
	}
	if want := 2*len(packages) + 1; len(first) != want {
		t.Errorf("%d files, want %d: %v", len(first), want, first)
	}
}

func TestDebIsReadByDpkg(t *testing.T) {
	need(t, "dpkg-deb")
	out := packed(t)
	for i := range packages {
		p := &packages[i]
		t.Run(p.name, func(t *testing.T) {
			arch := "amd64"
			if p.noArch {
				arch = "all"
			}
			deb := filepath.Join(out, fmt.Sprintf("%s_1.2.3_%s.deb", p.name, arch))
			if got := run(t, "dpkg-deb", "--showformat=${Package} ${Version} ${Architecture}", "-W", deb); got != p.name+" 1.2.3 "+arch {
				t.Errorf("dpkg-deb shows %q", got)
			}
			root, control := t.TempDir(), t.TempDir()
			run(t, "dpkg-deb", "-x", deb, root)
			run(t, "dpkg-deb", "-e", deb, control)
			checkSums(t, root, control)
			checkConffiles(t, root, control)
			checkScripts(t, p, control)
			for _, name := range []string{"copyright", "changelog.gz", "licences/rnbd/LICENSE"} {
				if st, err := os.Stat(filepath.Join(root, p.docFolder(), name)); err != nil || st.Size() == 0 || st.Mode() != 0o644 || !st.ModTime().Equal(when) {
					t.Errorf("%s: %v, %+v", name, err, st)
				}
			}
		})
	}
}

// checkSums compares the files of the package with its list.
func checkSums(t *testing.T, root, control string) {
	t.Helper()
	list, err := filepath.Abs(filepath.Join(control, "md5sums"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("md5sum", "--quiet", "--strict", "-c", list)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("md5sums: %v\n%s", err, out)
	}
	text, err := os.ReadFile(list)
	if err != nil {
		t.Fatal(err)
	}
	if files := sums(t, root); len(files) != strings.Count(string(text), "\n") {
		t.Errorf("%d files, and %d sums", len(files), strings.Count(string(text), "\n"))
	}
}

// checkConffiles wants every file below etc, and no other, to be kept for users.
func checkConffiles(t *testing.T, root, control string) {
	t.Helper()
	var want []string
	for name := range sums(t, root) {
		if strings.HasPrefix(name, "etc/") {
			want = append(want, "/"+name)
		}
	}
	text, err := os.ReadFile(filepath.Join(control, "conffiles"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	if got := strings.Fields(string(text)); !slices.Equal(got, want) {
		t.Errorf("conffiles %q, want %q", got, want)
	}
}

// checkScripts has the shell read the scripts of packages with units; others have
// none.
func checkScripts(t *testing.T, p *packageSpec, control string) {
	t.Helper()
	for _, name := range []string{"postinst", "prerm", "postrm"} {
		script := filepath.Join(control, name)
		st, err := os.Stat(script)
		if len(p.units) == 0 {
			if err == nil {
				t.Errorf("%s without units", name)
			}
			continue
		}
		if err != nil || st.Mode() != 0o755 {
			t.Errorf("%s: %v, %+v", name, err, st)
			continue
		}
		run(t, "sh", "-n", script)
	}
}

func TestRPMIsReadByRPM(t *testing.T) {
	need(t, "rpm")
	out := packed(t)
	rpm := filepath.Join(out, "rnbd-server-1.2.3-1.noarch.rpm")
	run(t, "rpm", "-K", "--nosignature", rpm)
	if got, want := run(t, "rpm", "-qp", "--nosignature", "--qf", "%{NAME} %{VERSION}-%{RELEASE} %{ARCH} %{LICENSE} %{BUILDTIME}", rpm), fmt.Sprintf("rnbd-server 1.2.3-1 noarch Apache-2.0 %d", when.Unix()); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	for query, want := range map[string]string{
		"-qpl": "/etc/rnbd\n/etc/rnbd/server.d\n/etc/rnbd/server.yaml\n/usr/lib/systemd/system/rnbd-server.service\n/usr/share/doc/rnbd-server\n" +
			"/usr/share/doc/rnbd-server/copyright\n/usr/share/doc/rnbd-server/licences\n/usr/share/doc/rnbd-server/licences/rnbd\n/usr/share/doc/rnbd-server/licences/rnbd/LICENSE\n",
		"-qpc": "/etc/rnbd/server.yaml\n",
		"-qpL": "/usr/share/doc/rnbd-server/licences/rnbd/LICENSE\n",
	} {
		if got := run(t, "rpm", query, "--nosignature", rpm); got != want {
			t.Errorf("%s: %q, want %q", query, got, want)
		}
	}
	if got := run(t, "rpm", "-qpR", "--nosignature", rpm); !strings.Contains(got, "rnbd = 1.2.3-1\n") || !strings.Contains(got, "rnbd-plugins = 1.2.3-1\n") {
		t.Errorf("requires %q", got)
	}
	if got := run(t, "rpm", "-qp", "--nosignature", "--scripts", rpm); !strings.Contains(got, "systemctl try-restart rnbd-server.service") {
		t.Errorf("scripts %q", got)
	}
}

// tarFiles are the files of an archive, by name.
func tarFiles(t *testing.T, r io.Reader) (bodies map[string][]byte, headers map[string]*tar.Header) {
	t.Helper()
	bodies, headers = map[string][]byte{}, map[string]*tar.Header{}
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		if err == io.EOF {
			return bodies, headers
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Uid != 0 || h.Gid != 0 || !h.ModTime.Equal(when) {
			t.Errorf("%s of %d:%d at %v", h.Name, h.Uid, h.Gid, h.ModTime)
		}
		headers[h.Name] = h
		if bodies[h.Name], err = io.ReadAll(in); err != nil {
			t.Fatal(err)
		}
	}
}

type descriptor struct {
	MediaType, Digest string
	Size              int
	Annotations       map[string]string
}

func TestImageIsLaidOutAsTheSpecificationSays(t *testing.T) {
	f, err := os.Open(filepath.Join(packed(t), "rnbd_1.2.3_amd64.oci.tar"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	blobs, _ := tarFiles(t, f)
	if got := string(blobs["oci-layout"]); got != `{"imageLayoutVersion":"1.0.0"}` {
		t.Errorf("oci-layout %q", got)
	}
	blob := func(d descriptor) []byte {
		t.Helper()
		b := blobs["blobs/"+strings.ReplaceAll(d.Digest, ":", "/")]
		if len(b) != d.Size || fmt.Sprintf("sha256:%x", sha256.Sum256(b)) != d.Digest {
			t.Fatalf("%+v: %d bytes with another hash", d, len(b))
		}
		return b
	}
	var index struct{ Manifests []descriptor }
	decode(t, blobs["index.json"], &index)
	if len(index.Manifests) != 1 || index.Manifests[0].Annotations["org.opencontainers.image.ref.name"] != "rnbd:1.2.3" {
		t.Fatalf("index %+v", index)
	}
	var manifest struct {
		Config descriptor
		Layers []descriptor
	}
	decode(t, blob(index.Manifests[0]), &manifest)
	var config struct {
		OS, Architecture string
		Config           struct{ Entrypoint []string }
		Rootfs           struct {
			DiffIDs []string `json:"diff_ids"`
		}
	}
	decode(t, blob(manifest.Config), &config)
	if len(manifest.Layers) != 1 || len(config.Rootfs.DiffIDs) != 1 || config.OS != "linux" || config.Architecture != "amd64" {
		t.Fatalf("%+v, %+v", manifest, config)
	}
	layer := unzip(t, blob(manifest.Layers[0]))
	if got := fmt.Sprintf("sha256:%x", sha256.Sum256(layer)); got != config.Rootfs.DiffIDs[0] {
		t.Errorf("the layer is %s, its configuration says %s", got, config.Rootfs.DiffIDs[0])
	}
	_, in := tarFiles(t, bytes.NewReader(layer))
	for name, mode := range map[string]int64{"usr/bin/rnbd": 0o755, "usr/bin/io-fileio": 0o755, "etc/rnbd/server.yaml": 0o644, "tmp/": 0o1777, "srv/rnbd/": 0o755, "usr/share/doc/rnbd/licences/go/LICENSE": 0o644} {
		if h := in[name]; h == nil || h.Mode != mode {
			t.Errorf("%s: %+v", name, h)
		}
	}
	for name := range in {
		if strings.HasPrefix(name, "usr/lib/") || strings.HasPrefix(name, "usr/share/man") || name == "usr/bin/rnbd-net" {
			t.Errorf("%s is of no use in a container", name)
		}
	}
	if entry := config.Config.Entrypoint; len(entry) != 1 || in[strings.TrimPrefix(entry[0], "/")] == nil {
		t.Errorf("entry point %q is not in the image", entry)
	}
}

func unzip(t *testing.T, b []byte) []byte {
	t.Helper()
	r, err := gzip.NewReader(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	out, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func decode(t *testing.T, b []byte, v any) {
	t.Helper()
	if err := json.Unmarshal(b, v); err != nil {
		t.Fatalf("%v in %s", err, b)
	}
}

func TestWhatIsRefused(t *testing.T) {
	for name, x := range map[string]struct {
		version, arch, extra string
		want                 string
	}{
		"a file of no package":                   {extra: "usr/bin/other", want: "usr/bin/other belongs to 0 packages"},
		"a version that begins a revision":       {version: "1.0-2", want: "version"},
		"no version":                             {version: "-", want: "version"},
		"a version that is the name of a branch": {version: "main", want: "version"},
		"an architecture without packages":       {arch: "mips", want: "architecture"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := stage(t)
			if x.extra != "" {
				write(t, filepath.Join(dir, x.extra), []byte("x"), 0o600)
			}
			b := &packageBuild{version: "1.0", arch: "amd64", date: when}
			if x.version != "" {
				b.version = strings.TrimPrefix(x.version, "-")
			}
			if x.arch != "" {
				b.arch = x.arch
			}
			if err := b.run(dir, source(t), t.TempDir()); err == nil || !strings.Contains(err.Error(), x.want) {
				t.Errorf("error %v, want %q", err, x.want)
			}
		})
	}
}

// Each module that a program is linked with has its licence in the package.
func TestLicencesOfModules(t *testing.T) {
	root := t.TempDir()
	need(t, "dpkg-deb")
	run(t, "dpkg-deb", "-x", filepath.Join(packed(t), "rnbd-net_1.2.3_amd64.deb"), root)
	doc := filepath.Join(root, "usr/share/doc/rnbd-net")
	text, err := os.ReadFile(filepath.Join(doc, "copyright"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"golang.org/x/mod/LICENSE", "golang.org/x/mod/PATENTS", "go/LICENSE"} {
		if !strings.Contains(string(text), "  "+name+"\n") {
			t.Errorf("copyright does not name %s:\n%s", name, text)
		}
		if st, err := os.Stat(filepath.Join(doc, "licences", name)); err != nil || st.Size() == 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := (licenceFinder{cache: t.TempDir(), goroot: root}).moduleTexts("example.org/nothing", "v1.0.0"); err == nil {
		t.Error("a module without a licence is taken")
	}
}

func TestAllUnitsAreStoppedAndForgotten(t *testing.T) {
	for i := range packages {
		p := &packages[i]
		if len(p.units) == 0 {
			continue
		}
		scripts := p.debScripts()
		for _, unit := range slices.Concat(p.units, p.sockets) {
			for _, s := range []string{"prerm", "postrm", "postinst"} {
				if !strings.Contains(scripts[s], unit) {
					t.Errorf("%s of %s leaves %s out", s, p.name, unit)
				}
			}
		}
	}
}
