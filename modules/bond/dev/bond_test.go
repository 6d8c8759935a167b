package dev

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rnbd-go/rnbd/modules/bond/frame"
	"github.com/rnbd-go/rnbd/modules/bond/resolve"
)

func TestBO01_ActiveBackupOverInfiniBandDevices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := newFake("ib0", 32, 1), newFake("ib1", 32, 2)
		l := newLab(t, a, b)
		l.set("miimon", "100")
		l.must(l.bond.SetUp(true))
		l.enslave("ib0", "ib1")
		synctest.Wait()
		l.wantActive("ib0")
		l.top.calls.Transmit(append([]byte{8, 0, 0, 0}, make([]byte, 40)...))
		a.receive([]byte{8, 0, 0, 0, 1})
		b.receive([]byte{8, 0, 0, 0, 2})
		if n := l.top.received(); n != 1 {
			t.Errorf("%d frames delivered, want that of the active slave alone", n)
		}
		a.setCarrier(false)
		synctest.Wait()
		l.wantActive("ib1")
		b.takeSent()
		l.top.calls.Transmit(append([]byte{8, 0, 0, 0}, make([]byte, 40)...))
		if len(b.takeSent()) != 1 {
			t.Error("the new active slave did not send")
		}
		a.receive([]byte{8, 0, 0, 0, 1})
		if n := l.top.received(); n != 1 {
			t.Error("a frame of the failed slave was delivered")
		}
	})
}

func TestBO08_AttributesAreThoseOfTheFirstSlave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ib := newFake("ib0", 32, 1)
		l := newLab(t, ib, newFake("eth0", 1, 2))
		l.enslave("ib0")
		got, want := l.bond.Status().Attrs, ib.Attrs()
		if !reflect.DeepEqual(got, want) {
			t.Errorf("attributes of the bond\n%+v, want those of its slave\n%+v", got, want)
		}
		if !reflect.DeepEqual(l.top.attrs, want) {
			t.Errorf("attributes of the upper side\n%+v, want\n%+v", l.top.attrs, want)
		}
		l.must(l.net.Enslave(l.bond, "-ib0"))
		if got := l.bond.Status().Attrs; got.Type != 1 || len(got.Address) != 6 || len(got.Broadcast) != 6 || got.MTU != 1500 || got.HeaderLen != 14 {
			t.Errorf("attributes of the emptied bond are %+v, want those of Ethernet", got)
		}
		l.enslave("eth0")
		if got := l.bond.Status().Attrs; got.Type != 1 || got.MTU != 1500 || got.Address[5] != 2 {
			t.Errorf("attributes over Ethernet are %+v", got)
		}
	})
}

func TestBO09_OtherTypesAreExcluded(t *testing.T) {
	for _, order := range [][2]uint16{{1, 32}, {32, 1}} {
		synctest.Test(t, func(t *testing.T) {
			second := newFake("b", order[1], 2)
			l := newLab(t, newFake("a", order[0], 1), second)
			l.enslave("a")
			before, dev := l.bond.Status(), second.Attrs()
			err := l.net.Enslave(l.bond, "+b")
			if want := "Device type is different from other slaves"; !errors.Is(err, syscall.EINVAL) || err.Error() != want {
				t.Errorf("%v, want EINVAL %q", err, want)
			}
			if !reflect.DeepEqual(before, l.bond.Status()) || !reflect.DeepEqual(dev, second.Attrs()) || second.IsUp() {
				t.Error("the refused device or the bond has changed")
			}
		})
	}
}

func TestBO10_DevicesThatCannotSetTheirAddress(t *testing.T) {
	for _, linkType := range []uint16{1, 32} {
		synctest.Test(t, func(t *testing.T) {
			a, b := newFake("a", linkType, 1), newFake("b", linkType, 2)
			a.fixed, b.fixed = true, true
			l := newLab(t, a, b)
			l.enslave("a", "b")
			if got := l.bond.Show("fail_over_mac"); got != "active 1" {
				t.Errorf("fail_over_mac is %q, want active 1", got)
			}
		})
	}
	synctest.Test(t, func(t *testing.T) {
		fixed := newFake("b", 1, 2)
		fixed.fixed = true
		l := newLab(t, newFake("a", 1, 1), fixed)
		l.enslave("a") // it can, so fail_over_mac stays none
		err := l.net.Enslave(l.bond, "+b")
		if want := "Slave device does not support setting the MAC address, but fail_over_mac is not set to active"; !errors.Is(err, syscall.EOPNOTSUPP) || err.Error() != want {
			t.Errorf("%v, want EOPNOTSUPP %q", err, want)
		}
	})
}

