#!/bin/sh
# Proves in the guest what the packages promise: TestBoot... installs this as the
# service that runs after each boot. Line N of /root/plan has the steps of boot N.
# What is found goes to the second serial line, for the test to read.

n=$(($(cat /root/boots 2>/dev/null || echo 0) + 1))
echo $n >/root/boots
say() { echo "PROOF $n $*" >/dev/ttyS1; }
uptime() { cut -d' ' -f1 /proc/uptime; }

# check TEXT CONDITION
check() { eval "$2" >/tmp/check 2>&1 || say "FAILED: $1: $(head -c 2000 /tmp/check | tr '\n' ' ')"; }

# eventually TEXT CONDITION: within ten minutes, for machines with other work.
eventually() {
	for i in $(seq 1200); do
		if eval "$2" >/tmp/check 2>&1; then return; fi
		sleep 0.5
	done
	say "FAILED: $1, not within 10 minutes: $(head -c 2000 /tmp/check | tr '\n' ' ')"
	journalctl -q -b -o cat -u 'rnbd*' | tail -n 30 | while read -r line; do say "journal: $line"; done
}

pid() { systemctl show -P MainPID "rnbd-$1"; }
restarts() { systemctl show -P NRestarts "rnbd-$1"; }
is() { [ "$1" = "$2" ] || { echo "is $1, want $2"; false; }; }
serves() { rnbd server show && rnbd client show; }
connected() { is "$(rnbd client path list state csv noheaders | sort -u)" connected; }
works() { connected && dd if=/dev/urandom of=/data/probe bs=4k count=4 conv=fsync; }

up() {
	eventually "/data is mounted" 'mountpoint -q /data'
	say "mounted $(uptime) s after the kernel's start"
	eventually "all units are up" 'is "$(systemctl is-system-running)" running || { systemctl list-jobs --no-legend; systemctl list-units --failed --plain --no-legend; false; }'
	[ $n = 1 ] || check "the data of the last boot is there" '(cd /data && sha256sum -c sum)'
	check "no daemon was started twice" 'is "$(restarts server) $(restarts client)" "0 0"'
}

units() {
	for unit in rnbd-server.service rnbd-client.service rnbd-server.socket rnbd-client.socket rnbd-client-nbd.socket; do
		check "$unit" "is \$(systemctl is-active $unit) active"
	done
	for unit in rnbd-server rnbd-client; do
		check "$unit is ready when it says so" "is \$(systemctl show -P Type $unit) notify"
		check "$unit has a watchdog" "is \$(systemctl show -P WatchdogUSec $unit) 30s"
		check "$unit is started again for ever" "is \$(systemctl show -P StartLimitIntervalUSec $unit) 0 && is \$(systemctl show -P Restart $unit) always"
		check "the stop of $unit is bounded" "is \$(systemctl show -P TimeoutStopUSec $unit) 40s"
	done
	check "the mount waits for the target" 'systemctl show -P After data.mount | grep -w remote-fs-pre.target'
	check "the target waits for the client" 'systemctl show -P After remote-fs-pre.target | grep -w rnbd-client.service'
	at() { systemctl show -P ActiveEnterTimestampMonotonic "$1"; }
	check "the mount came after the client" '[ $(at data.mount) -gt $(at rnbd-client.service) ]'
	check "there are control files" 'ls /run/rnbd/sys/class/rnbd-client'
}

# The configuration says confine: strict, with which a plugin that would keep
# anything is not started.
hardening() {
	for d in server client; do
		holds="cgroup, rlimits, capabilities, no_new_privs, seccomp" # front ends of root that show disks
		[ $d = client ] || holds="cgroup, rlimits, network, capabilities, no_new_privs, landlock, seccomp"
		check "$d: plugins are confined" 'rnbd $d show -o json >/tmp/show && is "$(sed -n "s/.*\"confined\": \"\(.*\)\".*/\1/p" /tmp/show | sort -u)" "$holds"'
		for p in $(pid $d) $(pgrep -P $(pid $d)); do
			check "$d: process $p keeps to its system calls" "grep -E 'NoNewPrivs:.1' /proc/$p/status && grep -E 'Seccomp:.2' /proc/$p/status"
			# Bits 16, 22 and 25: sys_module, sys_boot, sys_time.
			check "$d: process $p has no way to the kernel's modules" "[ \$((0x\$(sed -n 's/^CapBnd:.//p' /proc/$p/status) & 0x2410000)) = 0 ]"
		done
		check "$d: writable memory is not executed" "is \$(systemctl show -P MemoryDenyWriteExecute rnbd-$d) yes"
	done
}

