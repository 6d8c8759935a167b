// Package volume keeps the volumes of pools on this host: it creates, lists,
// resizes, copies and deletes them. It knows no client and no protocol; what it
// needs to know of the clients that have a volume open it asks of Users.
//
// A pool is a folder:
//
//	.rnbd-pool       name and id of the pool, made by Pool.Init
//	.rnbd-XXXXXXXX   a volume that is being made
//	VOLUME           a volume: a sparse file
//	VOLUME@SNAPSHOT  a snapshot: the same, never written again
//
// What is known of a volume beside its data stands in one extended attribute of
// its file, user.rnbd. So a volume is one inode, and it appears, disappears and
// changes in one step: a new one gets its size, its attribute and its data under
// a temporary name, is made durable, and is renamed. A process that ends before
// the rename leaves a temporary file, which the next one removes. There is no
// journal.
//
// Calls may be repeated: creating a volume that exists with that size, deleting
// one that does not exist and resizing one that has the size succeed.
//
// # Errors
//
// Errors wrap an errno:
//
//	EINVAL    a name or a size that no volume can have
//	ENOENT    there is no such volume or snapshot
//	EEXIST    the volume exists and differs from what is asked for
//	EBUSY     a client has the volume open
//	ENOTEMPTY the volume has snapshots
//	ESTALE    the folder of the pool is missing, or is not that of the pool
//	ENOSPC, EDQUOT, EROFS, EFBIG, EOPNOTSUPP   as the file system gives them
package volume
