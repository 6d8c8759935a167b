package explain

import "syscall"

type text struct{ meaning, do string }

// errnos are those of block I/O (package blk), and those that commands and
// refusals of a server carry.
var errnos = map[syscall.Errno]text{
	syscall.EPERM:         {"not permitted: another client may write to the device, an io mode contradicts the rules of the server, a write went to a read-only device, or a privilege is missing", "`rnbd server device list` on the server lists the users of a device; map it with --access ro or --access migration"},
	syscall.ENOENT:        {"there is no device, session, path or file of that name; for map: the server has no such name below its search path", "check the spelling; `rnbd list` lists what is mapped, and the server's log has the full story of a refusal"},
	syscall.EINTR:         {"a signal interrupted it", "run it again"},
	syscall.EIO:           {"the storage reported an error, the device of the server failed, or requests had no path and the mapping says loss=fail", "`rnbd show DEVICE` has the last error; on the server `rnbd server device list` and the log"},
	syscall.ENXIO:         {"the device node has no device behind it, or the device is gone", "look for the disk on the server; map the device again when it is back"},
	syscall.EAGAIN:        {"it cannot be done at this moment", "run it again"},
	syscall.ENOMEM:        {"memory or a limit of the server is used up: sessions, connections or chunk memory", "`rnbd_server_fabric_events_total` counts what was refused; raise --limit, or close sessions"},
	syscall.EACCES:        {"the user of the process has no permission for the file, device or socket", "run it as root or as the owner; give the user of the server access to the file"},
	syscall.ENOTBLK:       {"it is no block device, and files are served only below --search-path; or it is a folder, FIFO or character device", "name a block device, or start the server with --search-path"},
	syscall.EBUSY:         {"it is in use: a device has users, another program has opened the storage, or an earlier opening has not ended", "end its users (`rnbd show DEVICE` counts them), or use --force"},
	syscall.ENOTEMPTY:     {"the volume has snapshots", "delete them before, or keep them by --keep-snapshots"},
	syscall.ESTALE:        {"the folder of the pool is missing, or is not that of the pool: its file system may not be mounted", "`rnbd pool list` says what is there; mount the file system, or make a new pool by `rnbd pool init`"},
	syscall.EEXIST:        {"it is there already: the device is mapped, or the path is in the session", "use the one that is there"},
	syscall.ENODEV:        {"there is no such device: no RDMA device has the address, or a driver is missing", "`rnbd doctor` lists fabrics, modules and RDMA devices"},
	syscall.EINVAL:        {"a value is not valid: a name with \"..\", an access mode or io mode that does not exist, a request beyond the end or not aligned to blocks", "the message names the value"},
	syscall.EMFILE:        {"the session has as many devices open as the server allows", "raise --limit devices-per-session of the server, or use another session"},
	syscall.EFBIG:         {"a write goes beyond the largest size of the file", "raise the limit of the file size, or map a smaller device"},
	syscall.ENOSPC:        {"the file system of the server is full", "make room on the server; the device goes on by itself"},
	syscall.EROFS:         {"the storage of the server is read-only", "map it with --access ro"},
	syscall.EMSGSIZE:      {"a message is longer than allowed", "it is an error of a plugin or of the other end; report it"},
	syscall.EOVERFLOW:     {"a number is larger than the format holds", "it is an error of a user of the device; look at its offset and size"},
	syscall.EOPNOTSUPP:    {"the device does not support the operation, as discard or secure erase", "`rnbd show DEVICE` shows what it supports"},
	syscall.EDQUOT:        {"the quota of the server's file system is used up", "raise the quota on the server"},
	syscall.EADDRINUSE:    {"something listens on the address already", "choose another address or stop the other process; `ss -ltnp` names it"},
	syscall.EREMCHG:       {"a write was not repeated after a lost connection, since another client may have written meanwhile", "compare what both clients wrote; map the device as rw by one of them only"},
	syscall.ENETUNREACH:   {"there is no route to the network of the address", "check the address and the routes (`ip route get ADDRESS`)"},
	syscall.EHOSTUNREACH:  {"the host does not answer", "check cable, address and firewall (`ip neigh`)"},
	syscall.ECONNABORTED:  {"the connection was ended by this side, or by a forced close", "`rnbd recover all` connects again"},
	syscall.ECONNRESET:    {"the other end ended the connection, or it is no rnbd server", "check the address, the port and the server's --listen"},
	syscall.ECONNREFUSED:  {"nothing listens at that address and port", "start the server, and check its --listen: the default is 127.0.0.1"},
	syscall.ENOTCONN:      {"there is no connection: the session has no path, or the daemon has ended", "`rnbd path list` shows the paths; `rnbd recover all` connects again"},
	syscall.ETIMEDOUT:     {"no answer in the time allowed", "check network and firewall; --timeout gives commands more time"},
	syscall.ECANCELED:     {"it was given up, since its device or session was closed", ""},
	syscall.EADDRNOTAVAIL: {"no interface of this host has the address", "`ip address` lists those that there are"},
}

