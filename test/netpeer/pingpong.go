package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
)

const (
	pingSize = 64 // bytes of a message
	patience = time.Second
)

// echo serves until it is killed.
func echo(addr string) error {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	u, err := net.ListenPacket("udp", addr)
	if err != nil {
		return err
	}
	go func() {
		b := make([]byte, 2048)
		for {
			n, from, err := u.ReadFrom(b)
			if err != nil {
				fmt.Fprintln(os.Stderr, "netpeer:", err)
				os.Exit(1)
			}
			u.WriteTo(b[:n], from) // what is lost is the client's matter
		}
	}()
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer c.Close()
			io.Copy(c, c)
		}()
	}
}

// Result is what ping prints, as JSON. Times are in nanoseconds.
type Result struct {
	Trips   uint64        `json:"trips"`
	Lost    uint64        `json:"lost"`
	Elapsed time.Duration `json:"elapsed_ns"`
	Mean    time.Duration `json:"mean_ns"`
	P50     time.Duration `json:"p50_ns"`
	P99     time.Duration `json:"p99_ns"`
}

// ping makes round trips, one after the other, and writes a Result.
func ping(network, addr string, d time.Duration, out io.Writer) error {
	c, err := net.DialTimeout(network, addr, 10*time.Second)
	if err != nil {
		return err
	}
	defer c.Close()
	var r Result
	var h latency.Fine
	b := make([]byte, pingSize)
	began := time.Now()
	for number := byte(0); time.Since(began) < d; number++ {
		b[0] = number
		sent := time.Now()
		if _, err := c.Write(b); err != nil {
			return err
		}
		ok, err := answered(c, b, number)
		if err != nil {
			return err
		}
		if !ok {
			r.Lost++
			continue
		}
		h.Record(int64(time.Since(sent)))
		r.Trips++
	}
	s := h.Snapshot()
	r.Elapsed, r.Mean, r.P50, r.P99 = time.Since(began), s.Mean(), s.Quantile(0.5), s.Quantile(0.99)
	return json.NewEncoder(out).Encode(r)
}

// answered waits for the answer with the number given. It reports false if none
// came.
func answered(c net.Conn, b []byte, number byte) (bool, error) {
	c.SetReadDeadline(time.Now().Add(patience))
	for {
		_, err := io.ReadFull(c, b)
		if e, ok := err.(net.Error); ok && e.Timeout() && c.LocalAddr().Network() == "udp" {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		if b[0] == number {
			return true, nil
		}
	}
}
