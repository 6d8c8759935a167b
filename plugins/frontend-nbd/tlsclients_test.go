package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Real clients with TLS: libnbd (nbdinfo, nbdcopy, and fio's engine) and QEMU.

// tlsClients has a server that wants certificates, and the folder of a client.
func tlsClients(t *testing.T) (r *rig, a *authority, addr, dir string) {
	t.Helper()
	tool(t, "nbdinfo")
	a = newAuthority(t)
	r, addr = tlsRig(t, rigConfig{queues: 2}, a.server(true, true))
	r.disks[0].with(func() { copy(r.disks[0].mem, pattern(4<<20, 11)) })
	return r, a, addr, a.folder("web")
}

func nbds(addr, dir string) string {
	_, port, _ := strings.Cut(addr, ":")
	return "nbds://localhost:" + port + "/disk0?tls-certificates=" + dir
}

// fails runs a command that must fail, and returns what it says.
func fails(t *testing.T, name string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, tool(t, name), args...).CombinedOutput()
	if err == nil || ctx.Err() != nil {
		t.Errorf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func TestTLS_Nbdinfo(t *testing.T) {
	_, _, addr, dir := tlsClients(t)
	out := run(t, "nbdinfo", nbds(addr, dir))
	for _, want := range []string{"protocol: newstyle-fixed with TLS, using structured packets", "export-size: 4194304"} {
		if !strings.Contains(out, want) {
			t.Errorf("nbdinfo does not say %q:\n%s", want, out)
		}
	}
	if out := run(t, "nbdinfo", "--list", nbds(addr, dir)); !strings.Contains(out, `export="disk0"`) {
		t.Error(out)
	}
}

func TestTLS_NbdinfoIsRefused(t *testing.T) {
	r, a, addr, dir := tlsClients(t)
	other := newAuthority(t)
	otherDir := other.folder("web")
	must(t, "give the right CA", os.WriteFile(filepath.Join(otherDir, "ca-cert.pem"), a.pem, 0o600))
	bare := a.folder("web")
	for _, f := range []string{"client-cert.pem", "client-key.pem"} {
		must(t, "remove", os.Remove(filepath.Join(bare, f)))
	}
	plain := strings.Replace(nbds(addr, dir), "nbds://", "nbd://", 1)
	for what, uri := range map[string]string{"another CA": nbds(addr, otherDir), "no certificate": nbds(addr, bare), "no TLS": plain[:strings.Index(plain, "?")]} {
		if out := fails(t, "nbdinfo", uri); strings.Contains(out, "export-size") {
			t.Errorf("%s: %s", what, out)
		}
	}
	fails(t, "nbdinfo", "--list", plain[:strings.Index(plain, "disk0")])
	// A key that both ends share, as nbdkit has it.
	psk := filepath.Join(t.TempDir(), "keys.psk")
	must(t, "write key", os.WriteFile(psk, []byte("web:"+strings.Repeat("0123456789abcdef", 4)+"\n"), 0o600))
	fails(t, "nbdinfo", strings.Replace(nbds(addr, dir), "nbds://", "nbds://web@", 1)[:len("nbds://web@localhost:"+addr[strings.Index(addr, ":")+1:]+"/disk0")]+"?tls-psk-file="+psk)
	if r.f.Openers(0) != 0 {
		t.Error("one of them has opened the export")
	}
}

func TestTLS_NbdcopyBothWays(t *testing.T) {
	r, _, addr, dir := tlsClients(t)
	uri, file := nbds(addr, dir), filepath.Join(t.TempDir(), "image")
	run(t, "nbdcopy", "--connections=4", uri, file)
	if got, err := os.ReadFile(file); err != nil || !bytes.Equal(got, r.disks[0].at(0, 4<<20)) {
		t.Fatal("copy out differs", err)
	}
	want := pattern(4<<20, 12)
	must(t, "write file", os.WriteFile(file, want, 0o600))
	run(t, "nbdcopy", "--flush", file, uri)
	if !bytes.Equal(want, r.disks[0].at(0, 4<<20)) || r.disks[0].flushed() == 0 {
		t.Error("copy in differs, or is not flushed")
	}
}

func TestTLS_QEMU(t *testing.T) {
	r, _, addr, dir := tlsClients(t)
	_, port, _ := strings.Cut(addr, ":")
	creds := []string{"--object", "tls-creds-x509,id=tls0,dir=" + dir + ",endpoint=client"}
	image := "driver=nbd,host=localhost,port=" + port + ",export=disk0,tls-creds=tls0"
	out := run(t, "qemu-img", append(append([]string{"info"}, creds...), "--image-opts", image)...)
	if !strings.Contains(out, "4 MiB") {
		t.Error(out)
	}
	file := filepath.Join(t.TempDir(), "image")
	run(t, "qemu-img", append(append([]string{"convert"}, creds...), "--image-opts", "-O", "raw", image, file)...)
	if got, err := os.ReadFile(file); err != nil || !bytes.Equal(got, r.disks[0].at(0, 4<<20)) {
		t.Error("image differs", err)
	}
	out = run(t, "qemu-io", append(creds, "--image-opts", "-c", "write -P 0xaa 0 64k", "-c", "write -P 0xbb 1000 77",
		"-c", "read -P 0xbb 1000 77", "-c", "write -f -P 0xcc 128k 1M", "-c", "flush", "-c", "read -P 0xcc 128k 1M", image)...)
	if strings.Contains(out, "failed") {
		t.Error(out)
	}
	fails(t, "qemu-img", "info", "nbd://localhost:"+port+"/disk0")
}

// fio takes no folder in the URI, so libnbd looks in the user's home; root's is the
// system's, so fio runs as another user.
func TestTLS_Fio(t *testing.T) {
	_, a, addr, _ := tlsClients(t)
	if !strings.Contains(run(t, "fio", "--enghelp"), "nbd") {
		t.Skip("fio has no nbd engine")
	}
	home, err := os.MkdirTemp("", "fio-home")
	must(t, "make home", err)
	t.Cleanup(func() { os.RemoveAll(home) })
	pki := filepath.Join(home, ".pki", "libnbd")
	must(t, "make folder", os.MkdirAll(filepath.Dir(pki), 0o755))
	must(t, "copy folder", os.CopyFS(pki, os.DirFS(a.folder("web"))))
	uri, _, _ := strings.Cut(nbds(addr, ""), "?")
	cmd := exec.Command(tool(t, "fio"), "--name=v", "--ioengine=nbd", "--uri="+uri, "--rw=randrw", "--bs=4k", "--iodepth=32",
		"--size=4m", "--io_size=8m", "--verify=crc32c", "--verify_state_save=0", "--fsync=64")
	cmd.Dir, cmd.Env = home, append(os.Environ(), "HOME="+home)
	if os.Geteuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		must(t, "give it away", filepath.WalkDir(home, func(path string, _ os.DirEntry, err error) error {
			return errors.Join(err, os.Chown(path, nobody, nobody))
		}))
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

const nobody = 65534