func TestBO11_AddressIsThatOfTheActiveSlave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := newFake("ib0", 32, 1), newFake("ib1", 32, 2)
		l := newLab(t, a, b)
		l.set("miimon", "100")
		l.must(l.bond.SetUp(true))
		l.enslave("ib0", "ib1")
		want := func(s *fake) {
			t.Helper()
			if got := l.bond.Status().Attrs.Address; !bytes.Equal(got, s.Attrs().Address) || !bytes.Equal(got, l.top.attrs.Address) {
				t.Errorf("address of the bond %x, of its upper side %x, want that of %s, %x", got, l.top.attrs.Address, s.name, s.Attrs().Address)
			}
		}
		want(a)
		a.setCarrier(false)
		synctest.Wait()
		want(b)
		b.setCarrier(false)
		a.setCarrier(true)
		synctest.Wait()
		want(a)
	})
}

// TestFailOver_AddressChangesWhenFramesFlow: the stack above sends ARP as soon as
// it is told of the new address, and would wait for a second if that were lost.
func TestFailOver_AddressChangesWhenFramesFlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := newFake("a", 1, 1), newFake("b", 1, 2)
		l := newLab(t, a, b)
		l.set("fail_over_mac", "active")
		l.set("miimon", "100")
		l.must(l.bond.SetUp(true))
		l.enslave("a", "b")
		synctest.Wait()
		request := bytes.Repeat([]byte{7}, 60)
		l.top.onAddress = func() { l.top.calls.Transmit(request) }
		a.setCarrier(false)
		synctest.Wait()
		if !slices.ContainsFunc(b.takeSent(), func(f []byte) bool { return bytes.Equal(f, request) }) {
			t.Error("what was sent as soon as the address had changed is lost")
		}
	})
}

func TestFailOverMAC_NoneAndFollow(t *testing.T) {
	for _, policy := range []string{"none", "follow"} {
		synctest.Test(t, func(t *testing.T) {
			a, b := newFake("a", 1, 1), newFake("b", 1, 2)
			l := newLab(t, a, b)
			l.set("fail_over_mac", policy)
			l.set("miimon", "100")
			l.must(l.bond.SetUp(true))
			l.enslave("a", "b")
			a.setCarrier(false)
			synctest.Wait()
			l.wantActive("b")
			if got := b.Attrs().Address[5]; got != 1 {
				t.Errorf("%s: the active slave has address %d, want that of the bond, 1", policy, got)
			}
			wantOld := map[string]byte{"none": 1, "follow": 2}[policy]
			if got := a.Attrs().Address[5]; got != wantOld {
				t.Errorf("%s: the former active slave has address %d, want %d", policy, got, wantOld)
			}
			l.must(l.net.Enslave(l.bond, "-a"))
			l.must(l.net.Enslave(l.bond, "-b"))
			if a.Attrs().Address[5] != 1 || b.Attrs().Address[5] != 2 {
				t.Errorf("%s: released devices have addresses %x and %x, want their own", policy, a.Attrs().Address, b.Attrs().Address)
			}
		})
	}
}

