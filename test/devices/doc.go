// Package devices tests mapped devices as block devices of a host: front ends
// ublk and nbd with the kernel's drivers, in a guest of package vm.
//
//	make test-disks                         the short form
//	make soak                               with what takes long: hours
//	make soak RUN=TestInGuest/ublk/power    a part of it
//	make soak RUN=TestInGuest/newer/growing a part of it on a newer kernel
//	RNBD_KERNEL=1 go test -run TestInGuest/nbd/raid -v .
//
// The test binary plays both parts: on the host it boots the guest and runs
// itself there, in the guest (-guest) it runs server and client daemons and
// uses their devices with the tools of the trade. A machine with the drivers
// in its kernel can run the second part itself, as root and at its own risk:
//
//	go test -run TestGuest -args -guest
package devices
