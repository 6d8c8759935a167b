// Package port keeps the IPoIB interfaces of a host: one for each port of a fabric,
// and their children in other partitions. Names, rules and errors are those of
// Linux's ib_ipoib.
//
// Children are made in two ways. CreateChild and DeleteChild are what the files
// create_child and delete_child of Linux do: the P_Key makes the name, and there is
// one child for a P_Key. AddLink and DelLink are what `ip link add ... type ipoib`
// does: any name, and any number of children. The interfaces are the same.
package port
