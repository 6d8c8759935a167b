#!/bin/sh
# Makes a bond of Linux's own driver over interfaces of ours, TAP or TUN.
#
#   kbond-up.sh BOND ADDRESS/LENGTH SLAVE SLAVE...
#
# TAP is recommended: the driver finds neighbours itself, and arp_validate works.
# Over TUN the daemon of the active slave finds them and announces the bond's
# addresses, fail_over_mac becomes active by itself, and the bond loses its
# MULTICAST flag, which is set again here. All slaves need the same type.
#
# Environment: MIIMON, UPDELAY, DOWNDELAY and PRIMARY, as for bond-up.sh.
set -eu
[ $# -ge 4 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
bond=$1
[ -e /sys/class/net/bonding_masters ] || modprobe bonding max_bonds=0
first=$3
for slave in "$first" "$4"; do
	[ -d "/sys/class/net/$slave" ] || { echo "there is no interface $slave" >&2; exit 1; }
done
"$(dirname "$0")/bond-up.sh" "$@"
if [ "$(cat "/sys/class/net/$bond/type")" != 1 ]; then
	ip link set "$bond" multicast on
fi
cat "/proc/net/bonding/$bond"