func TestBO12_FailOverIsAnnounced(t *testing.T) {
	for _, linkType := range []uint16{1, 32} {
		synctest.Test(t, func(t *testing.T) {
			a, b := newFake("a", linkType, 1), newFake("b", linkType, 2)
			l := newLab(t, a, b)
			l.set("fail_over_mac", "active")
			l.set("miimon", "100")
			l.set("num_grat_arp", "2")
			l.must(l.bond.SetUp(true))
			l.enslave("a", "b")
			time.Sleep(time.Second)
			a.takeSent()
			cut := time.Now()
			a.setCarrier(false)
			synctest.Wait()
			if time.Since(cut) != 0 {
				t.Fatal("the clock moved")
			}
			first := b.takeSent() // at once, before the next poll
			if len(first) != 2 {
				t.Fatalf("type %d: %d frames at once, want ARP and NA", linkType, len(first))
			}
			for i, f := range first {
				etherType, p, ok := frame.Split(linkType, f)
				switch {
				case i == 0:
					m, isARP := frame.ParseARP(linkType, p)
					if !ok || etherType != frame.TypeARP || !isARP || m.Op != frame.Request || m.SPA != m.TPA ||
						m.SPA.String() != "10.5.0.1" || !bytes.Equal(m.SHA, b.Attrs().Address) {
						t.Errorf("type %d: first frame %x is no gratuitous ARP of the new address", linkType, f)
					}
				case i == 1:
					if etherType != frame.TypeIPv6 || !bytes.Contains(p, b.Attrs().Address) {
						t.Errorf("type %d: second frame %x is no advertisement of the new address", linkType, f)
					}
				}
			}
			time.Sleep(time.Second)
			if n := len(b.takeSent()); n != 2 { // ARP and NA again
				t.Errorf("type %d: %d frames of the second notification, want 2", linkType, n)
			}
		})
	}
}

var igmpGroups = []netip.Addr{netip.MustParseAddr("239.1.2.3"), netip.MustParseAddr("224.0.0.251")}

// TestBO13BO14 joins groups before and after enslaving, with the bond up before
// and after it: all orders end in the same lists.
func TestBO13BO14_OrderDoesNotMatter(t *testing.T) {
	var want []string
	for i, order := range []string{"up join enslave", "enslave up join", "up enslave join", "join enslave up"} {
		t.Run(order+" BO-13 BO-14", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a, b := newFake("ib0", 32, 1), newFake("ib1", 32, 2)
				l := newLab(t, a, b)
				l.set("miimon", "100")
				for _, step := range strings.Fields(order) {
					switch step {
					case "up":
						l.must(l.bond.SetUp(true))
					case "enslave":
						l.enslave("ib0", "ib1")
					case "join":
						l.joinByReport(igmpGroups)
					}
					synctest.Wait()
				}
				if order == "join enslave up" { // the stack reports again when its interface is brought up
					l.joinByReport(igmpGroups)
				}
				time.Sleep(time.Second)
				got := a.groupList()
				for _, g := range got {
					if !strings.HasPrefix(g, "ff12:401b:ffff:") && !strings.HasPrefix(g, "ff12:601b:ffff:") {
						t.Errorf("group %s is not mapped for InfiniBand", g)
					}
				}
				if i == 0 {
					want = got
				}
				if len(got) != 4 || !slices.Equal(got, want) {
					t.Errorf("groups %v, want 4, the same as in the first order: %v", got, want)
				}
				if n := len(b.groupList()); n != 0 {
					t.Errorf("the backup has joined %d groups", n)
				}
				a.setCarrier(false)
				synctest.Wait()
				if !slices.Equal(b.groupList(), want) || len(a.groupList()) != 0 {
					t.Errorf("after the fail-over the groups are %v and %v, want all with the new active slave", b.groupList(), a.groupList())
				}
			})
		})
	}
}

// joinByReport is a user's stack that reports groups.
func (l *lab) joinByReport(groups []netip.Addr) {
	link := frame.Link{Type: l.bond.Status().Attrs.Type, Address: l.bond.Status().Attrs.Address}
	l.top.calls.Transmit(link.Report(netip.MustParseAddr("10.5.0.1"), groups))
}

func TestReportsFollowFailOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := newFake("a", 1, 1), newFake("b", 1, 2)
		l := newLab(t, a, b)
		l.set("miimon", "100")
		l.set("resend_igmp", "3")
		l.must(l.bond.SetUp(true))
		l.enslave("a", "b")
		l.joinByReport(igmpGroups)
		synctest.Wait()
		a.setCarrier(false)
		time.Sleep(time.Second)
		reports := 0
		for _, f := range b.takeSent() {
			etherType, p, _ := frame.Split(1, f)
			if ms := frame.Reports(etherType, p); len(ms) == 2 {
				reports++
			}
		}
		if reports != 3 {
			t.Errorf("%d reports of both groups, want 3", reports)
		}
	})
}

