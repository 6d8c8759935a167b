package kernelvm

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/test/kernelvm/vm"
)

// tourBlocks are the commands of docs/use/operations.md, "With a Linux kernel": four
// blocks, in the order of the page.
func tourBlocks(t *testing.T) (blocks [][]string) {
	t.Helper()
	page, err := os.ReadFile(filepath.Join(repositoryRoot(), "docs/use/operations.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(page), "\n## With a Linux kernel\n")
	section, _, _ := strings.Cut(rest, "\n## ")
	parts := strings.Split(section, "```\n")
	for i := 1; i < len(parts); i += 2 {
		blocks = append(blocks, strings.Split(strings.TrimSpace(parts[i]), "\n"))
	}
	if len(blocks) != 4 {
		t.Fatalf("the page has %d blocks of commands, want 4", len(blocks))
	}
	return blocks
}

// The page's commands, as they stand there.
func TestTour(t *testing.T) {
	blocks := tourBlocks(t)
	g := vm.Boot(t, vm.Config{Net: vm.Tap})
	g.Run(t, "ip", "addr", "add", g.Addr(0)+"/24", "dev", "eth0")
	g.Run(t, "ip", "link", "set", "eth0", "up")
	g.Modprobe(t, "brd", "rd_nr=1", "rd_size=16384")
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "disk.img"), make([]byte, 16<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	var daemon process
	env := "cd " + dir + "; export PATH=" + filepath.Dir(rnbdPath) + ":$PATH RNBD_SOCKET=" + dir + "; "
	host := func(lines []string) {
		for _, line := range lines {
			line = strings.ReplaceAll(line, "/srv/images", dir)
			line = strings.Replace(line, "rnbd client run", "rnbd client run --frontend nbd-socket", 1) // whatever drivers the host has
			command, background := strings.CutSuffix(line, " &")
			if !background {
				run(t, hostPlace{g}, "sh", "-c", env+command)
				continue
			}
			daemon = hostPlace{g}.Start(t, "sh", "-c", env+"exec "+command)
			kind := strings.Fields(command)[1]
			up(t, hostPlace{g}, daemon, kind, filepath.Join(dir, kind+".sock"))
		}
	}
	guest := func(lines []string) {
		for _, line := range lines {
			g.Run(t, "sh", "-c", line)
		}
	}
	guest(blocks[0])
	host(blocks[1])
	if got := run(t, hostPlace{g}, exercisePath, "--nbd", filepath.Join(dir, "nbd.sock"), "--export", "rnbd0", "--for", "1s"); !strings.Contains(got, "requests") {
		t.Errorf("device of the kernel: %s", got)
	}
	run(t, hostPlace{g}, "sh", "-c", env+"rnbd unmap rnbd0")
	daemon.Stop() // both cannot have the address
	host(blocks[2])
	g.Modprobe(t, "rnbd-client")
	guest(blocks[3])
	g.Run(t, exercisePath, "--device", "/dev/rnbd0", "--for", "1s")
	g.WriteFile(t, "/sys/block/rnbd0/rnbd/unmap_device", "normal")
	g.Rmmod(t, "rnbd_client", "rnbd_server")
}
