package main

import "strings"

// unusedCheck are commands of the shell that end the script of a removal with an error
// while a disk of the client is in use: without the client the requests of its users
// would wait for ever. Empty for packages that the client does not need.
//
// The disks are those of the client's state file and those with a link. It is not the
// daemon that is asked, since that would start one that has been stopped. Processes
// of the service, the front ends, are no users. Connections of NBD clients are none
// either. Programs that look at new disks and at closed ones, as those of udev, use
// a disk for a moment, which is why it is looked at three times.
func (p *packageSpec) unusedCheck() string {
	if !p.serves {
		return ""
	}
	return strings.ReplaceAll(`users_of() {
	node=/dev/${1##*/}
	number=$(cat "$1/dev") || return
	printf '%s\n' "$mounts" | grep -e "^$number " -e " - [^ ]* $node " | while read -r _ where _; do
		echo "$node is mounted on $where"
	done
	if grep -q "^$node[[:space:]]" /proc/swaps; then
		echo "$node is used for swap"
	fi
	for holder in "$1"/holders/*; do
		[ ! -e "$holder" ] || echo "$node is part of /dev/${holder##*/}"
	done
	find /proc/[0-9]*/fd -lname "$node" 2>/dev/null | while read -r fd; do
		process=${fd%/fd/*}
		grep -q rnbd-client.service "$process/cgroup" || echo "$node is open in process ${process##*/} ($(cat "$process/comm"))"
	done
}
users() {
	set +e # in its subshell: files may be missing
	mounts=$(cat /proc/[0-9]*/mountinfo | cut -d ' ' -f 3,5- | sort -u)
	{
		sed -n 's|.*"location": "\(/dev/[^"]*\)".*|\1|p' /run/rnbd/client.devices
		for link in /dev/rnbd/*/*; do
			readlink -f "$link"
		done
	} | sort -u | while read -r disk; do
		disk=${disk##*/}
		for block in /sys/class/block/"$disk" /sys/class/block/"$disk"/"$disk"*; do
			[ ! -e "$block/dev" ] || users_of "$block"
		done
	done | sort -u
}
for pause in 1 1 0; do
	used=$(users 2>/dev/null)
	[ -n "$used" ] || break
	sleep $pause
done
if [ -n "$used" ]; then
	cat >&2 <<END
PACKAGE is not removed, since a disk of rnbd-client is in use and its users would wait for ever:
$used
Unmount it, or end what else uses it, and run "rnbd unmap DISK" ("rnbd unmap --force DISK"
if that is not possible: its users get errors). Then remove PACKAGE again.
END
	exit 1
fi
`, "PACKAGE", p.name)
}
