/*
 * rnbd-plugin.h: the shared memory of storage plugins for rnbd, in C11.
 *
 * The host passes three descriptors for a ring, in this order: ring memory, submission
 * event, completion event; and one for each arena. They come by SCM_RIGHTS on descriptor
 * 3 of the plugin, and calls name them by tokens (plugin.proto). This header opens them,
 * takes requests out, and answers them. The layout is that of docs/extend/abi/ring-v1.md.
 *
 *	struct rnbd_ring ring;
 *	int error = rnbd_ring_open(&ring, mem, sq_event, cq_event);
 *	for (;;) {
 *		struct rnbd_request r[64];
 *		int n = rnbd_ring_take(&ring, r, 64);
 *		for (int i = 0; i < n; i++)
 *			rnbd_ring_answer(&ring, r[i].tag, carry_out(&r[i]));
 *		rnbd_ring_publish(&ring);
 *		if (n == 0)
 *			rnbd_ring_wait(&ring, -1);
 *	}
 *
 * A ring has one owner: one thread calls these functions. A thread that has carried out a
 * request hands it to the owner, and wakes the owner by rnbd_event_kick(ring.sq_event).
 *
 * Functions that can fail return a negative errno.
 */
#ifndef RNBD_PLUGIN_H
#define RNBD_PLUGIN_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

/* What a host sets in the environment of a plugin, as RNBD_PLUGIN. */
#define RNBD_COOKIE "4e1f5d0f1c0b4b6fa3d2c5f1b9a7e6d3"
#define RNBD_PROTOCOL_VERSION 1
#define RNBD_RING_VERSION 1
#define RNBD_CONTROL_FD 3

/* Operations. The host has to be answered EOPNOTSUPP for any other. */
enum rnbd_op {
	RNBD_READ = 0,
	RNBD_WRITE = 1,
	RNBD_FLUSH = 2,
	RNBD_DISCARD = 3,
	RNBD_SECURE_ERASE = 4,
	RNBD_WRITE_ZEROES = 5,
};

/* Flags. The host has to be answered EINVAL for any other. */
enum {
	RNBD_FUA = 1,      /* on the medium before the answer */
	RNBD_SYNC = 2,     /* a hint: a user waits */
	RNBD_NO_UNMAP = 4, /* write-zeroes leaves the range allocated */
	RNBD_KNOWN_FLAGS = 7,
};

/* A request, as it lies in the ring. Everything in it is the host's word. */
struct rnbd_request {
	uint64_t tag;          /* goes into the answer */
	uint64_t offset;       /* byte on the disk */
	uint64_t arena_offset; /* of the payload, a multiple of 512 bytes */
	uint32_t device;       /* of OpenDisk */
	uint32_t arena;        /* of AttachArena */
	uint32_t length;       /* bytes on the disk, and of payload for reads and writes */
	uint8_t op;            /* enum rnbd_op */
	uint8_t flags;
	uint16_t priority; /* Linux ioprio, a hint */
	uint8_t reserved[24];
};

struct rnbd_answer {
	uint64_t tag;
	uint32_t error; /* 0, or a positive errno */
	uint32_t reserved;
};

_Static_assert(sizeof(struct rnbd_request) == 64, "request");
_Static_assert(sizeof(struct rnbd_answer) == 16, "answer");

/* Offsets in the memory of a ring. */
enum {
	RNBD_AT_VERSION = 8,
	RNBD_AT_FEATURES = 12,
	RNBD_AT_ENTRIES = 16,
	RNBD_AT_SQ_TAIL = 128,
	RNBD_AT_SQ_HEAD = 256,
	RNBD_AT_SQ_WAKE = 384,
	RNBD_AT_CQ_TAIL = 512,
	RNBD_AT_CQ_WAKE = 768,
	RNBD_AT_REQUESTS = 4096,
};
#define RNBD_RING_MAGIC UINT64_C(0x474e495244424e52)

/* A ring, seen from the plugin. Nothing in it is read from shared memory twice. */
struct rnbd_ring {
	unsigned char *mem;
	size_t size; /* bytes of mem */
	uint32_t entries;
	uint32_t head;  /* requests that were taken */
	uint32_t tail;  /* answers that were written */
	uint32_t taken; /* requests without an answer */
	int mem_fd, sq_event, cq_event;
};

static inline _Atomic uint32_t *rnbd_word(const struct rnbd_ring *r, size_t at)
{
	return (_Atomic uint32_t *)(void *)(r->mem + at);
}

