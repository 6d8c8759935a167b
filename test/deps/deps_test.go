package deps

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
)

const prefix = "github.com/rnbd-go/rnbd/"

// rule forbids imports, directly and in non-test code, for packages with a
// path below the prefix that matches from.
type rule struct {
	from   string // regexp
	forbid string // regexp on the whole import path
	except string // regexp; empty: none
	reason string
}

var rules = []rule{
	{`^modules/rtrs`, prefix + `(modules/rnbd-|plugins/|cmd/|test/)`, ``,
		"RTRS is a transport of its own: usable without RNBD, released before it"},
	{`^modules/rtrs$`, prefix + `modules/rtrs/provider/`, ``,
		"the engine is handed a verbs.Device; a fabric it knows by name could not be replaced"},
	{`^modules/rtrs/provider/`, prefix + `modules/rtrs(/rtrswire|/provider/.*)?$`, ``,
		"a provider carries bytes: it knows neither RTRS nor another provider"},
	{`^modules/rtrs/rtrswire$`, `\.`, ``,
		"the wire format is a leaf: standard library only"},
	{`^modules/rnbd-sdk/(rnbdwire|nbdwire|blk|plot|extents)$`, `\.`, prefix + `modules/rnbd-sdk/extents$`,
		"wire formats, vocabulary and pictures are leaves: standard library only"},
	{`^modules/rnbd-sdk`, prefix + `(modules/(rtrs|rnbd-server|rnbd-client)|plugins/|cmd/|test/)`, ``,
		"plugins compile against the SDK without the transport and without a daemon"},
	{`^modules/rnbd-sdk/(shm|pump|uring|blk|blockdev|diskio|latency|rnbdwire)`, `google\.golang\.org/grpc|hashicorp/go-plugin`, ``,
		"gRPC is control: it never comes near the data path"},
	{`^modules/rnbd-server`, prefix + `(modules/rnbd-client|plugins/|cmd/|test/|modules/rtrs/provider/)`, ``,
		"the two daemons meet on the wire, and are handed their fabrics"},
	{`^modules/rnbd-client`, prefix + `(modules/rnbd-server|plugins/|cmd/|test/|modules/rtrs/provider/)`, ``,
		"the two daemons meet on the wire, and are handed their fabrics"},
	{`^modules/ipoib`, prefix, prefix + `modules/(ipoib|rtrs/verbs$)`,
		"IPoIB is a network of its own: it is handed a fabric, and knows no block devices"},
	{`^cmd/rnbd$`, prefix + `modules/(ipoib|bond)`, ``,
		"the network that sessions run on is a program of its own: rnbd does not grow by it"},
	{`^modules/ipoib/(wire|neigh|mcast|path|gso|ether)$`, `\.`, prefix + `modules/ipoib/(wire|neigh|mcast|path)$`,
		"formats and tables are pure: standard library only, no I/O"},
	{`^modules/bond`, prefix, prefix + `modules/bond/`,
		"bonding knows no particular device: what can be enslaved implements its interface"},
	{`^modules/bond/(core|frame|announce)$`, `\.`, prefix + `modules/bond/(core|frame)$`,
		"the state machine and the frames of a bond are pure: standard library only"},
	{`^(plugins|examples)/`, prefix, prefix + `modules/rnbd-sdk/(plugin|shm|pump|uring|blk|blockdev|diskio|extents|nbdwire|selfstats|access|sockpair|tally)`,
		"a plugin sees the SDK and nothing else, as those of third parties do"},
	{`^modules/`, `spf13/|charmbracelet|mpb`, ``,
		"libraries do not draw in the command line's dependencies"},
	{`^(modules|plugins|examples)/`, `^github\.com/prometheus/`, ``,
		"the command shows metrics; libraries tell what they count by the control API, whoever asks"},
	{`.*`, prefix + `test/`, ``,
		"nothing that is released depends on tests"},
	{`.*`, prefix + `modules/(rtrs/verbs/verbstest|rnbd-sdk/plugin/plugintest|rnbd-sdk/sdktest)`, ``,
		"test suites are imported by tests only"},
	{`.*`, `^C$`, ``,
		"all but one fabric builds with CGO_ENABLED=0"},
}

// cgoPackage alone may use cgo.
const cgoPackage = "modules/rtrs/provider/ibverbs"

// released are the modules that the rules are about.
var released = []string{
	"modules/rtrs", "modules/rnbd-sdk", "modules/rnbd-server", "modules/rnbd-client", "modules/ipoib", "modules/bond",
	"plugins/io-blockio", "plugins/io-fileio", "plugins/io-nbd", "plugins/io-rbd", "plugins/frontend-nbd", "plugins/frontend-ublk", "plugins/frontend-fuse", "cmd/rnbd", "cmd/rnbd-net", "examples/io-memory",
}

func root() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Dir(filepath.Dir(filepath.Dir(file)))
}

