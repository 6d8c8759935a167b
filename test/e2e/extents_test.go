package e2e

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

// piece is a range in the output of nbdinfo --map.
type piece struct {
	Offset, Length int64
	Type           int // 0: data, 3: a hole that reads as zeroes
}

func mapOf(t *testing.T, uri string) (all []piece) {
	t.Helper()
	if err := json.Unmarshal([]byte(run(t, "nbdinfo", "--map", "--json", uri)), &all); err != nil {
		t.Fatal(err)
	}
	return all
}

// holesIn reports how many bytes of pieces are holes, and whether all of some bytes
// at off are data.
func holesIn(all []piece, off, n int64) (holes int64, data bool) {
	data = true
	for _, p := range all {
		if p.Type == 3 {
			holes += p.Length
			data = data && (p.Offset >= off+n || p.Offset+p.Length <= off)
		}
	}
	return holes, data
}

// TestHolesAreLeftOut copies a sparse file with clients that ask for its holes: the
// copy has the same bytes, and the holes do not travel.
func TestHolesAreLeftOut(t *testing.T) {
	for _, tool := range []string{"nbdinfo", "nbdcopy", "qemu-img"} {
		lab.Tool(t, tool)
	}
	const size = 256 << 20
	r := newRig(t, rigOptions{size: size})
	first, second := bytes.Repeat([]byte{1}, 100000), bytes.Repeat([]byte{2}, 1<<20)
	c := r.dial()
	for off, b := range map[int64][]byte{8192: first[:98304], 100 << 20: second} {
		if _, err := c.WriteAt(b, off); err != nil {
			t.Fatal(err)
		}
	}
	for name, uri := range map[string]string{"unix": r.unixURI(), "tcp": "nbd://" + r.tcp + "/" + r.device.Name} {
		all := mapOf(t, uri)
		end := int64(0)
		for _, p := range all {
			if p.Offset != end || p.Length <= 0 {
				t.Fatalf("%s: a gap: %+v", name, all)
			}
			end += p.Length
		}
		holes, data := holesIn(all, 8192, 98304)
		_, data2 := holesIn(all, 100<<20, 1<<20)
		if !data || !data2 || holes < size-(4<<20) || end != size {
			t.Errorf("%s: %+v", name, all)
		}
	}

	before := readSectors(t, r)
	for name, copying := range map[string][]string{
		"nbdcopy":  {"nbdcopy", r.unixURI()},
		"qemu-img": {"qemu-img", "convert", "-O", "raw", "-f", "raw", r.unixURI()},
	} {
		to := filepath.Join(t.TempDir(), "copy")
		run(t, append(copying, to)...)
		if !sameFiles(t, r.image, to) {
			t.Errorf("%s: the copy differs", name)
		}
		info, err := os.Stat(to)
		if err != nil {
			t.Fatal(err)
		}
		if used := info.Sys().(*syscall.Stat_t).Blocks * 512; used > 8<<20 {
			t.Errorf("%s: the copy takes %d bytes", name, used)
		}
	}
	if read := readSectors(t, r) - before; read*512 > 16<<20 {
		t.Errorf("the copies have read %d bytes", read*512)
	}

	if err := c.Trim(100<<20, 1<<20); err != nil {
		t.Fatal(err)
	}
	if _, data := holesIn(mapOf(t, r.unixURI()), 100<<20, 1<<20); data {
		t.Error("what was discarded is no hole")
	}
	if _, err := c.WriteAt(second[:4096], 200<<20); err != nil {
		t.Fatal(err)
	}
	if _, data := holesIn(mapOf(t, r.unixURI()), 200<<20, 4096); !data {
		t.Error("what was written is a hole")
	}
}

// readSectors returns how much the users of the device have read.
func readSectors(t *testing.T, r *rig) uint64 {
	t.Helper()
	d, err := r.client.Device(r.device.Name)
	if err != nil {
		t.Fatal(err)
	}
	return d.RxSectors
}

func sameFiles(t *testing.T, a, b string) bool {
	t.Helper()
	x, err := os.ReadFile(a)
	if err != nil {
		t.Fatal(err)
	}
	y, err := os.ReadFile(b)
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Equal(x, y)
}
