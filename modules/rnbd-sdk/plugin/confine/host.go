package confine

import (
	"bytes"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/user"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/selfstats"
)

// Files are both ends of a launcher's pipes.
type Files struct {
	Child   []*os.File // its descriptors from profileFD on
	profile *os.File
	report  *os.File
}

// Prepare makes the descriptors of a launcher that executes executable. The file
// stays the caller's. Close or Started must follow.
func Prepare(p *Profile, executable *os.File) (*Files, error) {
	profileR, profileW, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	reportR, reportW, err := os.Pipe()
	if err != nil {
		_, _ = profileR.Close(), profileW.Close()
		return nil, err
	}
	f := &Files{Child: []*os.File{profileR, reportW, executable}, profile: profileW, report: reportR}
	go func() {
		_ = json.NewEncoder(f.profile).Encode(p) // the end of the launcher ends it
		_ = f.profile.Close()
	}()
	return f, nil
}

// Started closes the launcher's ends. It is called when the launcher has them.
func (f *Files) Started() { _, _ = f.Child[0].Close(), f.Child[1].Close() }

// Close gives up. It may follow Started.
func (f *Files) Close() {
	f.Started()
	_ = f.report.Close()
}

// reportSize bounds a report.
const reportSize = 64 << 10

// Report waits until the launcher has executed the plugin or has ended, and returns
// its report.
func (f *Files) Report() (*Report, error) {
	defer f.report.Close()
	b, err := io.ReadAll(io.LimitReader(f.report, reportSize))
	if err != nil {
		return nil, err
	}
	var r Report
	// A launcher that fails after its report sends another one.
	lines := bytes.Split(bytes.TrimSpace(b), []byte("\n"))
	if err := json.Unmarshal(lines[len(lines)-1], &r); err != nil {
		return nil, fmt.Errorf("the launcher reported nothing: %w", err)
	}
	if r.Err != "" {
		return &r, errors.New(r.Err)
	}
	return &r, nil
}

// Runtime returns the paths that the executable needs to run: none for a
// static program, the C library's folders for another, those of interpreters for a
// script.
func Runtime(executable io.ReaderAt) (rules []Rule, script bool) {
	var magic [2]byte
	if n, _ := executable.ReadAt(magic[:], 0); n == 2 && string(magic[:]) == "#!" {
		return rulesOf(Run, "/usr", "/bin", "/sbin", "/lib", "/lib64"), true
	}
	f, err := elf.NewFile(executable)
	if err != nil {
		return nil, false
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return append(rulesOf(Run, "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", loader(p)),
				rulesOf(Read, "/etc/ld.so.cache")...), false
		}
	}
	return nil, false
}

// loader returns the path of the program that loads the C library; it is elsewhere
// on some hosts.
func loader(p *elf.Prog) string {
	b, _ := io.ReadAll(io.LimitReader(p.Open(), unix.PathMax))
	path, _, _ := bytes.Cut(b, []byte{0})
	return string(path)
}

func rulesOf(a Access, paths ...string) (out []Rule) {
	for _, p := range paths {
		out = append(out, Rule{Path: p, Access: a})
	}
	return out
}

// CommonRules are the paths that every plugin may use: facts about the host and
// itself, and dir for its sockets and temporary files. Folders that variables of the
// environment name for measurements are the plugin's too.
func CommonRules(dir string) []Rule {
	rules := rulesOf(Read, "/sys", "/proc/self", "/proc/sys", "/proc/meminfo", "/proc/cpuinfo", "/proc/stat",
		"/etc/localtime", "/usr/share/zoneinfo")
	rules = append(rules, rulesOf(Write, "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/full")...)
	rules = append(rules, Rule{Path: dir, Access: Own, Required: true})
	if cover := os.Getenv("GOCOVERDIR"); cover != "" {
		rules = append(rules, Rule{Path: cover, Access: Own})
	}
	if file := os.Getenv(selfstats.FileEnv); file != "" {
		rules = append(rules, Rule{Path: filepath.Dir(file), Access: Own})
	}
	return rules
}

// LookUp finds the user of a plugin by name or number.
func LookUp(name string) (*User, error) {
	u, err := user.Lookup(name)
	if err != nil {
		var byID error
		if u, byID = user.LookupId(name); byID != nil {
			return nil, fmt.Errorf("user %q: %w", name, err)
		}
	}
	ids, err := u.GroupIds()
	if err != nil {
		return nil, fmt.Errorf("groups of user %q: %w", name, err)
	}
	out := &User{Name: u.Username}
	if out.UID, err = number(u.Uid); err == nil {
		out.GID, err = number(u.Gid)
	}
	for _, id := range ids {
		var g uint32
		if g, err = number(id); err != nil {
			break
		}
		out.Groups = append(out.Groups, g)
	}
	return out, err
}

func number(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	return uint32(n), err
}
