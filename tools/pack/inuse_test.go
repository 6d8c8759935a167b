package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// A scene is a folder with what the kernel, udev and the daemon show of a host, and
// programs that note how they were called.
type scene struct {
	t    *testing.T
	root string
}

// newScene is a host with the disk ublkb0 of the client, which nobody uses, and the
// disk ublkb7 of another program, which is mounted.
func newScene(t *testing.T) *scene {
	t.Helper()
	s := &scene{t, t.TempDir()}
	s.file("/run/systemd/system/unit", "")
	s.file("/dev/null", "")
	s.disk("ublkb0", "259:0")
	s.disk("ublkb0/ublkb0p1", "259:1")
	s.disk("ublkb7", "259:7")
	s.file("/proc/swaps", "Filename Type\n/dev/sda2 partition 1 0 -2\n")
	s.file("/proc/1/comm", "systemd\n")
	s.file("/proc/1/cgroup", "0::/init.scope\n")
	s.file("/proc/1/mountinfo", "22 1 8:1 / / rw,noatime shared:1 - ext4 /dev/sda1 rw\n30 22 259:7 / /other rw - ext4 /dev/ublkb7 rw\n")
	s.file("/proc/40/comm", "frontend-ublk\n")
	s.file("/proc/40/cgroup", "0::/system.slice/rnbd-client.service/frontend-ublk\n")
	s.file("/proc/40/mountinfo", "22 1 8:1 / / rw,noatime shared:1 - ext4 /dev/sda1 rw\n")
	s.link("/proc/40/fd/3", "/dev/ublkb0")
	for _, program := range []string{"deb-systemd-invoke", "systemctl"} {
		write(t, filepath.Join(s.root, "bin", program), []byte("#!/bin/sh\necho \"$@\" >>"+s.root+"/stopped\n"), 0o755)
	}
	write(t, filepath.Join(s.root, "bin/sleep"), []byte("#!/bin/sh\n[ ! -x "+s.root+"/moment ] || "+s.root+"/moment\n"), 0o755)
	return s
}

func (s *scene) file(name, body string) {
	s.t.Helper()
	write(s.t, filepath.Join(s.root, name), []byte(s.place(body)), 0o644)
}

func (s *scene) link(name, target string) {
	s.t.Helper()
	name = filepath.Join(s.root, name)
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		s.t.Fatal(err)
	}
	if err := os.Symlink(s.place(target), name); err != nil {
		s.t.Fatal(err)
	}
}

// disk adds a disk or a partition, given its folder in /sys/class/block.
func (s *scene) disk(folder, number string) {
	s.t.Helper()
	s.file("/sys/class/block/"+folder+"/dev", number+"\n")
	s.file("/dev/"+filepath.Base(folder), "")
}

// records writes the daemon's record, with one disk.
func (s *scene) records(node string) {
	s.t.Helper()
	s.file("/run/rnbd/client.devices", "{\n\t\"devices\": [\n\t\t{\n\t\t\t\"path\": \"x\",\n\t\t\t\"location\": \""+node+"\",\n\t\t\t\"slots\": 1\n\t\t}\n\t]\n}\n")
}

// place puts the folders of the host below the root.
func (s *scene) place(text string) string {
	for _, dir := range []string{"/proc/", "/sys/", "/dev/", "/run/"} {
		text = strings.ReplaceAll(text, dir, s.root+dir)
	}
	return text
}

// remove runs the script of a removal, and returns what it has said and stopped.
func (s *scene) remove(script string, args ...string) (said, stopped string, err error) {
	s.t.Helper()
	cmd := exec.Command("sh", append([]string{"-c", s.place(script), "prerm"}, args...)...)
	cmd.Env = append(os.Environ(), "LC_ALL=C", "PATH="+s.root+"/bin:"+os.Getenv("PATH"))
	out, err := cmd.CombinedOutput()
	did, _ := os.ReadFile(filepath.Join(s.root, "stopped"))
	return strings.ReplaceAll(string(out), s.root, ""), string(did), err
}

func packageOf(t *testing.T, name string) *packageSpec {
	t.Helper()
	for i := range packages {
		if packages[i].name == name {
			return &packages[i]
		}
	}
	t.Fatalf("there is no package %s", name)
	return nil
}

