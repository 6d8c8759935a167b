package e2e

import (
	"bytes"
	"crypto/rand"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/nbdclient"
)

// TestR190_FlagsOfZeroesReachTheFile sends write-zeroes with each set of flags from an NBD
// client, and looks at what the file has allocated on the server.
func TestR190_FlagsOfZeroesReachTheFile(t *testing.T) {
	const size, part = 64 << 20, 8 << 20
	r := newRig(t, rigOptions{size: size})
	c := r.dial()
	allocated := func() int64 {
		var st unix.Stat_t
		if err := unix.Stat(r.image, &st); err != nil {
			t.Fatal(err)
		}
		return st.Blocks * 512
	}
	full, zeroes := bytes.Repeat([]byte{1}, part), make([]byte, part)
	for _, x := range []struct {
		name  string
		flags uint16
		holes bool
	}{
		{"zeroes", 0, true},
		{"zeroes with FUA", nbdclient.FUA, true},
		{"zeroes without a hole", nbdclient.NoHole, false},
		{"zeroes without a hole, with FUA", nbdclient.NoHole | nbdclient.FUA, false},
	} {
		for _, before := range []string{"data", "a hole"} {
			t.Run(x.name+" over "+before, func(t *testing.T) {
				if err := c.Trim(0, size); err != nil {
					t.Fatal(err)
				}
				if before == "data" {
					if _, err := c.WriteAt(full, part); err != nil {
						t.Fatal(err)
					}
				}
				if err := c.WriteZeroes(part, part, x.flags); err != nil {
					t.Fatal(err)
				}
				if got := allocated(); x.holes && got != 0 || !x.holes && got < part {
					t.Errorf("%d bytes are allocated", got)
				}
				got := make([]byte, part)
				if _, err := c.ReadAt(got, part); err != nil || !bytes.Equal(got, zeroes) {
					t.Errorf("what is read are no zeroes (%v)", err)
				}
			})
		}
	}
}

// TestCopyOfASparseImageStaysSparse copies an image with little data over a sparse
// export, with the tools that users take for it.
func TestCopyOfASparseImageStaysSparse(t *testing.T) {
	const size, data = 512 << 20, 4 << 20
	for name, copying := range map[string][]string{
		"nbdcopy":  {"nbdcopy"},
		"qemu-img": {"qemu-img", "convert", "-n", "-f", "raw", "-O", "raw"},
	} {
		t.Run(name, func(t *testing.T) {
			lab.Tool(t, copying[0])
			r := newRig(t, rigOptions{size: size})
			from := filepath.Join(t.TempDir(), "image")
			content := make([]byte, data)
			rand.Read(content)
			f, err := os.Create(from)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if _, err := f.WriteAt(content, 100<<20); err != nil {
				t.Fatal(err)
			}
			if err := f.Truncate(size); err != nil {
				t.Fatal(err)
			}
			run(t, append(copying, from, r.unixURI())...)
			var st unix.Stat_t
			if err := unix.Stat(r.image, &st); err != nil {
				t.Fatal(err)
			}
			if got := st.Blocks * 512; got < data || got > 2*data {
				t.Errorf("%d bytes are allocated for %d bytes of data", got, data)
			}
			if !sameFiles(t, from, r.image) {
				t.Error("the copy differs")
			}
		})
	}
}
