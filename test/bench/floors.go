package main

import (
	"context"
	"fmt"
	"strconv"

	"github.com/rnbd-go/rnbd/test/lab"
)

// The skeletons of the ways to a disk, all of them command floor: through the NBD front
// end, by the library to a disk in memory, the same in datagrams, to a file and to a loop
// device.
const (
	floorSocket    = "floor, NBD front end"
	floorLibrary   = "floor, client library"
	floorDatagrams = "floor, datagrams"
	floorFile      = "floor, a file"
	floorLoop      = "floor, a loop device"
)

// floors names the skeleton with the hand-overs of a target and no more.
var floors = map[string]string{
	frontEnd: floorSocket, direct: floorLibrary, overRoCE: floorDatagrams, ioFileio: floorFile, ioBlockio: floorLoop,
}

// floor names the skeleton of a claim, if there is one.
func (c claim) floor() string {
	switch c.id {
	case "P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8", "P11", "P14", "U1", "U2", "U3", "U7", "U8", "U9":
		return floors[c.ours]
	}
	return ""
}

// addFloor starts the skeletons with a disk in memory.
func (s *site) addFloor(ctx context.Context) error {
	if s.wants(floorLibrary) {
		if err := s.addFloorLibrary(floorLibrary); err != nil {
			return err
		}
	}
	if s.wants(floorDatagrams) {
		if err := s.addFloorLibrary(floorDatagrams, "-datagrams"); err != nil {
			return err
		}
	}
	if !s.wants(floorSocket) || !s.have(floorSocket, "fio") {
		return nil
	}
	path, err := s.program("bench/floor")
	if err != nil {
		return err
	}
	p, socket, err := s.unix(ctx, "floor", func(socket string) []string {
		return []string{path, "-socket", socket, "-size", strconv.FormatInt(s.Size, 10), s.floorSums()}
	})
	if err != nil {
		return err
	}
	if err := fillExport(ctx, socket, ""); err != nil {
		return err
	}
	engine := nbdEngine("nbd+unix:///?socket=" + socket)
	s.addFio(floorSocket, engine, p.pid()).verify = s.fioVerify(engine)
	return nil
}

// addFloorLibrary starts the skeleton that makes its load itself.
func (s *site) addFloorLibrary(name string, flags ...string) error {
	path, err := s.program("bench/floor")
	if err != nil {
		return err
	}
	argv := append([]string{path, "-library", "-size", strconv.FormatInt(s.Size, 10), s.floorSums()}, flags...)
	g, t, err := s.addGenerator(name, generatorConfig{program: argv, devices: []string{"disk"}})
	if err == nil {
		t.servers = lab.Children(g.pid())
	}
	return err
}

// floorSums is the skeleton's flag for checksums.
func (s *site) floorSums() string { return fmt.Sprintf("-sums=%t", s.FloorSums) }

// addFloorDisk starts the skeleton with a store of a plugin's.
func (s *site) addFloorDisk(name, path string, loop bool) error {
	if !s.wants(name) {
		return nil
	}
	flags := []string{"-file", path}
	if loop {
		flags = append(flags, "-direct")
	}
	return s.addFloorLibrary(name, flags...)
}