static inline uint32_t rnbd_field(const struct rnbd_ring *r, size_t at)
{
	uint32_t v;
	memcpy(&v, r->mem + at, sizeof v);
	return v;
}

/* Reports the size of a memory file that has the seals of rings and arenas; else a negative errno. */
static inline int64_t rnbd_sealed_size(int fd)
{
	const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
	int have = fcntl(fd, F_GET_SEALS);
	struct stat st;
	if (have < 0 || fstat(fd, &st) < 0)
		return -errno;
	return (have & seals) == seals ? (int64_t)st.st_size : -EINVAL;
}

/* Maps and checks a ring. On success the descriptors belong to it. */
static inline int rnbd_ring_open(struct rnbd_ring *r, int mem, int sq_event, int cq_event)
{
	int64_t size = rnbd_sealed_size(mem);
	if (size < 0)
		return (int)size;
	if (size < RNBD_AT_REQUESTS)
		return -EINVAL;
	memset(r, 0, sizeof *r);
	r->mem = mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, MAP_SHARED, mem, 0);
	if (r->mem == MAP_FAILED)
		return -errno;
	r->size = (size_t)size;
	uint64_t magic;
	memcpy(&magic, r->mem, sizeof magic);
	uint64_t n = r->entries = rnbd_field(r, RNBD_AT_ENTRIES);
	if (magic != RNBD_RING_MAGIC || rnbd_field(r, RNBD_AT_VERSION) != RNBD_RING_VERSION || rnbd_field(r, RNBD_AT_FEATURES) != 0 ||
	    n == 0 || (n & (n - 1)) != 0 || n > 65536 || rnbd_field(r, 20) != sizeof(struct rnbd_request) ||
	    rnbd_field(r, 24) != sizeof(struct rnbd_answer) || rnbd_field(r, 28) != RNBD_AT_REQUESTS ||
	    rnbd_field(r, 32) != RNBD_AT_REQUESTS + 64 * n || r->size < RNBD_AT_REQUESTS + 80 * n) {
		munmap(r->mem, r->size);
		return -EINVAL;
	}
	r->mem_fd = mem, r->sq_event = sq_event, r->cq_event = cq_event;
	return 0;
}

/* Unmaps a ring and closes its descriptors. */
static inline void rnbd_ring_close(struct rnbd_ring *r)
{
	munmap(r->mem, r->size);
	close(r->mem_fd);
	close(r->sq_event);
	close(r->cq_event);
}

/*
 * Copies up to most requests to out and returns their number; 0: there are none.
 * -EPROTO: the host broke the ring, which must not be used any more.
 */
static inline int rnbd_ring_take(struct rnbd_ring *r, struct rnbd_request *out, uint32_t most)
{
	uint32_t n = atomic_load(rnbd_word(r, RNBD_AT_SQ_TAIL)) - r->head;
	if (n > r->entries - r->taken)
		return -EPROTO;
	if (n > most)
		n = most;
	for (uint32_t i = 0; i < n; i++)
		memcpy(&out[i], r->mem + RNBD_AT_REQUESTS + sizeof *out * ((r->head + i) & (r->entries - 1)), sizeof *out);
	if (n > 0) {
		r->head += n;
		r->taken += n;
		atomic_store(rnbd_word(r, RNBD_AT_SQ_HEAD), r->head);
	}
	return (int)n;
}

/* Writes the answer to a request that was taken. The host sees it after rnbd_ring_publish. */
static inline void rnbd_ring_answer(struct rnbd_ring *r, uint64_t tag, uint32_t error)
{
	struct rnbd_answer a = {.tag = tag, .error = error};
	memcpy(r->mem + RNBD_AT_REQUESTS + sizeof(struct rnbd_request) * (size_t)r->entries + sizeof a * (r->tail & (r->entries - 1)), &a, sizeof a);
	r->tail++;
	r->taken--;
}

/* Wakes whoever sleeps on an event. */
static inline void rnbd_event_kick(int event)
{
	const uint64_t one = 1;
	ssize_t n = write(event, &one, sizeof one); /* a full counter is a wake-up under way */
	(void)n;
}

/*
 * Shows the host all answers, and wakes it if it has asked for that. Store and load are
 * sequentially consistent, as the ring's page demands: no wake-up is lost.
 */
static inline void rnbd_ring_publish(struct rnbd_ring *r)
{
	if (atomic_load(rnbd_word(r, RNBD_AT_CQ_TAIL)) == r->tail)
		return;
	atomic_store(rnbd_word(r, RNBD_AT_CQ_TAIL), r->tail);
	_Atomic uint32_t *wake = rnbd_word(r, RNBD_AT_CQ_WAKE);
	if (atomic_load(wake) != 0 && atomic_exchange(wake, 0) != 0)
		rnbd_event_kick(r->cq_event);
}

