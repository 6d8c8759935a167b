package mapline

import (
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

func TestR160_MapLine(t *testing.T) {
	long := strings.Repeat("n", 255)
	const cpus = 8
	const base = "sessname=s device_path=/d "
	req := func(change func(*Line)) Line {
		m := Line{Session: "s", Path: "/d", Mode: blk.ReadWrite, Port: 1234}
		if change != nil {
			change(&m)
		}
		return m
	}
	paths := func(p ...string) Line { return req(func(m *Line) { m.Paths = p }) }
	for _, c := range []struct {
		name, line string
		want       Line
	}{
		{"the two keys that are needed", base, req(nil)},
		{"any order, many blanks, white space around", "\t  device_path=/d   sessname=s \n", req(nil)},
		{"no newline", "device_path=/d sessname=s", req(nil)},
		{"the last of two counts", "sessname=r sessname=s device_path=/d", req(nil)},
		{"values may have an equals sign", "sessname=s device_path=a=b", req(func(m *Line) { m.Path = "a=b" })},
		{"a tab belongs to its word", "sessname=s device_path=a\tb", req(func(m *Line) { m.Path = "a\tb" })},
		{"255 characters are cut to 254", "sessname=" + long + " device_path=" + long,
			req(func(m *Line) { m.Session, m.Path = long[:254], long[:254] })},
		{"read-only", base + "access_mode=ro", req(func(m *Line) { m.Mode = blk.ReadOnly })},
		{"read-write", base + "access_mode=rw", req(nil)},
		{"migration", base + "access_mode=migration", req(func(m *Line) { m.Mode = blk.Migration })},
		{"IPv4", base + "path=ip:10.0.0.1", paths("10.0.0.1:1234")},
		{"IPv6", base + "path=ip:fe80::1", paths("[fe80::1]:1234")},
		{"source with comma", base + "path=ip:10.0.0.2,ip:10.0.0.1", paths("10.0.0.2@10.0.0.1:1234")},
		{"source with at sign", base + "path=ip:fe80::2@ip:fe80::1", paths("fe80::2@[fe80::1]:1234")},
		{"GID of an IPv4 address", base + "path=gid:0000:0000:0000:0000:0000:ffff:0a00:0001", paths("gid:[0000:0000:0000:0000:0000:ffff:0a00:0001]:1234")},
		{"GID", base + "path=gid:fe80::2,gid:fe80::1",
			paths("gid:fe80:0000:0000:0000:0000:0000:0000:0002@gid:[fe80:0000:0000:0000:0000:0000:0000:0001]:1234")},
		{"IPv6 with a zone", base + "path=ip:[fe80::2%eth0]@ip:[fe80::1%eth0]%rocev2", paths("[fe80::2%eth0]@[fe80::1%eth0]:1234%rocev2")},
		{"fabric", base + "path=ip:10.0.0.2@ip:10.0.0.1%rocev2", paths("10.0.0.2@10.0.0.1:1234%rocev2")},
		{"six paths", base + strings.Repeat("path=ip:10.0.0.1 ", 6),
			paths("10.0.0.1:1234", "10.0.0.1:1234", "10.0.0.1:1234", "10.0.0.1:1234", "10.0.0.1:1234", "10.0.0.1:1234")},
		{"dest_port counts for the paths after it", base + "path=ip:10.0.0.1 dest_port=99 path=ip:10.0.0.2",
			req(func(m *Line) { m.Port, m.Paths = 99, []string{"10.0.0.1:1234", "10.0.0.2:99"} })},
		{"dest_port 0", base + "dest_port=0", req(func(m *Line) { m.Port = 0 })},
		{"dest_port 65535", base + "dest_port=65535", req(func(m *Line) { m.Port = 65535 })},
		{"no poll queues", base + "nr_poll_queues=0", req(nil)},
		{"one poll queue", base + "nr_poll_queues=1", req(func(m *Line) { m.PollQueues = 1 })},
		{"poll queues for all CPUs", base + "nr_poll_queues=-1", req(func(m *Line) { m.PollQueues = cpus })},
		{"as many poll queues as CPUs", base + "nr_poll_queues=" + strconv.Itoa(cpus), req(func(m *Line) { m.PollQueues = cpus })},
		{"older line, many queues", base + "input_mode=mq io_mode=blockio", req(func(m *Line) { m.InputMode, m.IOMode = "mq", "blockio" })},
		{"older line, one queue", base + "input_mode=rq io_mode=fileio", req(func(m *Line) { m.InputMode, m.IOMode = "rq", "fileio" })},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := Parse(c.line, cpus)
			if err != nil || !reflect.DeepEqual(got, c.want) {
				t.Errorf("%q\n got %+v, %v\nwant %+v", c.line, got, err, c.want)
			}
		})
	}
	for _, c := range []struct {
		name, line string
		want       syscall.Errno
	}{
		{"empty", "", syscall.EINVAL},
		{"white space", " \n\t ", syscall.EINVAL},
		{"no session", "device_path=/d path=ip:10.0.0.1", syscall.EINVAL},
		{"no device path", "sessname=s path=ip:10.0.0.1", syscall.EINVAL},
		{"a tab does not part words", "sessname=s\tdevice_path=/d", syscall.EINVAL},
		{"unknown key", base + "color=red", syscall.EINVAL},
		{"key in capitals", base + "Path=ip:10.0.0.1", syscall.EINVAL},
		{"a word without value", base + "path", syscall.EINVAL},
		{"empty value", base + "path=", syscall.EINVAL},
		{"empty session", "sessname= device_path=/d", syscall.EINVAL},
		{"session of 256 characters", "device_path=/d sessname=n" + long, syscall.EINVAL},
		{"device path of 256 characters", "sessname=s device_path=n" + long, syscall.EINVAL},
		{"slash in the session", "device_path=/d sessname=a/b", syscall.EINVAL},
		{"dot in the session", "device_path=/d sessname=a.b", syscall.EINVAL},
		{"seventh path", base + strings.Repeat("path=ip:10.0.0.1 ", 7), syscall.ENOMEM},
		{"no ip: before the destination", base + "path=10.0.0.1", syscall.EPROTONOSUPPORT},
		{"unknown word before the destination", base + "path=dns:host", syscall.EPROTONOSUPPORT},
		{"unknown word before the second address", base + "path=ip:10.0.0.2,10.0.0.1", syscall.EPROTONOSUPPORT},
		{"bad destination", base + "path=ip:10.0.0.256", syscall.EINVAL},
		{"no destination", base + "path=ip:", syscall.EINVAL},
		{"GID with a zone", base + "path=gid:[fe80::1%eth0]", syscall.EINVAL},
		{"no zone after the sign", base + "path=ip:[fe80::1%]", syscall.EINVAL},
		{"host name", base + "path=ip:storage", syscall.EINVAL},
		{"IPv4 as a GID", base + "path=gid:10.0.0.1", syscall.EINVAL},
		{"bad source", base + "path=ip:10.0.0.256,ip:10.0.0.1", syscall.EINVAL},
		{"source without ip:", base + "path=10.0.0.2,ip:10.0.0.1", syscall.EINVAL},
		{"empty source", base + "path=,ip:10.0.0.1", syscall.EINVAL},
		{"three addresses", base + "path=ip:10.0.0.3,ip:10.0.0.2,ip:10.0.0.1", syscall.EINVAL},
		{"two families", base + "path=ip:10.0.0.2,ip:fe80::1", syscall.EINVAL},
		{"a GID and an IP address", base + "path=gid:fe80::2,ip:fe80::1", syscall.EINVAL},
		{"no fabric after the sign", base + "path=ip:10.0.0.1%", syscall.EINVAL},
		{"two fabrics", base + "path=ip:10.0.0.1%a%b", syscall.EINVAL},
		{"port beside the address", base + "path=ip:10.0.0.1:99", syscall.EINVAL},
		{"port too large", base + "dest_port=65536", syscall.EINVAL},
		{"negative port", base + "dest_port=-1", syscall.EINVAL},
		{"port in words", base + "dest_port=http", syscall.EINVAL},
		{"access mode in capitals", base + "access_mode=RO", syscall.EINVAL},
		{"unknown access mode", base + "access_mode=wo", syscall.EINVAL},
		{"too many poll queues", base + fmt.Sprint("nr_poll_queues=", cpus+1), syscall.EINVAL},
		{"poll queues -2", base + "nr_poll_queues=-2", syscall.EINVAL},
		{"poll queues in words", base + "nr_poll_queues=all", syscall.EINVAL},
		{"unknown input mode", base + "input_mode=sq", syscall.EINVAL},
		{"unknown io mode", base + "io_mode=mmap", syscall.EINVAL},
		{"NUL", base + "\x00", syscall.EINVAL},
		{"junk", "\xff\xfe\x80 \x01", syscall.EINVAL},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got, err := Parse(c.line, cpus); !errors.Is(err, c.want) {
				t.Errorf("%q: got %+v, %v; want %v", c.line, got, err, c.want)
			}
		})
	}
}