func TestEnslave_Refusals(t *testing.T) {
	for _, c := range []struct {
		name, text string
		errno      syscall.Errno
		words      string
	}{
		{"a device that is up", "+up0", syscall.EPERM, "Device can not be enslaved while up"},
		{"the bond itself", "+bond0", syscall.EPERM, "Cannot enslave bond to itself."},
		{"another bond", "+bond1", syscall.EPERM, "Device type (master device) cannot be enslaved"},
		{"a slave of this bond", "+ib0", syscall.EBUSY, "Device is in use and cannot be enslaved"},
		{"a slave of another bond", "+ib5", syscall.EBUSY, "Device is in use and cannot be enslaved"},
		{"nothing of that name", "+ib9", syscall.ENODEV, "interface ib9 does not exist!"},
		{"no sign", "ib1", syscall.EPERM, "no command found in slaves file - use +ifname or -ifname"},
		{"no name", "+", syscall.EPERM, "no command found in slaves file - use +ifname or -ifname"},
		{"16 characters", "+ib0123456789abcd", syscall.EPERM, "no command found in slaves file - use +ifname or -ifname"},
		{"release of a free device", "-ib1", syscall.EINVAL, "interface not enslaved"},
		{"release from the wrong bond", "-ib5", syscall.EINVAL, "interface not enslaved"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				up := newFake("up0", 32, 9)
				l := newLab(t, newFake("ib0", 32, 1), newFake("ib1", 32, 2), newFake("ib5", 32, 5), up)
				up.up = true
				l.enslave("ib0")
				l.top = &top{}
				other, err := l.net.Create("bond1")
				l.must(err)
				l.must(l.net.Enslave(other, "+ib5"))
				err = l.net.Enslave(l.bond, c.text)
				if !errors.Is(err, c.errno) || err.Error() != c.words {
					t.Errorf("%v, want %v %q", err, c.errno, c.words)
				}
				if n := len(l.bond.Status().Slaves); n != 1 {
					t.Errorf("the bond has %d slaves, want 1", n)
				}
			})
		})
	}
}

func TestEnslave_FailureLeavesNoTrace(t *testing.T) {
	for _, method := range []string{"SetUp", "SetMTU", "SetFilter", "upper"} {
		synctest.Test(t, func(t *testing.T) {
			ib := newFake("ib0", 32, 1)
			l := newLab(t, ib, newFake("eth0", 1, 2))
			l.set("arp_interval", "100") // a filter is asked for
			if method == "SetMTU" {
				l.must(l.bond.SetMTU(9000))
				ib.attrs.Type, ib.attrs.Address = 1, ib.attrs.Address[:6]
			}
			ib.fail[method] = syscall.ENOMEM
			if method == "upper" {
				l.top.only = 1
			}
			before := l.bond.Status()
			if err := l.net.Enslave(l.bond, "+ib0"); err == nil {
				t.Fatalf("%s fails, and the device is enslaved", method)
			}
			if after := l.bond.Status(); !reflect.DeepEqual(before, after) {
				t.Errorf("%s failed: the bond is\n%+v, was\n%+v", method, after, before)
			}
			if ib.IsUp() || ib.rx() != RxNone || ib.calls.Received != nil {
				t.Errorf("%s failed: the device is up %v, filter %v", method, ib.IsUp(), ib.rx())
			}
			delete(ib.fail, method)
			l.enslave("eth0")
		})
	}
}