reload() {
	for d in server client; do
		echo 'log-level: debug' >/etc/rnbd/$d.d/level.yaml
		check "$d: reload" "systemctl reload rnbd-$d"
		check "$d: the level is taken over" "rnbd $d log csv noheaders | grep '$d,debug'"
		echo 'log-levle: debug' >/etc/rnbd/$d.d/level.yaml
		check "$d: a wrong file fails the reload" "! systemctl reload rnbd-$d"
		check "$d: and says why" "journalctl -q -o cat -u rnbd-$d | grep 'log-levle'"
		rm /etc/rnbd/$d.d/level.yaml
		check "$d: reload back" "systemctl reload rnbd-$d && is \$(systemctl is-active rnbd-$d) active"
		check "$d: goes on" "is \$(restarts $d) 0 && rnbd $d log csv noheaders | grep '$d,info'"
	done
}

# Daemons are stopped under the mounted file system, and started by those who ask
# for them.
activation() {
	for d in server client; do
		check "$d: stop" "systemctl stop rnbd-$d"
		check "$d: has stopped" "is \$(systemctl is-active rnbd-$d) inactive"
		check "$d: a command starts it" "rnbd $d show --timeout 2m"
		check "$d: is active" "is \$(systemctl is-active rnbd-$d) active"
	done
	eventually "the file system goes on" works
}

# The clock of the host jumps, while the file system is in use.
clock() {
	reconnects=$(rnbd session list reconnects csv noheaders | tr '\n' ' ')
	now=$(date +%s)
	for to in 2040-01-01 1995-01-01; do
		date -s $to >/dev/null
		sleep 8
		check "$to: the file system goes on" works
		check "$to: sessions stay" 'is "$(rnbd session list reconnects csv noheaders | tr "\n" " ")" "$reconnects"'
		check "$to: commands work" 'rnbd list && rnbd client events'
	done
	check "a mapping is made in that time" 'rnbd map other.img from 127.0.0.1 --session s1 --name other && rnbd unmap other'
	date -s @$((now + 16)) >/dev/null
	sleep 4
	check "back: the file system goes on" works
	check "the watchdog was fed" 'is "$(restarts server) $(restarts client)" "0 0"'
}

# A daemon that hangs is ended by the watchdog, and started again. The journal has the
# dump of its goroutines then.
hang() {
	dumped=yes
	for d in server client; do
		old=$(pid $d)
		kill -STOP $old
		eventually "$d: another process" "[ \$(pid $d) -gt 0 ] && [ \$(pid $d) != $old ] && is \$(systemctl is-active rnbd-$d) active"
		check "$d: once" "is \$(restarts $d) 1"
		check "$d: by the watchdog" "journalctl -q -o cat -u rnbd-$d | grep -i watchdog"
		eventually "$d: the file system goes on" works
	done
}

# Daemons that are killed again and again come back, and clear away what they left.
kills() {
	for d in server client; do
		for i in 1 2 3 4 5 6 7; do
			old=$(pid $d)
			kill -KILL $old
			eventually "$d: is back" "[ \$(pid $d) -gt 0 ] && [ \$(pid $d) != $old ] && is \$(systemctl is-active rnbd-$d) active && rnbd $d show"
		done
		eventually "$d: the file system goes on" works
		check "$d: its control files are new" "ls /run/rnbd/sys/class/rnbd-$d && ! ls -R /run/rnbd/sys 2>&1 | grep 'not connected'"
		check "$d: one mount for each place" "is \"\$(findmnt -rn -o TARGET | grep rnbd | sort | uniq -d)\" ''"
	done
	eventually "each plugin has one folder, and no other folder is left" 'is "$(ls -d /run/rnbd/rnbd-plugin-* | wc -l)" "$(pgrep -c "^(io|frontend)-")"'
	check "each plugin runs once" 'is "$(pgrep -l "^(io|frontend)-" | cut -d" " -f2 | sort | uniq -d)" ""'
}

