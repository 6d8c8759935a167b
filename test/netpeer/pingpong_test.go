package main

import (
	"bytes"
	"encoding/json"
	"net"
	"testing"
	"time"
)

func TestRoundTripsAreCounted(t *testing.T) {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := free.Addr().String()
	free.Close()
	failed := make(chan error, 1)
	go func() { failed <- echo(addr) }() // ends with the process
	for _, network := range []string{"tcp", "udp"} {
		var out bytes.Buffer
		for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			out.Reset()
			err := ping(network, addr, 20*time.Millisecond, &out)
			if err == nil {
				break
			}
			select {
			case err := <-failed:
				t.Fatal(err)
			default:
			}
			if time.Now().After(end) {
				t.Fatalf("%s: %v", network, err)
			}
		}
		var r Result
		if err := json.Unmarshal(out.Bytes(), &r); err != nil || r.Trips == 0 || r.P50 <= 0 || r.P99 < r.P50 || r.Elapsed < 20*time.Millisecond {
			t.Errorf("%s: %+v, %v", network, r, err)
		}
	}
}

func TestWrongArguments(t *testing.T) {
	for _, args := range [][]string{nil, {"wireguard", "wg0", "x"}, {"ping", "tcp", "127.0.0.1:1", "x"}, {"echo"}} {
		if run(args) == nil {
			t.Errorf("%q has no error", args)
		}
	}
}
