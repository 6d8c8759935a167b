/* A UD queue pair of libibverbs, driven by lines on standard input.
 *
 *   udpeer DEVICE GID-INDEX QKEY
 *
 * First it prints "qpn N gid HEX mtu BYTES". Then:
 *
 *   send GID QPN QKEY PAYLOAD  sends a datagram; prints "sent STATUS"
 *   recv MS                    waits for one; prints "got QPN FLAGS GRH PAYLOAD", or "none"
 *   counters                   prints "counters BAD-PKEYS QKEY-VIOLATIONS"
 *
 * GID, GRH (40 octets) and PAYLOAD are hexadecimal; an empty payload is "-".
 */
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { GRH = 40, MOST = 4096, RECVS = 64 };

static void need(int ok, const char *what)
{
	if (!ok) {
		perror(what);
		exit(1);
	}
}

static struct ibv_context *open_device(const char *name)
{
	struct ibv_device **all = ibv_get_device_list(NULL);
	need(all != NULL, "ibv_get_device_list");
	for (int i = 0; all[i]; i++)
		if (!strcmp(ibv_get_device_name(all[i]), name))
			return ibv_open_device(all[i]);
	fprintf(stderr, "no device %s\n", name);
	exit(1);
}

static void print_hex(const uint8_t *b, size_t n)
{
	if (n == 0)
		putchar('-');
	for (size_t i = 0; i < n; i++)
		printf("%02x", b[i]);
}

static size_t read_hex(const char *s, uint8_t *b, size_t most)
{
	size_t n = 0;
	unsigned v;
	while (n < most && sscanf(s + 2 * n, "%2x", &v) == 1)
		b[n++] = v;
	return n;
}

static struct ibv_pd *pd;
static struct ibv_cq *send_cq, *recv_cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;
static uint8_t memory[MOST + RECVS * (GRH + MOST)];
static int gid_index;

static uint8_t *slot(uint64_t i) { return memory + MOST + i * (GRH + MOST); }

static void post_recv(uint64_t i)
{
	struct ibv_sge sge = {(uintptr_t)slot(i), GRH + MOST, mr->lkey};
	struct ibv_recv_wr wr = {.wr_id = i, .sg_list = &sge, .num_sge = 1}, *bad;
	need(!ibv_post_recv(qp, &wr, &bad), "ibv_post_recv");
}

static void make_qp(uint32_t qkey)
{
	struct ibv_qp_init_attr init = {
		.send_cq = send_cq, .recv_cq = recv_cq, .qp_type = IBV_QPT_UD,
		.cap = {.max_send_wr = 16, .max_recv_wr = RECVS, .max_send_sge = 1, .max_recv_sge = 1},
	};
	need((qp = ibv_create_qp(pd, &init)) != NULL, "ibv_create_qp");
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .pkey_index = 0, .port_num = 1, .qkey = qkey};
	need(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY), "to INIT");
	for (uint64_t i = 0; i < RECVS; i++)
		post_recv(i);
	a.qp_state = IBV_QPS_RTR;
	need(!ibv_modify_qp(qp, &a, IBV_QP_STATE), "to RTR");
	a.qp_state = IBV_QPS_RTS;
	need(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN), "to RTS");
}

/* take waits for a completion, at most ms milliseconds. */
static int take(struct ibv_cq *cq, struct ibv_wc *wc, int ms)
{
	struct timespec now, pause = {0, 1000000};
	clock_gettime(CLOCK_MONOTONIC, &now);
	int64_t end = now.tv_sec * 1000 + now.tv_nsec / 1000000 + ms;
	for (;;) {
		int n = ibv_poll_cq(cq, 1, wc);
		need(n >= 0, "ibv_poll_cq");
		clock_gettime(CLOCK_MONOTONIC, &now);
		if (n > 0 || now.tv_sec * 1000 + now.tv_nsec / 1000000 >= end)
			return n;
		nanosleep(&pause, NULL);
	}
}

static void do_send(const char *gid, uint32_t qpn, uint32_t qkey, const char *payload)
{
	struct ibv_ah_attr a = {.is_global = 1, .port_num = 1, .grh = {.sgid_index = gid_index, .hop_limit = 64}};
	read_hex(gid, a.grh.dgid.raw, 16);
	struct ibv_ah *ah = ibv_create_ah(pd, &a);
	need(ah != NULL, "ibv_create_ah");
	struct ibv_sge sge = {(uintptr_t)memory, read_hex(payload, memory, MOST), mr->lkey};
	struct ibv_send_wr wr = {
		.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED,
		.wr.ud = {.ah = ah, .remote_qpn = qpn, .remote_qkey = qkey},
	}, *bad;
	need(!ibv_post_send(qp, &wr, &bad), "ibv_post_send");
	struct ibv_wc wc;
	printf("sent %s\n", take(send_cq, &wc, 20000) ? ibv_wc_status_str(wc.status) : "without completion");
	ibv_destroy_ah(ah);
}

static void do_recv(int ms)
{
	struct ibv_wc wc;
	if (!take(recv_cq, &wc, ms)) {
		puts("none");
		return;
	}
	need(wc.status == IBV_WC_SUCCESS && wc.byte_len >= GRH, ibv_wc_status_str(wc.status));
	printf("got %u %s ", wc.src_qp, wc.wc_flags & IBV_WC_GRH ? "grh" : "no-grh");
	print_hex(slot(wc.wr_id), GRH);
	putchar(' ');
	print_hex(slot(wc.wr_id) + GRH, wc.byte_len - GRH);
	putchar('\n');
	post_recv(wc.wr_id);
}

int main(int argc, char **argv)
{
	if (argc != 4) {
		fprintf(stderr, "usage: udpeer DEVICE GID-INDEX QKEY\n");
		return 2;
	}
	struct ibv_context *ctx = open_device(argv[1]);
	need(ctx != NULL, "ibv_open_device");
	gid_index = atoi(argv[2]);
	need((pd = ibv_alloc_pd(ctx)) != NULL, "ibv_alloc_pd");
	need((mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE)) != NULL, "ibv_reg_mr");
	need((send_cq = ibv_create_cq(ctx, 16, NULL, NULL, 0)) != NULL, "ibv_create_cq");
	need((recv_cq = ibv_create_cq(ctx, RECVS, NULL, NULL, 0)) != NULL, "ibv_create_cq");
	make_qp(strtoul(argv[3], NULL, 0));
	union ibv_gid gid;
	need(!ibv_query_gid(ctx, 1, gid_index, &gid), "ibv_query_gid");
	struct ibv_port_attr port;
	need(!ibv_query_port(ctx, 1, &port), "ibv_query_port");
	printf("qpn %u gid ", qp->qp_num);
	print_hex(gid.raw, 16);
	printf(" mtu %d\n", 128 << port.active_mtu);
	fflush(stdout);

	static char line[4 * MOST], to[64], payload[2 * MOST + 16];
	uint32_t qpn, qkey;
	int ms;
	while (fgets(line, sizeof line, stdin)) {
		if (sscanf(line, "send %63s %u %i %8200s", to, &qpn, (int *)&qkey, payload) == 4)
			do_send(to, qpn, qkey, payload);
		else if (sscanf(line, "recv %d", &ms) == 1)
			do_recv(ms);
		else if (!strncmp(line, "counters", 8) && !ibv_query_port(ctx, 1, &port))
			printf("counters %u %u\n", port.bad_pkey_cntr, port.qkey_viol_cntr);
		else
			puts("what?");
		fflush(stdout);
	}
	return 0;
}