func TestARemovalIsRefusedWhileADiskIsInUse(t *testing.T) {
	p := packageOf(t, "rnbd-client")
	for name, test := range map[string]struct {
		uses func(*scene)
		want string // part of what is said; empty: removed
	}{
		"no disk": {uses: func(*scene) {}},
		"a disk that nobody uses": {uses: func(s *scene) {
			s.records("/dev/ublkb0")
			s.link("/dev/rnbd/s1/x", "/dev/ublkb0")
		}},
		"a record of a disk that is away": {uses: func(s *scene) {
			s.records("/dev/ublkb3")
			s.link("/dev/rnbd/s1/x", "/dev/ublkb3")
		}},
		"an NBD export": {uses: func(s *scene) { s.records("unix:/run/rnbd/nbd.sock") }},
		"mounted": {want: "/dev/ublkb0 is mounted on /data", uses: func(s *scene) {
			s.records("/dev/ublkb0")
			s.file("/proc/1/mountinfo", "31 22 259:0 / /data rw,noatime shared:2 - ext4 /dev/other rw\n")
		}},
		"a disk that has a link alone": {want: "/dev/ublkb0 is mounted on /data", uses: func(s *scene) {
			s.link("/dev/rnbd/s1/vg0!lv1", "/dev/ublkb0")
			s.file("/proc/1/mountinfo", "31 22 259:0 / /data rw,noatime shared:2 - ext4 /dev/ublkb0 rw\n")
		}},
		"mounted in a container": {want: "/dev/ublkb0p1 is mounted on /mnt", uses: func(s *scene) {
			s.records("/dev/ublkb0")
			s.file("/proc/50/mountinfo", "31 22 259:1 / /mnt rw,noatime - ext4 /dev/ublkb0p1 rw\n")
		}},
		"mounted by a file system with numbers of its own": {want: "/dev/ublkb0 is mounted on /data", uses: func(s *scene) {
			s.records("/dev/ublkb0")
			s.file("/proc/1/mountinfo", "31 22 0:99 /sub /data rw - btrfs /dev/ublkb0 rw,ssd\n")
		}},
		"swap": {want: "/dev/ublkb0p1 is used for swap", uses: func(s *scene) {
			s.records("/dev/ublkb0")
			s.file("/proc/swaps", "Filename Type\n/dev/ublkb0p1\tpartition 1 0 -2\n")
		}},
		"part of another device": {want: "/dev/ublkb0 is part of /dev/dm-0", uses: func(s *scene) {
			s.records("/dev/ublkb0")
			s.file("/sys/class/block/ublkb0/holders/dm-0/dev", "253:0\n")
		}},
		"open": {want: "/dev/ublkb0 is open in process 50 (qemu)", uses: func(s *scene) {
			s.records("/dev/ublkb0")
			s.file("/proc/50/comm", "qemu\n")
			s.file("/proc/50/cgroup", "0::/machine.slice\n")
			s.link("/proc/50/fd/7", "/dev/ublkb0")
		}},
		"open for a moment": {uses: func(s *scene) {
			s.records("/dev/ublkb0")
			s.file("/proc/50/cgroup", "0::/system.slice/systemd-udevd.service\n")
			s.link("/proc/50/fd/7", "/dev/ublkb0")
			write(s.t, filepath.Join(s.root, "moment"), []byte("#!/bin/sh\nrm -rf "+s.root+"/proc/50\n"), 0o755)
		}},
	} {
		for kind, remove := range map[string]func(*scene) (string, string, error){
			"deb": func(s *scene) (string, string, error) { return s.remove(p.debScripts()["prerm"], "remove") },
			"rpm": func(s *scene) (string, string, error) { return s.remove(p.rpmPreun(), "0") },
		} {
			t.Run(name+"/"+kind, func(t *testing.T) {
				s := newScene(t)
				test.uses(s)
				said, stopped, err := remove(s)
				switch {
				case test.want == "" && (err != nil || said != "" || !strings.Contains(stopped, "stop rnbd-client.service")):
					t.Errorf("refused: %v, says %q, stops %q", err, said, stopped)
				case test.want != "" && (err == nil || stopped != "" || !strings.Contains(said, test.want+"\n")):
					t.Errorf("error %v, stops %q, says %q, want %q", err, stopped, said, test.want)
				case test.want != "" && (!strings.Contains(said, "rnbd unmap") || strings.Contains(said, "ublkb7") || strings.Contains(said, "frontend")):
					t.Errorf("says %q", said)
				}
			})
		}
	}
}

// What is no removal goes on with a disk in use, and so does the removal of packages
// without disks, or from a folder.
func TestWhatADiskInUseDoesNotRefuse(t *testing.T) {
	p, server := packageOf(t, "rnbd-client"), packageOf(t, "rnbd-server")
	for name, test := range map[string]struct {
		script, arg, env string
		stops            string
	}{
		"an upgrade by dpkg":     {p.debScripts()["prerm"], "upgrade", "", ""},
		"a deconfiguration":      {p.debScripts()["prerm"], "deconfigure", "", ""},
		"an upgrade by rpm":      {p.rpmPreun(), "1", "", ""},
		"another package":        {server.debScripts()["prerm"], "remove", "", "stop rnbd-server.service rnbd-server.socket\n"},
		"another package of rpm": {server.rpmPreun(), "0", "", "disable rnbd-server.service rnbd-server.socket\nstop rnbd-server.service rnbd-server.socket\n"},
		"a removal from a root":  {p.debScripts()["prerm"], "remove", "/target", ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t)
			s.records("/dev/ublkb0")
			s.file("/proc/1/mountinfo", "31 22 259:0 / /data rw,noatime shared:2 - ext4 /dev/ublkb0 rw\n")
			t.Setenv("DPKG_ROOT", test.env)
			if said, stopped, err := s.remove(test.script, test.arg); err != nil || said != "" || stopped != test.stops {
				t.Errorf("error %v, says %q, stops %q", err, said, stopped)
			}
		})
	}
}

// RPM goes on with the packages that the refused one needs.
func TestRPMErasesNothingThatTheClientNeeds(t *testing.T) {
	for _, name := range append(packageOf(t, "rnbd-client").requires, "rnbd-client") {
		t.Run(name, func(t *testing.T) {
			p, s := packageOf(t, name), newScene(t)
			if said, _, err := s.remove(p.rpmPreun(), "0"); err != nil {
				t.Errorf("no disk is in use: %v, says %q", err, said)
			}
			s.records("/dev/ublkb0")
			s.file("/sys/class/block/ublkb0/holders/md0/dev", "9:0\n")
			if said, _, err := s.remove(p.rpmPreun(), "0"); err == nil || !strings.Contains(said, name+" is not removed") {
				t.Errorf("a disk is in use: error %v, says %q", err, said)
			}
		})
	}
}
