#!/bin/sh
# Makes an active-backup bond of two or more interfaces through the bonding files.
#
#   bond-up.sh BOND ADDRESS/LENGTH SLAVE SLAVE...
#
# Environment:
#   SYS       folder with the file bonding_masters (default /sys/class/net)
#   IP        ip(8) where the bond is (default ip); SLAVE_IP where the slaves are (default $IP)
#   MIIMON    interval of the MII monitor in ms (default 100)
#   UPDELAY, DOWNDELAY   in ms (default 0)
#   PRIMARY   name of the preferred slave (default none)
set -eu
[ $# -ge 3 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
SYS=${SYS:-/sys/class/net}
IP=${IP:-ip}
SLAVE_IP=${SLAVE_IP:-$IP}
bond=$1 address=$2
shift 2

echo "+$bond" >"$SYS/bonding_masters"
opt=$SYS/$bond/bonding
echo active-backup >"$opt/mode"
echo "${MIIMON:-100}" >"$opt/miimon"
echo "${UPDELAY:-0}" >"$opt/updelay"
echo "${DOWNDELAY:-0}" >"$opt/downdelay"
[ -z "${PRIMARY:-}" ] || echo "$PRIMARY" >"$opt/primary"
# The bond need not be up first, and must not for slaves of another type than
# Ethernet on old kernels. A slave must be down.
for slave in "$@"; do
	$SLAVE_IP link set "$slave" down
	echo "+$slave" >"$opt/slaves"
done
$IP link set "$bond" up
$IP addr add "$address" dev "$bond"
echo "$bond is up, $(cat "$opt/active_slave") is active"