// FuzzParse: accepted input is within the limits, and its own spelling means
// the same.
func FuzzParse(f *testing.F) {
	f.Add("sessname=s path=ip:10.0.0.2@ip:10.0.0.1%iwarp dest_port=7 path=gid:fe80::1 device_path=/dev/ram0 access_mode=ro")
	f.Add("sessname=s device_path=a=b nr_poll_queues=-1 input_mode=rq io_mode=fileio\n")
	f.Fuzz(func(t *testing.T, line string) {
		m, err := Parse(line, 8)
		if err != nil {
			return
		}
		if m.Session == "" || len(m.Session) > 254 || strings.ContainsAny(m.Session, "/.\x00") {
			t.Errorf("session %q", m.Session)
		}
		if m.Path == "" || len(m.Path) > 254 || len(m.Paths) > maxPaths {
			t.Errorf("path %q, paths %q", m.Path, m.Paths)
		}
		for _, p := range m.Paths {
			if q, err := ParsePath(p); err != nil && !strings.Contains(p, ":0") || err == nil && q.String() != p {
				t.Errorf("path %q: %v, %v", p, q, err)
			}
		}
		again := m
		again.Paths = nil
		spelled := fmt.Sprintf("sessname=%s device_path=%s dest_port=%d access_mode=%v nr_poll_queues=%d",
			m.Session, m.Path, m.Port, m.Mode, m.PollQueues)
		if m.InputMode != "" {
			spelled += " input_mode=" + m.InputMode
		}
		if m.IOMode != "" {
			spelled += " io_mode=" + m.IOMode
		}
		got, err := Parse(spelled, 8)
		if err == nil && !reflect.DeepEqual(got, again) && strings.TrimRight(m.Path, "\t\n\v\f\r") == m.Path {
			t.Errorf("%q was read as %+v, its spelling %q as %+v", line, m, spelled, got)
		}
		if err != nil {
			t.Errorf("%q was accepted, its spelling %q not: %v", line, spelled, err)
		}
	})
}