// packages maps each package of a module to its direct imports.
func packages(t *testing.T, module string) map[string][]string {
	t.Helper()
	cmd := exec.Command("go", "list", "-f", "{{.ImportPath}} {{join .Imports \" \"}}", "./...")
	cmd.Dir = filepath.Join(root(), module)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=1", "GOFLAGS=-tags=ibverbs") // with all optional parts
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list in %s: %v", module, err)
	}
	pkgs := map[string][]string{}
	for _, l := range strings.Split(strings.TrimSpace(string(out)), "\n") {
		f := strings.Fields(l)
		pkgs[strings.TrimPrefix(f[0], prefix)] = f[1:]
	}
	return pkgs
}

func TestImportRules(t *testing.T) {
	used := make([]bool, len(rules))
	for _, module := range released {
		for pkg, imports := range packages(t, module) {
			for i, r := range rules {
				if !regexp.MustCompile(r.from).MatchString(pkg) {
					continue
				}
				used[i] = true
				for _, imp := range imports {
					if r.breaks(imp) && !isOwnTestSuite(pkg, imp) && (imp != "C" || pkg != cgoPackage) {
						t.Errorf("%s imports %s: forbidden, because %s", pkg, imp, r.reason)
					}
				}
			}
		}
	}
	for i, r := range rules {
		if !used[i] {
			t.Errorf("the rule for %s applies to no package: %s", r.from, r.reason)
		}
	}
}

func (r rule) breaks(imp string) bool {
	if !regexp.MustCompile(r.forbid).MatchString(imp) {
		return false
	}
	return r.except == "" || !regexp.MustCompile(r.except).MatchString(imp)
}

// isOwnTestSuite: a suite may be made of several packages.
func isOwnTestSuite(pkg, imp string) bool {
	return strings.HasPrefix(prefix+pkg, filepath.Dir(imp)) && strings.Contains(pkg, "test")
}

func TestCommandsKnowTheControlAPIOnly(t *testing.T) {
	// bench_server, doctor_server, doctor_keys and discover are clients of their own: they ask a server without
	// a daemon. The files daemon_* and mapping are of the daemons: those keep the mappings of their
	// configuration. daemon_admin and daemons_remote are the two ends of the control API's TLS.
	mayKnowDaemons := regexp.MustCompile(`^(server_run|client_run|providers|daemon|daemon_run|daemon_reload|daemon_upgrade_server|daemon_upgrade_client|daemon_routes|daemon_tls|daemon_nbd|daemon_admin|daemons_remote|mapping|bench_server|doctor_server|doctor_keys|discover)\.go$`)
	files, err := filepath.Glob(filepath.Join(root(), "cmd/rnbd/*.go"))
	if err != nil || len(files) == 0 {
		t.Fatal("no files of cmd/rnbd", err)
	}
	below, err := filepath.Glob(filepath.Join(root(), "cmd/rnbd/internal/*/*.go"))
	if err != nil {
		t.Fatal(err)
	}
	files = append(files, below...)
	daemon := regexp.MustCompile(`"` + prefix + `modules/(rnbd-server|rnbd-client|rtrs)`)
	for _, f := range files {
		name := filepath.Base(f)
		if mayKnowDaemons.MatchString(name) || strings.HasSuffix(name, "_test.go") {
			continue
		}
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if m := daemon.Find(text); m != nil {
			t.Errorf("cmd/rnbd/%s imports %s: a command works through the control API, so that it can do what any other client of it can", name, m)
		}
	}
}

func TestNoReplaceInReleasedModules(t *testing.T) {
	for _, module := range released {
		text, err := os.ReadFile(filepath.Join(root(), module, "go.mod"))
		if err != nil {
			t.Fatal(err)
		}
		if regexp.MustCompile(`(?m)^replace`).Match(text) {
			t.Errorf("%s/go.mod has a replace: go install of a released version refuses it", module)
		}
	}
}

func TestEveryPackageSaysWhatItIs(t *testing.T) {
	for _, module := range append([]string{"test"}, released...) {
		cmd := exec.Command("go", "list", "-f", "{{.ImportPath}}|{{.Doc}}", "./...")
		cmd.Dir = filepath.Join(root(), module)
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range strings.Split(strings.TrimSpace(string(out)), "\n") {
			if pkg, doc, _ := strings.Cut(l, "|"); doc == "" && !strings.HasSuffix(pkg, "pb") { // generated code has none
				t.Errorf("%s has no package comment", pkg)
			}
		}
	}
}

// TestMakefile_BuildsWithoutHeaders shows that the fabric ibverbs is asked for
// only where it can be built.
func TestMakefile_BuildsWithoutHeaders(t *testing.T) {
	for _, cc := range []string{"gcc -nostdinc", "no-such-compiler"} {
		cmd := exec.Command("make", "-C", root(), "-pn", "help", "CC="+cc, "CGO_ENABLED=0")
		cmd.Env = []string{"PATH=" + os.Getenv("PATH")} // a make that runs this test prints these findings itself
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("make: %v: %s", err, out)
		}
		if !strings.Contains(string(out), "\nCGO_RNBD := 0\n") || strings.Contains(string(out), "-tags=ibverbs") {
			t.Errorf("with %q as the compiler, the Makefile wants ibverbs", cc)
		}
	}
}
