package client

import (
	"os"
	"reflect"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// TestStateOfAnotherVersion reads or writes the state file that the environment names.
// test/versions runs it in the trees of two versions, for one to read what the other has
// written. So this file uses only what both have.
func TestStateOfAnotherVersion(t *testing.T) {
	reconnects := 7
	want := savedState{Version: stateVersion, Devices: []savedDevice{{
		Name: "rnbd3", Path: "vg0/lv1", Session: "s1", Paths: []string{"10.0.0.2@10.0.0.1", "10.1.0.1%iwarp"}, Port: 1234, PollQueues: 2,
		Access: "ro", IOMode: "blockio", Loss: "queue:30s", Frontend: "ublk", Settings: map[string]string{"number": "3"}, Slots: 64,
		Identity: "ABC", Location: "/dev/ublkb3", Known: &deviceFacts{Volume: 1 << 63, Block: 4096, MaxIO: 126976, WriteCache: true, FUA: true},
		sessionTuning: sessionTuning{Policy: "round-robin", MaxReconnects: &reconnects},
	}}, Leftovers: []savedLeftover{{
		Name: "rnbd4", Frontend: "nbd", Settings: map[string]string{"attach": "yes"}, Slots: 8, SlotSize: 4096,
		Limits: blk.Limits{Size: 1 << 30, LogicalBlockSize: 512}, Identity: "DEF", Location: "?",
	}}}
	if name := os.Getenv("RNBD_STATE_WRITE"); name != "" {
		if err := writeState(name, &want); err != nil {
			t.Fatal(err)
		}
	}
	name := os.Getenv("RNBD_STATE_READ")
	if name == "" {
		return
	}
	got, err := loadState(name)
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("read %+v, %v\nwant %+v", got, err, want)
	}
	if _, err := got.Devices[0].mapRequest(); err != nil {
		t.Error(err)
	}
}
