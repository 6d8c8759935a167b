// Package ctl has the control files of bonds: the names, texts and errnos of
// Linux's bonding driver, as functions that read and write text. Whoever serves
// them, by FUSE or otherwise, asks a Tree for names and files; everything is made
// when it is asked for.
//
//	net/bonding_masters            the bonds; +name and -name make and delete one
//	net/BOND/bonding/OPTION        the options, among them slaves and active_slave
//	net/BOND/{address,mtu,...}     attributes of the interface
//	net/SLAVE/bonding_slave/...    a slave's state
//	proc/net/bonding/BOND          all of it as one text
package ctl
