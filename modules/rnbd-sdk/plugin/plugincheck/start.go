package plugincheck

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/pluginpb"
)

// gate is the check that all others build on.
var gate = []string{"start-handshake"}

var startChecks = []Check{
	{"start-handshake", "the plugin starts, answers the handshake, Describe and Configure, and opens its disk", nil, startHandshake},
	{"start-by-hand", "started without a host it says what it is, and ends with an error", gate, startByHand},
	{"start-protocol", "a host with another protocol version is told the plugin's own, or is refused", gate, startProtocol},
	{"start-ring-version", "Describe tells the plugin's own version of rings, whatever the host's is", gate, startRingVersion},
	{"start-socket", "a client without the host's certificate is refused", gate, startSocket},
	{"start-output", "standard output has the one line of the handshake and nothing before it", gate, startOutput},
	{"start-order", "AttachQueue before Configure is refused", gate, startOrder},
	{"configure-once", "a second Configure is refused", gate, configureOnce},
}

func startHandshake(t *T) {
	dir := t.tempDir()
	p, err := t.launch(&storage{dir: dir}, life{})
	if err != nil && t.o.hasDir() { // the setting may name the file of the disk
		t.newFile(dir, "disk")
		p, err = t.launch(&storage{dir: dir}, life{})
	}
	if err != nil {
		t.Fatalf("%v", err)
	}
	t.Runner.info = p.Info()
	ctx, cancel := context.WithTimeout(t.ctx, endTime)
	defer cancel()
	_ = p.Stop(ctx)
	t.one()
}

// raw starts the program by hand with more environment.
func (t *T) raw(env ...string) *byHand {
	if t.o.Backend != nil {
		t.Skipf("needs the plugin as a process")
	}
	p, err := startProcess(t.o.Executable, t.tempDir(), env)
	t.must("start the program", err)
	t.Cleanup(p.end)
	return p
}

func startByHand(t *T) {
	if t.o.Backend != nil {
		t.Skipf("needs the plugin as a process")
	}
	ctx, cancel := context.WithTimeout(t.ctx, 2*endTime)
	defer cancel()
	c := exec.CommandContext(ctx, t.o.Executable)
	c.Env = passedOn()
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.WaitDelay = time.Second
	out := &bounded{most: 4096}
	c.Stdout, c.Stderr = out, out
	err := c.Run()
	var status *exec.ExitError
	switch {
	case ctx.Err() != nil:
		t.Fatalf("started by hand, it has not ended after %v", 2*endTime)
	case err == nil:
		t.Fatalf("started by hand, it ends with status 0, as if it had done something")
	case !errors.As(err, &status):
		t.Fatalf("started by hand: %v", err)
	case len(bytes.TrimSpace(out.Bytes())) == 0:
		t.Fatalf("started by hand, it says nothing")
	}
}

func startProtocol(t *T) {
	p := t.raw("PLUGIN_PROTOCOL_VERSIONS=99")
	line, err := p.hello(2 * endTime)
	if err != nil {
		return // it has refused the host
	}
	fields := strings.Split(line, "|")
	if len(fields) > 1 && fields[1] == "99" {
		t.Fatalf("the handshake line says that it speaks version 99: %q", line)
	}
}

func startRingVersion(t *T) {
	s := t.plain()
	h := t.start(s, life{})
	resp, err := pluginpb.NewPluginClient(h.p.Probe().Conn()).Describe(t.ctx, &pluginpb.DescribeRequest{RingVersion: 99})
	if err == nil && resp.GetRingVersion() == 99 {
		t.Fatalf("Describe says that the rings of the plugin have version 99, because the host's have")
	}
}

func startOutput(t *T) {
	p := t.raw("PLUGIN_PROTOCOL_VERSIONS=1")
	line, err := p.hello(callTime)
	t.must("the handshake line", err)
	if err := checkHello(line); err != nil {
		t.Fatalf("the first line on standard output is %q: %v", line, err)
	}
	time.Sleep(quietTime)
	if more := p.out.Bytes(); bytes.Count(more, []byte("\n")) > 1 {
		t.Fatalf("standard output has more than the handshake line: %q", more[:min(len(more), 200)])
	}
}

// checkHello checks the line 1|1|unix|PATH|grpc|CERTIFICATE.
func checkHello(line string) error {
	f := strings.Split(line, "|")
	switch {
	case len(f) < 6:
		return fmt.Errorf("it has %d fields, want 1|1|unix|PATH|grpc|CERTIFICATE", len(f))
	case f[0] != "1" || f[2] != "unix" || f[4] != "grpc" || f[5] == "":
		return errors.New("want 1|1|unix|PATH|grpc|CERTIFICATE")
	}
	_, err := strconv.Atoi(f[1])
	return err
}

func startSocket(t *T) {
	p := t.raw("PLUGIN_PROTOCOL_VERSIONS=1")
	line, err := p.hello(callTime)
	t.must("the handshake line", err)
	t.must("the handshake line", checkHello(line))
	own, err := p.dial(line, p.host)
	t.must("connect", err)
	defer own.Close()
	ctx, cancel := context.WithTimeout(t.ctx, callTime)
	defer cancel()
	if _, err := pluginpb.NewPluginClient(own).Describe(ctx, &pluginpb.DescribeRequest{RingVersion: 1}); err != nil {
		t.Fatalf("Describe from the host: %v", err)
	}
	stranger, err := newCertificate()
	t.must("certificate", err)
	other, err := p.dial(line, stranger)
	t.must("connect", err)
	defer other.Close()
	if _, err := pluginpb.NewPluginClient(other).Describe(ctx, &pluginpb.DescribeRequest{RingVersion: 1}); err == nil {
		t.Fatalf("a client with another certificate than PLUGIN_CLIENT_CERT is served")
	}
}

func startOrder(t *T) {
	p := t.raw("PLUGIN_PROTOCOL_VERSIONS=1")
	line, err := p.hello(callTime)
	t.must("the handshake line", err)
	t.must("the handshake line", checkHello(line))
	c, err := p.dial(line, p.host)
	t.must("connect", err)
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.ctx, callTime)
	defer cancel()
	if err := p.attachQueue(ctx, c); err == nil {
		t.Fatalf("AttachQueue before Configure succeeds")
	}
	if ctx.Err() != nil {
		t.Fatalf("AttachQueue before Configure has no answer after %v", callTime)
	}
}

func configureOnce(t *T) {
	s := t.plain()
	h := t.start(s, life{})
	err := h.try(func(ctx context.Context) error {
		_, err := pluginpb.NewPluginClient(h.p.Probe().Conn()).Configure(ctx, &pluginpb.ConfigureRequest{Settings: t.o.config(s.dir), Pumps: 1})
		return err
	})
	if err == nil {
		t.Fatalf("a second Configure succeeds")
	}
}
