package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
)

const diskSize = 64 << 20

// place is a client and a server, both with their plugins, and a mapped device.
type place struct {
	lab   *lab.Lab
	uri   string
	roles map[int]string // of processes, by their pid
}

func openPlace(flags []string) (p *place, err error) {
	p = &place{roles: map[int]string{}}
	if p.lab, err = lab.Open(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			p.lab.Close()
		}
	}()
	server, err := p.lab.StartServer(lab.ServerOptions{SearchPath: os.TempDir(), Plugins: []string{"memory"},
		Extra: append([]string{"--io-mode", "ram*=memory", "--io-config", "memory:size=" + strconv.Itoa(diskSize), "--log-level", "warn"}, flags...)})
	if err != nil {
		return nil, err
	}
	client, err := p.lab.StartClient(lab.ClientOptions{Extra: append([]string{"--log-level", "warn"}, flags...)})
	if err != nil {
		return nil, err
	}
	d, err := client.Map("ram", server)
	if err != nil {
		return nil, fmt.Errorf("map: %w", err)
	}
	p.uri = client.URI(d.Name)
	p.roles[server.PID()], p.roles[client.PID()] = roleServer, roleClient
	for program, role := range map[string]string{"io-memory": rolePlugin, "frontend-nbd": roleFrontend} {
		pid, err := childOf(program, server.PID(), client.PID())
		if err != nil {
			return nil, err
		}
		p.roles[pid] = role
	}
	return p, nil
}

// childOf finds a plugin's process below the daemons.
func childOf(program string, daemons ...int) (int, error) {
	for _, pid := range daemons {
		if child := lab.ChildOf(pid, program); child != 0 {
			return child, nil
		}
	}
	return 0, fmt.Errorf("no process of %s is below the daemons %v", program, daemons)
}

// threads returns the roles of all threads.
func (p *place) threads() map[int]string {
	all := map[int]string{}
	for pid, role := range p.roles {
		tasks, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
		for _, task := range tasks {
			if tid, err := strconv.Atoi(task.Name()); err == nil {
				all[tid] = role
			}
		}
	}
	return all
}

// load is what fio does.
type load struct {
	rw    string
	block int
}

func (l load) large() bool { return l.block >= 1<<20 }

func (l load) String() string {
	if l.large() {
		return fmt.Sprintf("%d MiB %s, 1 in flight", l.block>>20, l.rw)
	}
	return fmt.Sprintf("%d KiB rand%s, 1 in flight", l.block>>10, l.rw)
}

// run has fio make the load for d and calls during in the meantime. It returns fio's
// median latency in microseconds.
func (p *place) run(ctx context.Context, l load, d time.Duration, during func() error) (p50 float64, err error) {
	rw := "rand" + l.rw
	if l.large() {
		rw = l.rw
	}
	cmd := exec.CommandContext(ctx, "fio", "--name=timeline", "--ioengine=nbd", "--uri="+p.uri, "--thread", "--rw="+rw, "--bs="+strconv.Itoa(l.block),
		"--iodepth=1", "--size="+strconv.Itoa(diskSize), "--time_based", "--runtime="+strconv.FormatInt(d.Milliseconds(), 10)+"ms",
		"--norandommap", "--lat_percentiles=1", "--clat_percentiles=0", "--output-format=json")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, os.Stderr
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("fio: %w", err)
	}
	p.roles[cmd.Process.Pid] = roleApp
	defer delete(p.roles, cmd.Process.Pid)
	time.Sleep(d / 3) // its start, and the first requests
	if during != nil {
		err = during()
	}
	if werr := cmd.Wait(); err == nil && werr != nil {
		err = fmt.Errorf("fio: %w", werr)
	}
	if err != nil {
		return 0, err
	}
	return median(out.Bytes(), l.rw)
}

// median reads fio's output.
func median(b []byte, rw string) (float64, error) {
	if i := bytes.IndexByte(b, '{'); i > 0 {
		b = b[i:] // notes
	}
	type side struct {
		Lat struct {
			Percentile map[string]float64 `json:"percentile"`
		} `json:"lat_ns"`
	}
	var r struct{ Jobs []struct{ Read, Write side } }
	if err := json.Unmarshal(b, &r); err != nil || len(r.Jobs) != 1 {
		return 0, fmt.Errorf("fio says %.200s: %w", b, err)
	}
	s := r.Jobs[0].Read
	if rw == "write" {
		s = r.Jobs[0].Write
	}
	return s.Lat.Percentile["50.000000"] / 1e3, nil
}