# The client is killed at any moment of maps and unmaps: no disk is left that is in
# no mapping.
crashes() {
	for i in $(seq 20); do
		old=$(pid client)
		(rnbd map other.img from 127.0.0.1 --session s1 --name other; rnbd unmap other; rnbd map other.img from 127.0.0.1 --session s1 --name other) >/dev/null 2>&1 &
		sleep $(awk "BEGIN { print $i / 8 }")
		kill -KILL $old
		eventually "the client is back" "[ \$(pid client) -gt 0 ] && [ \$(pid client) != $old ] && rnbd client show"
		wait
		eventually "disks and mappings are the same" 'disks="$(cd /dev && ls -d ublkb* | sort)"; is "$(rnbd client device list endpoint csv noheaders | sed s:/dev/:: | sort)" "$disks"'
		eventually "the other one is free" '! rnbd client device list devname csv noheaders | grep -x other || rnbd unmap other'
	done
	eventually "the file system goes on" works
}

upgrade() {
	check "upgrade" 'dpkg -i /root/upgrade/*.deb'
	eventually "the daemons of the upgrade serve" serves
	check "version" 'rnbd version | grep "$(cat /root/version)"'
	eventually "the file system goes on" works
}

write() {
	check "write" 'dd if=/dev/urandom of=/data/file bs=64k count=32 && (cd /data && sha256sum file >sum) && sync'
}

# The server dies for good, with writes not yet on its disk, before the host goes
# down.
dead() {
	mkdir -p /run/systemd/system/rnbd-server.service.d
	printf '[Service]\nRestart=no\n' >/run/systemd/system/rnbd-server.service.d/dead.conf
	systemctl daemon-reload
	systemctl stop rnbd-server.socket
	dd if=/dev/urandom of=/data/dirty bs=64k count=32 2>/dev/null
	systemctl kill -s KILL rnbd-server
	check "the server is dead" 'sleep 2; ! systemctl is-active rnbd-server'
}

# The client is not removed while its disk is mounted, and goes on.
refused() {
	old=$(pid client)
	check "a removal with a disk in use is refused" '! dpkg --purge rnbd-client >/tmp/said 2>&1'
	check "and says why" 'grep "^/dev/.* is mounted on /data$" /tmp/said && grep "rnbd unmap" /tmp/said || { cat /tmp/said; false; }'
	check "the package is installed" 'is "$(dpkg-query -W -f "\${db:Status-Status}" rnbd-client)" installed'
	for unit in rnbd-client.service rnbd-client.socket rnbd-client-nbd.socket; do
		check "$unit goes on" "is \$(systemctl is-active $unit) active"
	done
	check "the client is the same process" 'is "$(pid client)" "$old"'
	check "the file system goes on" works
}

purge() {
	check "unmount" 'umount /data'
	check "purge" 'dpkg --purge rnbd-client rnbd-server rnbd-plugins rnbd rnbd-net rnbd-sdk-doc'
	check "files are left" 'is "$(ls -d /etc/rnbd /run/rnbd /etc/systemd/system/*/rnbd* /etc/systemd/system/rnbd* 2>/dev/null)" ""'
	check "units are left" 'is "$(systemctl list-units --plain --no-legend "rnbd*")" ""'
	check "processes are left" '! pgrep -l "rnbd|io-|frontend-"'
	check "folders are left" '! ls -d /tmp/rnbd-*'
}

# What the journal must not have.
journal() {
	bad='SECCOMP auid|audit:.*type=1326|Operation not permitted|fatal error|panic:'
	[ -n "$dumped" ] || bad="$bad|goroutine [0-9]"
	journalctl -q -b -o cat | grep -E "$bad" | head -n 5 | while read -r line; do say "FAILED: journal: $line"; done
}

say begin
for step in $(sed -n ${n}p /root/plan); do
	case $step in
	reboot | poweroff)
		journal
		say "end $step $(uptime)"
		systemctl --no-block $step
		exit
		;;
	esac
	start=$(uptime)
	$step
	say "step $step took $(echo "$start $(uptime)" | awk '{ printf "%.0f", $2 - $1 }') s"
done
