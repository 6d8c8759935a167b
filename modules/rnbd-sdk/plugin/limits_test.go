package plugin

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"google.golang.org/grpc"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/pluginpb"
)

// lyingStorage answers as a plugin whose disks have limits that no disk can have.
type lyingStorage struct {
	pluginpb.StorageClient
	limits *pluginpb.Limits
	closes atomic.Int32
}

func (s *lyingStorage) OpenDisk(context.Context, *pluginpb.OpenDiskRequest, ...grpc.CallOption) (*pluginpb.OpenDiskResponse, error) {
	return &pluginpb.OpenDiskResponse{Limits: s.limits}, nil
}

func (s *lyingStorage) ResizeDisk(context.Context, *pluginpb.ResizeDiskRequest, ...grpc.CallOption) (*pluginpb.ResizeDiskResponse, error) {
	return &pluginpb.ResizeDiskResponse{Limits: s.limits}, nil
}

func (s *lyingStorage) CloseDisk(context.Context, *pluginpb.CloseDiskRequest, ...grpc.CallOption) (*pluginpb.CloseDiskResponse, error) {
	s.closes.Add(1)
	return &pluginpb.CloseDiskResponse{}, nil
}

// A host refuses limits that no disk can have, whatever the plugin has checked, and closes
// the disk.
func TestProcess_LimitsOfNoDisk(t *testing.T) {
	p := startMapped(t, &mapped{memory: newMemory()})
	right := p.disks
	for want, l := range map[string]*pluginpb.Limits{
		"logical block size 513":               {Size: 513 << 10, LogicalBlockSize: 513},
		"logical block size 0":                 {Size: 1 << 20},
		"logical block size 8192":              {Size: 1 << 20, LogicalBlockSize: 8192},
		"physical block size 4097":             {Size: 1 << 20, LogicalBlockSize: 512, PhysicalBlockSize: 4097},
		"size 9223372036854775808: a disk has": {Size: 1 << 63, LogicalBlockSize: 512},
		"size 1000 is no multiple":             {Size: 1000, LogicalBlockSize: 512},
	} {
		lies := &lyingStorage{StorageClient: right, limits: l}
		p.disks = lies
		_, err := p.OpenStorage(testContext(t), OpenRequest{Device: 9, Name: "d"})
		if !errors.Is(err, syscall.EPROTO) || !strings.Contains(err.Error(), want) {
			t.Errorf("open: %v, want %s", err, want)
		}
		if !eventually(func() bool { return lies.closes.Load() == 1 }) {
			t.Errorf("%s: the disk is not closed", want)
		}
		if _, err := p.ResizeDisk(testContext(t), 9); !errors.Is(err, syscall.EPROTO) || !strings.Contains(err.Error(), want) {
			t.Errorf("resize: %v, want %s", err, want)
		}
	}
}
