package nemesis

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// wire is a network between two namespaces: packets that the system sends
// into one end are read here and handed to the other end, or dropped.
type wire struct {
	ends   [2]*os.File // the client's, the server's
	effect atomic.Pointer[[2]effect]
	wg     sync.WaitGroup
}

// effect is the treatment of packets of one direction.
type effect struct {
	cut       bool
	flap      time.Duration // half of the period of a wire that is cut and whole in turn
	lose      float64       // parts of 1
	corrupt   float64
	duplicate float64
	reorder   float64
	delay     time.Duration
}

const (
	toServer = iota // direction: index of the end that sends
	toClient
	mtu = 4300 // RoCEv2 packets of 4 KiB fit
)

// newWire makes a wire with one end of the given name and address in each
// namespace.
func newWire(name string, namespaces, addrs [2]string) (*wire, error) {
	w := &wire{}
	w.effect.Store(&[2]effect{})
	for i := range w.ends {
		f, err := openTUN(name + string('a'+rune(i)))
		if err != nil {
			w.close()
			return nil, err
		}
		w.ends[i] = f
		if err := place(name+string('a'+rune(i)), namespaces[i], addrs[i]); err != nil {
			w.close()
			return nil, err
		}
	}
	for i := range w.ends {
		w.wg.Go(func() { w.carry(i) })
	}
	return w, nil
}

// openTUN makes a network device.
func openTUN(name string) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/net/tun: %w", err)
	}
	r, err := unix.NewIfreq(name)
	if err == nil {
		r.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, r)
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("make device %s: %w", name, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// place moves a device into a namespace and brings it up with an address.
func place(dev, namespace, addr string) error {
	for _, args := range [][]string{
		{"link", "set", dev, "netns", namespace},
		{"-n", namespace, "addr", "add", addr + "/24", "dev", dev},
		{"-n", namespace, "link", "set", dev, "mtu", fmt.Sprint(mtu), "up"},
	} {
		if err := ip(args...); err != nil {
			return err
		}
	}
	return nil
}

func ip(args ...string) error {
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %q: %w: %s", args, err, out)
	}
	return nil
}

// close ends the wire; its devices go with it.
func (w *wire) close() {
	for _, f := range w.ends {
		if f != nil {
			f.Close()
		}
	}
	w.wg.Wait()
}

// set replaces the effects on packets from now on.
func (w *wire) set(effects [2]effect) { w.effect.Store(&effects) }

// carry takes packets from one end to the other.
func (w *wire) carry(from int) {
	buf := make([]byte, 1<<16)
	for {
		n, err := w.ends[from].Read(buf)
		if errors.Is(err, os.ErrClosed) {
			return
		}
		if err == nil {
			w.pass(w.ends[1-from], buf[:n], &w.effect.Load()[from])
		}
	}
}

// wireStart is when the first flap began.
var wireStart = time.Now()

func (w *wire) pass(to *os.File, packet []byte, e *effect) {
	switch {
	case e.cut, e.lose > rand.Float64():
		return
	case e.flap > 0 && time.Since(wireStart)/e.flap%2 == 0:
		return
	}
	copies := 1
	if e.duplicate > rand.Float64() {
		copies++
	}
	if e.corrupt > rand.Float64() {
		packet[rand.IntN(len(packet))] ^= 1 << rand.IntN(8)
	}
	delay := e.delay
	if e.reorder > rand.Float64() { // later ones overtake it
		delay += time.Duration(rand.Int64N(int64(2 * time.Millisecond)))
	}
	for range copies {
		if delay == 0 {
			_, _ = to.Write(packet) // the end may be closed, or its queue full
			continue
		}
		late := append([]byte(nil), packet...)
		time.AfterFunc(delay, func() { _, _ = to.Write(late) })
	}
}
