package e2e

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/audit"
	"github.com/rnbd-go/rnbd/test/lab"
)

// console is a qemu-io that keeps one connection.
type console struct {
	t     *testing.T
	in    io.Writer
	lines chan string
}

func startConsole(t *testing.T, args ...string) *console {
	t.Helper()
	cmd := exec.Command(lab.Tool(t, "qemu-io"), args...)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, w := io.Pipe()
	cmd.Stdout, cmd.Stderr = w, w
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c := &console{t, in, make(chan string, 100)}
	go func() {
		for s := bufio.NewScanner(out); s.Scan(); {
			c.lines <- s.Text()
		}
	}()
	t.Cleanup(func() {
		in.Close()
		cmd.Process.Kill()
		cmd.Wait()
		w.Close()
	})
	return c
}

// do gives a command, and returns the line that says how it ended.
func (c *console) do(command string) string {
	c.t.Helper()
	fmt.Fprintln(c.in, command)
	end := time.After(30 * time.Second)
	for {
		select {
		case line := <-c.lines:
			if strings.Contains(line, "bytes at offset") || strings.Contains(line, "failed") {
				return line
			}
		case <-end:
			c.t.Fatalf("%s: no answer of qemu-io", command)
		}
	}
}

// TestNBDJudgedAnew: other rules, and a list of revoked certificates, reach NBD
// clients that are connected, also over an upgrade, and there is a record and an event.
func TestNBDJudgedAnew(t *testing.T) {
	lab.Tool(t, "qemu-io")
	p := newNBDPKI(t)
	folder, dir := p.folder("app"), t.TempDir()
	config, crl, log := filepath.Join(dir, "rules.yaml"), p.path("crl.pem"), filepath.Join(dir, "audit.json")
	write := func(file, text string) {
		t.Helper()
		if err := os.WriteFile(file+".next", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file+".next", file); err != nil {
			t.Fatal(err)
		}
	}
	rules := func(app, plain string) {
		t.Helper()
		write(config, "nbd-access:\n  - {identity: [dns:localhost], allow: "+app+"}\n  - {allow: "+plain+"}\n")
	}
	rules("rw", "rw")
	list := p.revocations()
	list(crl)
	r := newRig(t, rigOptions{size: 16 << 20, client: lab.ClientOptions{Extra: append(p.flags("allow"), "--nbd-tls-crl", crl, "--config", config, "--audit", log)}})
	reload := func() {
		t.Helper()
		rnbd(t, "--socket", r.client.Socket, "config", "reload", "client").want(t, 0)
	}
	_, port, err := net.SplitHostPort(r.tcp)
	if err != nil {
		t.Fatal(err)
	}
	app := startConsole(t, "--object", "tls-creds-x509,id=tls0,endpoint=client,dir="+folder, "--image-opts",
		"driver=nbd,host=localhost,port="+port+",export="+r.device.Name+",tls-creds=tls0")
	plain := r.dial()
	wants := func(command, want string) {
		t.Helper()
		if got := app.do(command); !strings.Contains(got, want) {
			t.Errorf("%s: %s, want %s", command, got, want)
		}
	}
	wants("write -P 1 0 4096", "wrote 4096/4096")
	rules("ro", "rw")
	reload()
	eventually(t, "writes fail", func() bool { return strings.Contains(app.do("write -P 2 4096 4096"), "Operation not permitted") })
	wants("read -P 1 0 4096", "read 4096/4096")
	rules("rw", "rw")
	reload()
	eventually(t, "writes end well again", func() bool { return strings.Contains(app.do("write -P 3 4096 4096"), "wrote 4096/4096") })

	// The connection without TLS is the only one that an upgrade takes along.
	if _, err := r.client.Upgrade(""); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 4096)
	if _, err := plain.WriteAt(buf, 8192); err != nil {
		t.Errorf("after an upgrade: %v", err)
	}
	rules("rw", "ro")
	reload()
	eventually(t, "writes fail", func() bool { _, err := plain.WriteAt(buf, 8192); return errors.Is(err, syscall.EPERM) })
	if _, err := r.client.Upgrade(""); err != nil {
		t.Fatal(err)
	}
	if _, err := plain.WriteAt(buf, 8192); !errors.Is(err, syscall.EPERM) {
		t.Errorf("after another upgrade: %v", err)
	}
	rules("rw", "none")
	reload()
	eventually(t, "the connection ends", func() bool { _, err := plain.ReadAt(buf, 0); return err != nil })

	// The list is looked at every 2 s.
	app = startConsole(t, "--object", "tls-creds-x509,id=tls0,endpoint=client,dir="+folder, "--image-opts",
		"driver=nbd,host=localhost,port="+port+",export="+r.device.Name+",tls-creds=tls0")
	wants("read -P 3 4096 4096", "read 4096/4096")
	list(crl, "app")
	eventually(t, "the connection ends", func() bool { return strings.Contains(app.do("read 0 4096"), "failed") })
	eventually(t, "the records", func() bool { return len(auditRecords(t, log, audit.EventForced)) == 2 })
	for i, want := range []string{"rule 2 allows nothing", "is revoked"} {
		rec := auditRecords(t, log, audit.EventForced)[i]
		if !strings.Contains(rec.Reason, want) || rec.Device != r.device.Name || rec.Fabric != "nbd" || rec.Client == "" || (rec.Identity == "dns:localhost") != (i == 1) {
			t.Errorf("%+v", rec)
		}
	}
	modes := ""
	for _, rec := range auditRecords(t, log, audit.EventRules) {
		modes += " " + rec.Mode
	}
	if modes != " ro rw ro" {
		t.Errorf("records of rules:%s", modes)
	}
	rnbd(t, "--socket", r.client.Socket, "client", "events").want(t, 0, "NBD client closed", "is revoked")
}