func TestMasters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLab(t, newFake("ib0", 32, 1))
		for _, c := range []struct {
			text  string
			errno syscall.Errno
			words string
		}{
			{"+bond1\n", 0, ""},
			{"+bond1", syscall.EEXIST, "bond1 already exists"},
			{"+ib0", syscall.EEXIST, "ib0 already exists"},
			{"-bond1", 0, ""},
			{"-bond1", syscall.ENODEV, "unable to delete non-existent bond1"},
			{"-ib0", syscall.ENODEV, "unable to delete non-existent ib0"},
			{"bond2", syscall.EPERM, "no command found in bonding_masters - use +ifname or -ifname"},
			{"+0123456789abcdef", syscall.EPERM, "no command found in bonding_masters - use +ifname or -ifname"},
			{"+a/b", syscall.EPERM, "no command found in bonding_masters - use +ifname or -ifname"},
			{"+..", syscall.EPERM, "no command found in bonding_masters - use +ifname or -ifname"},
		} {
			err := l.net.Masters(c.text)
			if c.errno == 0 && err != nil || c.errno != 0 && (!errors.Is(err, c.errno) || err.Error() != c.words) {
				t.Errorf("%q: %v, want %v %q", c.text, err, c.errno, c.words)
			}
		}
	})
}

func TestDelete_GivesSlavesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ib := newFake("ib0", 32, 1)
		l := newLab(t, ib)
		l.must(l.bond.SetUp(true))
		l.enslave("ib0")
		l.joinByReport(igmpGroups)
		synctest.Wait()
		l.must(l.net.Masters("-bond0"))
		if ib.IsUp() || ib.rx() != RxNone || len(ib.groupList()) != 0 || !l.top.closed {
			t.Errorf("device up %v, filter %v, groups %v, upper closed %v", ib.IsUp(), ib.rx(), ib.groupList(), l.top.closed)
		}
		l.top = &top{}
		b, err := l.net.Create("bond9")
		l.must(err)
		l.must(l.net.Enslave(b, "+ib0"))
	})
}

func TestRemoveDevice_ReleasesIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLab(t, newFake("ib0", 32, 1), newFake("ib1", 32, 2))
		l.set("miimon", "100")
		l.must(l.bond.SetUp(true))
		l.enslave("ib0", "ib1")
		l.must(l.net.RemoveDevice("ib0"))
		l.wantActive("ib1")
		if err := l.net.RemoveDevice("ib0"); !errors.Is(err, syscall.ENODEV) {
			t.Errorf("second removal: %v, want ENODEV", err)
		}
	})
}

// TestBO16_OneReceiver: whatever the carriers do, at most one slave delivers, and
// it is the active one.
func TestBO16_OneReceiver(t *testing.T) {
	for seed := range uint64(20) {
		synctest.Test(t, func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 2))
			slaves := []*fake{newFake("a", 32, 1), newFake("b", 32, 2), newFake("c", 32, 3)}
			l := newLab(t, slaves...)
			l.set("miimon", "50")
			l.set("downdelay", "100")
			l.set("primary", "b")
			l.must(l.bond.SetUp(true))
			l.enslave("a", "b", "c")
			for range 200 {
				s := slaves[r.IntN(3)]
				s.setCarrier(r.IntN(2) == 0)
				time.Sleep(time.Duration(r.IntN(120)) * time.Millisecond)
				synctest.Wait()
				active, _ := l.bond.Active()
				before := l.top.received()
				all := 0
				for _, s := range slaves {
					s.receive([]byte{8, 0, 0, 0, 1})
					if s.rx() == RxAll {
						all++
						if s.name != active {
							t.Fatalf("%s receives, %q is active", s.name, active)
						}
					}
				}
				if got := l.top.received() - before; all > 1 || got != all {
					t.Fatalf("%d slaves receive, %d deliver; active is %q", all, got, active)
				}
			}
		})
	}
}

func TestArpMonitor_ProbesAndJudges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := newFake("ib0", 32, 1), newFake("ib1", 32, 2)
		l := newLab(t, a, b)
		l.set("arp_interval", "100")
		l.set("arp_ip_target", "+10.5.0.2")
		l.set("arp_validate", "active") // Linux's bond over type 32 never comes up with it
		l.must(l.bond.SetUp(true))
		l.enslave("ib0", "ib1")
		works := map[*fake]bool{a: true, b: true}
		peer := frame.Link{Type: 32, Address: make([]byte, 20)}
		answer := func(d time.Duration) {
			for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
				for s, ok := range works {
					for _, f := range s.takeSent() {
						et, p, _ := frame.Split(32, f)
						m, isARP := frame.ParseARP(32, p)
						if ok && et == frame.TypeARP && isARP && m.SPA != m.TPA {
							s.receive(peer.ARP(frame.ARP{Op: frame.Reply, SHA: peer.Address, SPA: m.TPA, THA: m.SHA, TPA: m.SPA}))
						}
					}
				}
			}
		}
		answer(2 * time.Second)
		l.wantActive("ib0")
		if !l.bond.Status().Carrier {
			t.Error("the bond has no carrier although its target answers")
		}
		works[a] = false
		answer(time.Second)
		l.wantActive("ib1")
		works[b] = false
		answer(2 * time.Second)
		l.wantActive("")
		works[a] = true
		answer(time.Second)
		l.wantActive("ib0")
	})
}

