package confine

import (
	"bytes"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
)

// Files are the two ends of what a launcher reads and writes.
type Files struct {
	Child   []*os.File // its descriptors from profileFD on
	profile *os.File
	report  *os.File
}

// Prepare makes the descriptors of a launcher that executes executable, which
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
// what it reported.
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

// Runtime is what the executable needs to be read and executed: nothing for a
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
			return append(rulesOf(Run, "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib"),
				rulesOf(Read, "/etc/ld.so.cache")...), false
		}
	}
	return nil, false
}

func rulesOf(a Access, paths ...string) (out []Rule) {
	for _, p := range paths {
		out = append(out, Rule{Path: p, Access: a})
	}
	return out
}

// CommonRules are the paths that every plugin may use: facts about the host and
// itself, and dir for its sockets and temporary files.
func CommonRules(dir string) []Rule {
	rules := rulesOf(Read, "/sys", "/proc/self", "/proc/sys", "/proc/meminfo", "/proc/cpuinfo", "/proc/stat",
		"/etc/localtime", "/usr/share/zoneinfo")
	rules = append(rules, rulesOf(Write, "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/full")...)
	rules = append(rules, Rule{Path: dir, Access: Own, Required: true})
	if cover := os.Getenv("GOCOVERDIR"); cover != "" {
		rules = append(rules, Rule{Path: cover, Access: Own})
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

// CheckFolder refuses, for root, an executable that another user can replace: in a
// folder that others can write to, or that belongs to a user that is neither root nor
// the owner of the host's own program.
func CheckFolder(path string) error {
	if os.Geteuid() != 0 {
		return nil
	}
	return checkFolder(path, trusted())
}

func checkFolder(path string, trusted map[uint32]bool) error {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return err
	}
	for _, p := range []string{real, filepath.Dir(real)} {
		st, err := os.Stat(p)
		if err != nil {
			return err
		}
		owner := st.Sys().(*syscall.Stat_t).Uid
		switch {
		case st.Mode().Perm()&0o022 != 0 && st.Mode()&fs.ModeSticky == 0:
			return fmt.Errorf("%s can be changed by others (mode %v), and root does not execute that; chmod go-w it: %w",
				p, st.Mode().Perm(), fs.ErrPermission)
		case !trusted[owner]:
			return fmt.Errorf("%s belongs to user %d, and root does not execute that; chown it to root: %w",
				p, owner, fs.ErrPermission)
		}
	}
	return nil
}

// trusted are the users whose programs root executes: they own what runs already.
func trusted() map[uint32]bool {
	t := map[uint32]bool{0: true}
	if st, err := os.Stat("/proc/self/exe"); err == nil {
		t[st.Sys().(*syscall.Stat_t).Uid] = true
	}
	return t
}
