#!/bin/sh
# Releases the slaves of a bond and takes it away.
#
#   bond-down.sh BOND
#
# Environment: SYS and IP, as for bond-up.sh.
set -eu
[ $# -eq 1 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
SYS=${SYS:-/sys/class/net}
IP=${IP:-ip}
bond=$1
$IP link set "$bond" down
for slave in $(cat "$SYS/$bond/bonding/slaves"); do
	echo "-$slave" >"$SYS/$bond/bonding/slaves"
done
echo "-$bond" >"$SYS/bonding_masters"
echo "$bond is gone"