func TestResolver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := newFake("ib0", 32, 1), newFake("ib1", 32, 2)
		l := newLab(t, a, b)
		l.set("miimon", "100")
		l.must(l.bond.SetUp(true))
		peer := netip.MustParseAddr("10.5.0.77")
		if _, err := l.net.Resolver.Resolve(peer); !errors.Is(err, syscall.ENETDOWN) {
			t.Errorf("without a slave: %v, want ENETDOWN", err)
		}
		if _, err := l.net.Resolver.Resolve(netip.MustParseAddr("10.6.0.1")); !errors.Is(err, syscall.ENETUNREACH) {
			t.Errorf("another network: %v, want ENETUNREACH", err)
		}
		l.enslave("ib0", "ib1")
		var got []resolve.AddrChange
		cancel := l.net.Resolver.Subscribe(peer, func(c resolve.AddrChange) {
			got = append(got, c)
			if r, err := l.net.Resolver.Resolve(peer); err != nil || r.Slave != c.New {
				t.Errorf("in the call the route is %+v, %v; want %s", r, err, c.New)
			}
		})
		l.net.Resolver.Subscribe(netip.MustParseAddr("10.6.0.1"), func(resolve.AddrChange) { t.Error("a stranger was told") })
		synctest.Wait()
		a.setCarrier(false)
		synctest.Wait()
		if want := []resolve.AddrChange{{Bond: "bond0", Old: "ib0", New: "ib1"}}; !slices.Equal(got, want) {
			t.Fatalf("told %v, want %v", got, want)
		}
		r, err := l.net.Resolver.Resolve(peer)
		if err != nil || r.Slave != "ib1" || r.Source.String() != "10.5.0.1" || !bytes.Equal(r.Address, b.Attrs().Address) {
			t.Errorf("route %+v, %v", r, err)
		}
		cancel()
		a.setCarrier(true)
		b.setCarrier(false)
		synctest.Wait()
		if len(got) != 1 {
			t.Error("told after cancel")
		}
	})
}

// resolving is a slave that answers for addresses.
type resolving struct {
	*fake
	prefixes []netip.Prefix
}

func (r *resolving) SetPrefixes(all []netip.Prefix) { r.prefixes = all }

// TestPrefixes shows that the active slave alone answers for the bond's addresses, also for
// those that are added later.
func TestPrefixes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := &resolving{fake: newFake("ib0", 32, 1)}, &resolving{fake: newFake("ib1", 32, 2)}
		l := newLab(t)
		l.must(l.net.AddDevice(a))
		l.must(l.net.AddDevice(b))
		l.set("miimon", "100")
		l.must(l.bond.SetUp(true))
		l.enslave("ib0", "ib1")
		synctest.Wait()
		if len(a.prefixes) != 2 || len(b.prefixes) != 0 {
			t.Errorf("the active slave has %v, the backup %v", a.prefixes, b.prefixes)
		}
		unlock := l.top.lock()
		l.top.prefixes = append(slices.Clone(l.top.prefixes), netip.MustParsePrefix("10.7.0.1/24"))
		unlock()
		l.top.calls.UpChanged(true)
		synctest.Wait()
		if len(a.prefixes) != 3 {
			t.Errorf("the active slave has %v after an address was added", a.prefixes)
		}
		a.setCarrier(false)
		synctest.Wait()
		if len(a.prefixes) != 0 || len(b.prefixes) != 3 {
			t.Errorf("after the fail-over the former one has %v, the active one %v", a.prefixes, b.prefixes)
		}
	})
}
