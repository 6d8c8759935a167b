package packages

import (
	"bytes"
	"context"
	"crypto/sha256"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/nbdclient"
)

// install installs all packages of a folder in the host, by apt.
const install = "apt-get install -y -q --no-install-recommends -o APT::Sandbox::User=root "

// wants is where systemctl enable makes a link.
const wants = "/etc/systemd/system/multi-user.target.wants"

// A host gets the packages, exports and maps a file over loopback, is upgraded
// while the device is in use, and is as before when all is purged.
func TestDebsAreInstalledUpgradedAndPurged(t *testing.T) {
	require(t, "mmdebstrap", "nsenter")
	h := newHost(t, prepare(t, cleanRoot, first, second), second)
	before := h.files()

	h.run(install + "/mnt/first/*.deb")
	if out := h.run("dpkg --verify rnbd rnbd-plugins rnbd-server rnbd-client rnbd-net rnbd-sdk-doc"); out != "" {
		t.Errorf("dpkg finds changed files:\n%s", out)
	}
	version(t, h, first)
	h.run("test -f /usr/share/man/man7/rnbd.7.gz && test -f /usr/share/doc/rnbd/copyright && test -f /usr/share/doc/rnbd-sdk-doc/use/operations.md")
	h.run("mkdir -p " + wants + " && ln -s /lib/systemd/system/rnbd-client.service " + wants) // there is no systemctl here

	h.run("mkdir -p /srv/rnbd && truncate -s 16M /srv/rnbd/disk.img")
	h.run("echo 'log-format: json' >>/etc/rnbd/server.yaml && echo 'policy: round-robin' >/etc/rnbd/client.d/site.yaml")
	start(h)
	h.run("rnbd map disk.img from 127.0.0.1 --session demo --frontend nbd-socket")
	data := exchange(t, h)

	h.run(install + "/mnt/second/*.deb")
	version(t, h, second)
	h.run("tail -n 1 /etc/rnbd/server.yaml | grep json && test -f /etc/rnbd/client.d/site.yaml && test -L " + wants + "/rnbd-client.service")
	if got := contents(t, h, len(data)); !bytes.Equal(got, data) {
		t.Error("the device of before the upgrade has other contents")
	}
	h.stop("client")
	h.stop("server")
	start(h)
	h.run("rnbd map disk.img from 127.0.0.1 --session demo --frontend nbd-socket")
	if got := contents(t, h, len(data)); !bytes.Equal(got, data) {
		t.Error("the device of after the upgrade has other contents")
	}
	h.run("rnbd unmap all")
	h.stop("client")
	h.stop("server")

	h.run("apt-get remove -y -q 'rnbd*'")
	h.run("test -f /etc/rnbd/server.yaml && test -f /etc/rnbd/client.d/site.yaml && ! test -e /usr/bin/rnbd")
	h.run("apt-get purge -y -q 'rnbd*' && test -f /srv/rnbd/disk.img")
	h.same(before, "the purge")
	image, err := os.ReadFile(h.path("/srv/rnbd/disk.img"))
	if err != nil || sha256.Sum256(image[:len(data)]) != sha256.Sum256(data) {
		t.Errorf("what was exported has other contents: %v", err)
	}
}

// The packages of RPM are installed into a root of Debian, which is none of
// RPM's, so what they need of the distribution is not asked for.
func TestRPMsAreInstalledUpgradedAndErased(t *testing.T) {
	require(t, "mmdebstrap", "nsenter", "rpm")
	h := newHost(t, prepare(t, cleanRoot, first, second), second)
	h.run("mkdir -p /usr/share/fish/vendor_completions.d /usr/share/zsh/site-functions") // of the package filesystem
	before := h.files()
	rpm := func(args string) string {
		t.Helper()
		out, err := h.outside("sh", "-c", "rpm --root '"+h.root+"' --dbpath /var/lib/rpm --nosignature "+args)
		if err != nil {
			t.Fatalf("rpm %s: %v\n%s", args, err, out)
		}
		return out
	}
	rpm("-K '" + h.root + "'/mnt/first/*.rpm")
	rpm("-i --nodeps '" + h.root + "'/mnt/first/*.rpm")
	if out := rpm("-Va --nodeps"); out != "" {
		t.Errorf("rpm finds changed files:\n%s", out)
	}
	version(t, h, first)
	h.run("mkdir -p /srv/rnbd && truncate -s 16M /srv/rnbd/disk.img && echo 'log-format: json' >>/etc/rnbd/server.yaml")
	start(h)
	h.run("rnbd map disk.img from 127.0.0.1 --session demo --frontend nbd-socket")
	exchange(t, h)
	rpm("-U --nodeps '" + h.root + "'/mnt/second/*.rpm")
	version(t, h, second)
	h.run("tail -n 1 /etc/rnbd/server.yaml | grep json")
	h.run("rnbd unmap all")
	h.stop("client")
	h.stop("server")
	rpm("-e --nodeps rnbd rnbd-plugins rnbd-server rnbd-client rnbd-net rnbd-sdk-doc")
	h.run("test -f /etc/rnbd/server.yaml.rpmsave && rm -r /etc/rnbd")
	h.same(before, "the packages were erased")
}

func version(t *testing.T, h *host, want string) {
	t.Helper()
	if out := h.run("rnbd version"); !strings.HasPrefix(out, "rnbd "+want+"\n") {
		t.Errorf("rnbd version says %q, want %s", out, want)
	}
}

// start runs both daemons as their units do.
func start(h *host) {
	h.t.Helper()
	h.daemon("server", "rnbd server run --config /etc/rnbd/server.yaml")
	h.daemon("client", "rnbd client run --config /etc/rnbd/client.yaml")
	h.run("for i in $(seq 600); do rnbd server show >/dev/null 2>&1 && rnbd client show >/dev/null 2>&1 && exit; sleep 0.2; done; exit 1")
}

func dial(t *testing.T, h *host) *nbdclient.Client {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, err := nbdclient.Dial(ctx, "unix", h.path("/run/rnbd/nbd.sock"), nbdclient.Options{Export: "rnbd0"})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// exchange writes through the device rnbd0, reads it back, and returns what was
// written, from the begin of the device on.
func exchange(t *testing.T, h *host) []byte {
	t.Helper()
	c := dial(t, h)
	defer c.Close()
	if c.Size() != 16<<20 {
		t.Errorf("size %d", c.Size())
	}
	data := bytes.Repeat([]byte("installed from a package\n"), 4096)
	data = data[:len(data)&^4095]
	if _, err := c.WriteAt(data, 0); err != nil {
		t.Fatal(err)
	}
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	if got := contents(t, h, len(data)); !bytes.Equal(got, data) {
		t.Error("the device has other contents than were written")
	}
	return data
}

func contents(t *testing.T, h *host, n int) []byte {
	t.Helper()
	c := dial(t, h)
	defer c.Close()
	got := make([]byte, n)
	if _, err := c.ReadAt(got, 0); err != nil {
		t.Fatal(err)
	}
	return got
}
