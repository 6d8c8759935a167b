package main

import "fmt"

// workload is one way to use devices.
type workload struct {
	Name    string `json:"name"`
	Write   bool   `json:"write"`
	Seq     bool   `json:"sequential"`
	Block   int    `json:"block"`             // bytes
	Depth   int    `json:"depth"`             // requests in flight of each job
	Jobs    int    `json:"jobs"`              // each with a thread, of fio each with a connection
	Devices int    `json:"devices,omitempty"` // that the jobs are spread over; 0: one
	Net     string `json:"net,omitempty"`     // of networks: stream (of TCP, Jobs at once), or round trips by tcp or udp
}

// random is 4 KiB at random places.
func random(write bool, depth, jobs int) workload {
	w := workload{Name: fmt.Sprintf("4k-rand%s-d%d", verb(write), depth), Write: write, Block: 4096, Depth: depth, Jobs: jobs}
	if jobs > 1 {
		w.Name += fmt.Sprintf("x%d", jobs)
	}
	return w
}

// sequential is 1 MiB after 1 MiB, 8 in flight.
func sequential(write bool) workload {
	return workload{Name: "1m-seq" + verb(write) + "-d8", Write: write, Seq: true, Block: 1 << 20, Depth: 8, Jobs: 1}
}

// spread is 64 requests of 4 KiB in flight, over some devices.
func spread(write bool, devices int) workload {
	w := random(write, 64/devices, devices)
	w.Name, w.Devices = fmt.Sprintf("4k-rand%s-%ddev", verb(write), devices), devices
	return w
}

// idle is no load at all.
func idle() workload { return workload{Name: "idle"} }

// streams are connections of TCP that send one way.
func streams(n int) workload {
	return workload{Name: fmt.Sprintf("tcp-stream-%d", n), Net: "stream", Write: true, Jobs: n}
}

// roundTrips are small messages and their answers, one after the other.
func roundTrips(protocol string) workload {
	return workload{Name: protocol + "-round-trips", Net: protocol, Depth: 1, Jobs: 1}
}

func verb(write bool) string {
	if write {
		return "write"
	}
	return "read"
}

// fioMode is fio's name for it.
func (w workload) fioMode() string {
	if w.Seq {
		return verb(w.Write)
	}
	return "rand" + verb(w.Write)
}
