// Package registry is what a link has in the place of InfiniBand's subnet
// manager: a server knows the partitions, the ports and the members of each
// multicast group; a client in each host joins groups there and is told their
// members.
//
//	dev.Interface -- Join, Members --> Client -- lines of JSON over TCP --> Server -- Table
//
// A port is known by its GID, and reached at the address that its client connects
// from. Its memberships have a lease of 30 s, which the client renews. While the
// server cannot be reached the client keeps what it knows; it joins nothing new.
// When the server is back, which may be another one without memory, the client
// joins all its groups again.
//
// # Hazards
//
// There is no authentication: P_Keys are labels and no secrets. Whoever reaches
// the server's port can join every group that the configuration allows its
// address. A server is believed what it says of the members, but for what no
// member can be; it can make a client send copies to 1024 addresses.
package registry
