package plugin

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/cgroup"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/confine"
)

// confined is the start of one process by a launcher.
type confined struct {
	launcher []string
	profile  confine.Profile
	exe      *os.File
	files    *confine.Files
	group    *cgroup.Group // nil: that of the host
	groupErr error         // why it has none
}

// openConfined prepares the start of exe by the launcher of c.
func openConfined(c Config, exe *os.File) *confined {
	s := &confined{launcher: c.Launcher, profile: *c.Confine, exe: exe}
	rules, script := confine.Runtime(exe)
	s.profile.Path, s.profile.Args, s.profile.Script = c.Path, c.Args, script
	s.profile.Files = append(rules, s.profile.Files...)
	return s
}

// home makes the folder that a process may write to: its sockets are there, and its
// temporary files. It belongs to the user that the plugin runs as.
func (s *confined) home(dir *socketDir, sockets string) (tmp string, err error) {
	tmp = filepath.Join(sockets, "tmp")
	if err := os.Mkdir(tmp, 0o700); err != nil {
		return "", err
	}
	s.profile.Files = append(s.profile.Files, confine.CommonRules(sockets)...)
	u := s.profile.User
	if u == nil {
		return tmp, nil
	}
	if err := os.Chmod(dir.path, 0o711); err != nil { // to reach what is in it
		return "", err
	}
	for _, p := range []string{sockets, tmp} {
		if err := os.Chown(p, int(u.UID), int(u.GID)); err != nil {
			return "", fmt.Errorf("give the plugin's folder to %s: %w", u.Name, err)
		}
	}
	return tmp, nil
}

// enclose makes the control group of the process.
func (s *confined) enclose(name string) error {
	if s.profile.Groups == nil {
		return nil
	}
	if s.group, s.groupErr = s.profile.Groups.New(name); s.groupErr != nil {
		if s.profile.Strict {
			return fmt.Errorf("make a control group: %w", s.groupErr)
		}
		return nil
	}
	s.profile.Group = s.group.Path()
	return nil
}

// wrap makes child the launcher.
func (s *confined) wrap(ch *child) error {
	var err error
	if s.files, err = confine.Prepare(&s.profile, s.exe); err != nil {
		return err
	}
	ch.cmd.Path, ch.cmd.Args, ch.cmd.Err = s.launcher[0], s.launcher, nil
	ch.cmd.ExtraFiles = append(ch.cmd.ExtraFiles, s.files.Child...)
	return nil
}

// close closes the files that report has not closed. What the process has started
// ends with it.
func (s *confined) close() {
	if s.group != nil {
		s.group.Close()
	}
	if s.files != nil {
		s.files.Close()
	}
}

// report waits for the launcher's report. nil: it said nothing, or never started. What the
// launcher could not do it cannot do at the next start either.
func (s *confined) report() (*confine.Report, error) {
	if s.files == nil {
		return nil, nil
	}
	s.files.Started()
	r, err := s.files.Report()
	if err != nil && r != nil {
		err = misfit{err}
	}
	if err == nil && s.groupErr != nil {
		r.Measures = append(r.Measures, confine.Measure{Name: "cgroup", Text: s.groupErr.Error()})
	}
	return r, err
}