// exitCodes are those of the command.
var exitCodes = map[int]text{
	0:   {"success", ""},
	1:   {"a failure that has no code of its own", "the message says why"},
	2:   {"the command line or the configuration is wrong", "the message names the word; `rnbd help COMMAND` shows the usage"},
	3:   {"no such device, session, path or file", "`rnbd list` lists what there is"},
	4:   {"it is there already", "use the one that is there"},
	5:   {"it is in use", "end its users, or use --force"},
	6:   {"not permitted", "run it as root or as the user of the daemon; or the server refuses the access mode"},
	7:   {"the daemon or the server cannot be reached", "`rnbd doctor` checks the daemons and each path"},
	8:   {"it took longer than allowed", "--timeout gives it more time"},
	130: {"a signal interrupted the command", "the message says what is left of it"},
}

// states are those that lists show.
var states = []Entry{
	{Kind: ClientDevice, Name: "init", Meaning: "the device is being mapped"},
	{Kind: ClientDevice, Name: "open", Meaning: "requests go to the server"},
	{Kind: ClientDevice, Name: "closed", Meaning: "there is no path to the server, or the server closed or refused the device; requests wait or fail as --loss says", Do: "`rnbd show DEVICE` has the last error; it opens by itself when a path is back, else `rnbd remap DEVICE`"},
	{Kind: ClientDevice, Name: "writes lost", Meaning: "the host of the server, or the storage behind it, was restarted, and writes that were acknowledged after the last flush may be gone; one flush fails with EIO for that", Do: "check the file system, or restore what its users wrote last; `rnbd show DEVICE writes_lost`"},
	{Kind: ClientDevice, Name: "unmapped", Meaning: "the device was taken away"},

	{Kind: ServerDevice, Name: "open", Meaning: "requests go to the storage plugin"},
	{Kind: ServerDevice, Name: "writes lost", Meaning: "an error of write-back came to light when the plugin of the device was started again, or the storage behind the plugin was restarted without its caches; the next flush of each client fails for that", Do: "check the file system on the device, or restore what its users wrote last; `rnbd server device show DEVICE writes_lost`"},
	{Kind: ServerDevice, Name: "recovering", Meaning: "its plugin died and is being started; requests wait", Do: "nothing, unless it lasts: then see `rnbd server show` and the log"},
	{Kind: ServerDevice, Name: "stuck: waits for the I/O of a dead plugin", Meaning: "the disk does not finish what the dead plugin began; other devices go on", Do: "look for the disk in the kernel's log; the device opens again when the disk answers"},
	{Kind: ServerDevice, Name: "stuck: waits for I/O that does not end", Meaning: "the disk has not answered requests of a path that closed 5 s ago or more; other devices go on", Do: "look for the disk in the kernel's log; the device opens again when the disk answers"},
	{Kind: ServerDevice, Name: "failed: does not open again", Meaning: "the plugin was started again, and cannot open the disk any more; it is tried on", Do: "repair what the state says behind the colon; the device comes back by itself"},
	{Kind: ServerDevice, Name: "failed: smaller than before its plugin died", Meaning: "the disk has shrunk meanwhile", Do: "unmap the device and map it again"},
	{Kind: ServerDevice, Name: "failed: not what it was before its plugin died", Meaning: "another volume has the name, or it has a write cache or blocks that clients were not told of", Do: "unmap the device and map it again"},
	{Kind: ServerDevice, Name: "failed: plugin state lost", Meaning: "the plugin keeps nothing over a crash", Do: "unmap the device and map it again"},
	{Kind: ServerDevice, Name: "failed: plugin", Meaning: "the plugin of the device crashes too often and is not started again", Do: "repair its cause, then `rnbd server plugin reset NAME`"},

	{Kind: Session, Name: "connected", Meaning: "one path or more is connected"},
	{Kind: Session, Name: "disconnected", Meaning: "no path is connected", Do: "`rnbd path list all` has the last error of each path; `rnbd recover SESSION`"},

	{Kind: Path, Name: "connecting", Meaning: "the connections of the path are being made"},
	{Kind: Path, Name: "connected", Meaning: "requests may go over it"},
	{Kind: Path, Name: "connecting_err", Meaning: "an attempt to connect failed; the next follows", Do: "`rnbd show SESSION PATH` has the last error"},
	{Kind: Path, Name: "reconnecting", Meaning: "the path was lost and waits for its next attempt, at most 5 s", Do: "`rnbd show SESSION PATH` has the last error; check network and server"},
	{Kind: Path, Name: "closing", Meaning: "the connections of the path are being ended"},
	{Kind: Path, Name: "closed", Meaning: "the path was disconnected by hand, or has no attempt left", Do: "`rnbd path reconnect SESSION PATH`"},
	{Kind: Path, Name: "dead", Meaning: "the path was deleted"},

	{Kind: Plugin, Name: "running", Meaning: "its process runs"},
	{Kind: Plugin, Name: "restarting", Meaning: "its process is being started, for the first time or after its end", Do: "nothing, unless it lasts: then see the log of the daemon"},
	{Kind: Plugin, Name: "failed: does not start", Meaning: "its process does not start; it is tried for ever, with pauses up to 5 s, and the daemon serves without it", Do: "repair what the state says behind the colon"},
	{Kind: Plugin, Name: "failed: crashes too often", Meaning: "it crashed more often than --crash-limit in --crash-window and is not started again", Do: "its last words are in the log; then `rnbd server plugin reset NAME`"},

	{Kind: Condition, Name: "requests-hang", Meaning: "requests of the device have no answer for longer than --hung-after; the stage says where they wait: wire is network or server, plugin is the disk", Do: "look at the path or the disk that the condition names; `rnbd show DEVICE`; the condition ends with the last answer"},
	{Kind: Condition, Name: "requests-failed", Meaning: "a request of the device has failed in the last ten minutes; the condition has its errno, offset and stage", Do: "`rnbd explain ERRNO`; with stage plugin the disk of the server has failed it, with stage server the server's log has the reason"},
	{Kind: Condition, Name: "redundancy-lost", Meaning: "the session goes on with the paths that are left; the loss of the last one stops its devices", Do: "`rnbd path list SESSION` has the last error of each path; check its network"},
	{Kind: Condition, Name: "server-away", Meaning: "no path of the session is connected: requests wait or fail as --loss says", Do: "check network and server; `rnbd path list SESSION`; the client connects by itself"},
	{Kind: Condition, Name: "device-closed", Meaning: "the device takes no requests; the condition has the reason", Do: "`rnbd explain closed`; `rnbd remap DEVICE` when the cause is gone"},
	{Kind: Condition, Name: "device-failed", Meaning: "the device is open at the server and cannot be served; the condition has its state", Do: "`rnbd explain` with the state"},
	{Kind: Condition, Name: "plugin-down", Meaning: "the process of the plugin does not run; its devices wait", Do: "`rnbd explain` with its state; see the log of the daemon"},
	{Kind: Condition, Name: "audit-lost", Meaning: "the last record of the audit log is not written", Do: "free space on its file system, or repair its folder; then the next record is written"},
	{Kind: Condition, Name: "config-problem", Meaning: "a part of the configuration is left out, or the last reload was refused", Do: "`rnbd config check`, then `rnbd config apply`"},

	{Kind: DoctorOutcome, Name: "ok", Meaning: "the check found what is needed"},
	{Kind: DoctorOutcome, Name: "note", Meaning: "something optional is not there, or could be faster"},
	{Kind: DoctorOutcome, Name: "warning", Meaning: "it works, but something is likely to go wrong or is slow", Do: "do what the line says"},
	{Kind: DoctorOutcome, Name: "problem", Meaning: "something does not work", Do: "do what the line says; the command ends with exit code 1"},
}
