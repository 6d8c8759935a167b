// Package port keeps the IPoIB interfaces of a host: one for each port of a fabric,
// and their children in other partitions. Names, rules and errors are those of
// Linux's ib_ipoib.
//
// Children are made in two ways. CreateChild and DeleteChild correspond to
// Linux's files create_child and delete_child: the name is made from the P_Key,
// and a P_Key has one child. AddLink and DelLink correspond to `ip link add ...
// type ipoib`: any name, and any number of children. The interfaces are the
// same.
package port
