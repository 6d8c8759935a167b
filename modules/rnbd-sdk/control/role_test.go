package control_test

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/audit"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// Each call of the API is either for admins, and recorded, or known to read only.
func TestCallsForReaders(t *testing.T) {
	want := map[string]bool{"Info": true, "ListDevices": true, "ListSessions": true, "ListAccess": true, "CheckAccess": true, "PathStats": true, "DeviceStats": true, "LogLevels": true, "Events": true, "ListPools": true, "ListVolumes": true}
	for _, service := range []grpc.ServiceDesc{controlpb.ClientDaemon_ServiceDesc, controlpb.ServerDaemon_ServiceDesc} {
		for _, m := range service.Methods {
			full := "/" + service.ServiceName + "/" + m.MethodName
			if got := control.RoleFor(full) == control.Reader; got != want[m.MethodName] {
				t.Errorf("%s: for readers: %t; a call that only reads belongs to the list here", full, got)
			}
		}
		if len(service.Streams) > 0 {
			t.Errorf("%s has streams, which Authorize does not see", service.ServiceName)
		}
	}
	for _, method := range []string{"", "/Info", "/rnbd.control.v1.ServerDaemon/Infos", "/other/Info"} {
		if control.RoleFor(method) != control.Admin {
			t.Errorf("%q is not for admins only", method)
		}
	}
}

func TestRoles(t *testing.T) {
	g := &control.Group{Name: "storage", ID: 700}
	for _, c := range []struct {
		name   string
		group  *control.Group
		caller control.Caller
		want   control.Role
	}{
		{"root", g, control.Caller{UID: 0}, control.Admin},
		{"the daemon's user", g, control.Caller{UID: os.Geteuid()}, control.Admin},
		{"a member", g, control.Caller{UID: 4001, Groups: []int{100, 700}}, control.Reader},
		{"another user", g, control.Caller{UID: 4001, Groups: []int{100, 70}}, control.NoRole},
		{"root's group is no group", nil, control.Caller{UID: 4001, Groups: []int{0}}, control.NoRole},
	} {
		if got := c.group.RoleOf(c.caller); got != c.want {
			t.Errorf("%s: role %d, want %d", c.name, got, c.want)
		}
	}
}

func TestGroupsAreFound(t *testing.T) {
	if g, err := control.FindGroup("root"); err != nil || g.ID != 0 {
		t.Errorf("root: %+v, %v", g, err)
	}
	if g, err := control.FindGroup("4242"); err != nil || g.ID != 4242 {
		t.Errorf("4242: %+v, %v", g, err)
	}
	for _, name := range []string{"", "none-of-this-name", "-1", "4294967296"} {
		if g, err := control.FindGroup(name); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%q: %+v, %v, want EINVAL", name, g, err)
		}
	}
}

// Users of the test below, which this host need not know.
const (
	member   = 61001
	stranger = 61002
	readers  = 61000 // the group
)

// asUser runs TestAsUser of this program as another user, and returns its answers.
func asUser(t *testing.T, uid int, groups []uint32, socket string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^TestAsUser$", "-test.timeout=60s")
	cmd.Env = append(os.Environ(), "RNBD_TEST_SOCKET="+socket)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid), Groups: groups}}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("as user %d: %v: %s", uid, err, out)
	}
	return string(out)
}

// TestAsUser is the other process of TestMembersOfTheGroupMayRead.
func TestAsUser(t *testing.T) {
	socket := os.Getenv("RNBD_TEST_SOCKET")
	if socket == "" {
		return
	}
	c, conn, err := control.DialClient(t.Context(), socket)
	if err != nil {
		fmt.Printf("dial: denied=%t\n", errors.Is(err, syscall.EACCES))
		return
	}
	defer conn.Close()
	_, err = c.Unmap(t.Context(), &controlpb.UnmapRequest{Device: "free"})
	fmt.Printf("unmap: denied=%t %v\n", errors.Is(err, syscall.EACCES), err)
	_, err = c.ListDevices(t.Context(), &controlpb.ListRequest{})
	fmt.Printf("list: denied=%t\n", errors.Is(err, syscall.EACCES))
}

func TestMembersOfTheGroupMayRead(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to be other users")
	}
	root, err := os.MkdirTemp("", "rnbd-role-") // t.TempDir is closed to other users
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(root)
	if err := os.Chmod(root, 0o755); err != nil {
		t.Fatal(err)
	}
	group := &control.Group{Name: "readers", ID: readers}
	socket, record := filepath.Join(root, "run", "client.sock"), filepath.Join(root, "audit.log")
	log, err := audit.Open(record, "client", audit.Continue, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	l, err := control.ListenGroup(socket, group)
	if err != nil {
		t.Fatal(err)
	}
	s := control.NewServer(control.AuditCalls(log), control.Authorize(group))
	controlpb.RegisterClientDaemonServer(s, daemon{})
	go s.Serve(l)
	defer s.Stop()
	for path, want := range map[string]os.FileMode{filepath.Dir(socket): 0o710, socket: 0o660} {
		if st, err := os.Stat(path); err != nil || st.Mode().Perm() != want || st.Sys().(*syscall.Stat_t).Gid != readers {
			t.Errorf("%s: %v, %v, want mode %o of group %d", path, st.Mode(), err, want, readers)
		}
	}
	if out := asUser(t, member, []uint32{5, readers}, socket); !strings.Contains(out, "unmap: denied=true Unmap: group readers may list, show and read metrics; user 61001") || !strings.Contains(out, "list: denied=false") {
		t.Errorf("a member: %s", out)
	}
	if out := asUser(t, stranger, []uint32{5}, socket); !strings.Contains(out, "dial: denied=true") {
		t.Errorf("a user outside the group: %s", out)
	}
	// Whoever gets through the socket's mode is still nobody.
	if err := errors.Join(os.Chmod(filepath.Dir(socket), 0o755), os.Chmod(socket, 0o666)); err != nil {
		t.Fatal(err)
	}
	if out := asUser(t, stranger, []uint32{5}, socket); strings.Count(out, "denied=true") != 2 || !strings.Contains(out, "user 61002 is neither root") {
		t.Errorf("a user outside the group, with the socket open to all: %s", out)
	}
	if out := asUser(t, 0, nil, socket); !strings.Contains(out, "unmap: denied=false <nil>") {
		t.Errorf("root: %s", out)
	}
	s.Stop()
	if err := log.Close(); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(record)
	if err != nil || strings.Count(string(text), `"uid":61001`) != 1 || strings.Count(string(text), `"uid":61002`) != 2 {
		t.Errorf("the audit log, %v: %s", err, text)
	}
}
