#!/bin/sh
# Makes another slave of a bond active: the one that is named, or the next one
# whose link is up.
#
#   bond-failover.sh BOND [SLAVE]
#
# Environment: SYS, as for bond-up.sh.
set -eu
[ $# -ge 1 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
SYS=${SYS:-/sys/class/net}
bond=$1
opt=$SYS/$bond/bonding
active=$(cat "$opt/active_slave")
new=${2:-}
if [ -z "$new" ]; then
	for slave in $(cat "$opt/slaves"); do
		[ "$slave" != "$active" ] || continue
		[ "$(cat "$SYS/$slave/bonding_slave/mii_status")" = up ] || continue
		new=$slave
		break
	done
	[ -n "$new" ] || { echo "$bond has no other slave whose link is up" >&2; exit 1; }
fi
echo "$new" >"$opt/active_slave"
echo "$bond: ${active:-none} -> $(cat "$opt/active_slave")"
