/*
 * ring-memory serves one ring on a disk of 1 MiB in memory, by rnbd-plugin.h alone. The
 * descriptors are 4 to 6 for the ring and 7 for the arena, of ARENA bytes; it ends when
 * descriptor 3 does. The control path is left out: this program is no plugin, it shows the
 * header and its test runs it.
 */
#include "rnbd-plugin.h"

#include <stdlib.h>

enum { DISK = 1 << 20, ARENA = 1 << 20 };
static unsigned char disk[DISK];

static uint32_t carry_out(const struct rnbd_arena *a, const struct rnbd_request *r)
{
	uint32_t error = rnbd_check(r, DISK, 512, 0);
	if (error != 0)
		return error;
	if (r->op == RNBD_FLUSH)
		return 0;
	if (r->op == RNBD_WRITE_ZEROES) {
		memset(disk + r->offset, 0, r->length);
		return 0;
	}
	if (r->op > RNBD_WRITE)
		return EOPNOTSUPP;
	void *p = rnbd_payload(a, r);
	if (p == NULL)
		return EINVAL;
	if (r->op == RNBD_READ)
		memcpy(p, disk + r->offset, r->length);
	else
		memcpy(disk + r->offset, p, r->length);
	return 0;
}

int main(void)
{
	struct rnbd_ring ring;
	struct rnbd_arena arena;
	if (rnbd_ring_open(&ring, 4, 5, 6) != 0 || rnbd_arena_open(&arena, 7, ARENA) != 0)
		return 1;
	for (;;) {
		struct rnbd_request r[64];
		int n = rnbd_ring_take(&ring, r, 64);
		if (n < 0)
			return 2;
		for (int i = 0; i < n; i++)
			rnbd_ring_answer(&ring, r[i].tag, carry_out(&arena, &r[i]));
		rnbd_ring_publish(&ring);
		struct pollfd host = {.fd = RNBD_CONTROL_FD, .events = POLLIN};
		if (n == 0 && poll(&host, 1, 0) > 0)
			return 0;
		if (n == 0)
			rnbd_ring_wait(&ring, 100);
	}
}