/*
 * Sleeps until requests may be there, the event was kicked, or ms milliseconds have passed
 * (-1: for ever). It may return without any of them.
 */
static inline void rnbd_ring_wait(struct rnbd_ring *r, int ms)
{
	_Atomic uint32_t *tail = rnbd_word(r, RNBD_AT_SQ_TAIL), *wake = rnbd_word(r, RNBD_AT_SQ_WAKE);
	if (atomic_load(tail) != r->head)
		return;
	atomic_store(wake, 1);
	if (atomic_load(tail) == r->head) {
		struct pollfd p = {.fd = r->sq_event, .events = POLLIN};
		uint64_t token;
		poll(&p, 1, ms);
		ssize_t n = read(r->sq_event, &token, sizeof token); /* it does not block */
		(void)n;
	}
	atomic_store(wake, 0);
}

/* An arena: payload memory. */
struct rnbd_arena {
	unsigned char *mem;
	size_t size;
};

/* Maps size bytes of an arena. The descriptor stays the caller's, who may close it. */
static inline int rnbd_arena_open(struct rnbd_arena *a, int fd, uint64_t size)
{
	int64_t have = rnbd_sealed_size(fd);
	if (have < 0)
		return (int)have;
	if (size == 0 || size > (uint64_t)have)
		return -EINVAL;
	a->mem = mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	a->size = (size_t)size;
	return a->mem == MAP_FAILED ? -errno : 0;
}

/* Returns the payload of a request; NULL: it does not lie in the arena, answer EINVAL. */
static inline void *rnbd_payload(const struct rnbd_arena *a, const struct rnbd_request *r)
{
	if (r->length > a->size || r->arena_offset > a->size - r->length)
		return NULL;
	return a->mem + r->arena_offset;
}

/*
 * Returns 0 if a request may be carried out on a disk of size bytes in blocks of block
 * bytes, else the errno to answer. Operations beyond write, and the largest request, are
 * the plugin's to check.
 */
static inline uint32_t rnbd_check(const struct rnbd_request *r, uint64_t size, uint32_t block, int read_only)
{
	if (r->op > RNBD_WRITE_ZEROES)
		return EOPNOTSUPP;
	if (r->op == RNBD_FLUSH)
		return 0;
	if (read_only && r->op != RNBD_READ)
		return EROFS;
	if (((r->offset | r->length) & (block - 1)) != 0 || r->length == 0)
		return EINVAL;
	if (r->length > size || r->offset > size - r->length)
		return EIO;
	return (r->flags & ~RNBD_KNOWN_FLAGS) != 0 ? EINVAL : 0;
}

/*
 * Receives the next message on descriptor 3: a token and up to 4 descriptors, which belong
 * to the caller. Returns their number. -ENOTCONN: the host is gone or has detached, end
 * the process within a second.
 */
static inline int rnbd_receive(uint64_t *token, int fds[4])
{
	union {
		char space[CMSG_SPACE(4 * sizeof(int))];
		struct cmsghdr align;
	} control;
	struct iovec io = {.iov_base = token, .iov_len = sizeof *token};
	struct msghdr m = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
	ssize_t n;
	do
		n = recvmsg(RNBD_CONTROL_FD, &m, MSG_CMSG_CLOEXEC);
	while (n < 0 && errno == EINTR);
	if (n <= 0)
		return -ENOTCONN;
	int count = 0;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c != NULL; c = CMSG_NXTHDR(&m, c))
		if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
			count = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
			memcpy(fds, CMSG_DATA(c), (size_t)count * sizeof(int));
		}
	return n == sizeof *token && (m.msg_flags & (MSG_CTRUNC | MSG_TRUNC)) == 0 ? count : -EPROTO;
}

/*
 * Tries to take the fence of a disk on the description that all its I/O goes through; slot
 * 0 for a writer, 16 + 2 * device for a reader, who gives writer = 0. Returns 0, or
 * -EAGAIN while the I/O of another process holds it: try again until the call is cancelled.
 */
static inline int rnbd_fence(int fd, uint32_t slot, int writer)
{
	struct flock l = {.l_type = writer ? F_WRLCK : F_RDLCK, .l_whence = SEEK_SET, .l_start = (INT64_C(1) << 62) + slot, .l_len = 1};
	if (fcntl(fd, F_OFD_SETLK, &l) == 0)
		return 0;
	return errno == EACCES ? -EAGAIN : -errno;
}

#endif
