//go:build linux && cgo && ibverbs

#include "sym.h"
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

// Functions of libibverbs return NULL or -1 with errno, or an errno.
static int failed(void) { return errno ? errno : EIO; }

static int nonblocking(int fd)
{
	int flags = fcntl(fd, F_GETFL);
	return flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ? failed() : 0;
}

// ---- devices

static int describe(struct rv_device *d, struct ibv_context *ctx)
{
	struct ibv_device_attr a;
	memset(d, 0, sizeof(*d));
	int err = rv.ibv_query_device(ctx, &a);
	if (err)
		return err;
	d->ctx = ctx;
	snprintf(d->name, sizeof(d->name), "%s", ctx->device->name);
	d->ports = a.phys_port_cnt;
	d->iwarp = ctx->device->transport_type != IBV_TRANSPORT_IB;
	d->send_inv = !!(a.device_cap_flags & IBV_DEVICE_MEM_MGT_EXTENSIONS);
	d->windows = !!(a.device_cap_flags & IBV_DEVICE_MEM_WINDOW) && a.max_mw > 0;
	d->max_qp_wr = a.max_qp_wr;
	d->max_sge = a.max_sge;
	d->max_cqe = a.max_cqe;
	return nonblocking(ctx->async_fd);
}

int rv_devices(struct rv_device *out, int max, int *n)
{
	int count = 0;
	*n = 0;
	errno = 0;
	// The list is not freed: freeing it closes the contexts.
	struct ibv_context **list = rv.rdma_get_devices(&count);
	if (!list)
		return count == 0 && errno == 0 ? ENODEV : failed();
	for (int i = 0; i < count && *n < max; i++)
		if (describe(&out[*n], list[i]) == 0)
			++*n;
	return 0;
}

int rv_async_fd(struct ibv_context *ctx) { return ctx->async_fd; }

int rv_async(struct ibv_context *ctx, int *type, uint32_t *qp_num)
{
	struct ibv_async_event e;
	if (rv.ibv_get_async_event(ctx, &e))
		return failed();
	*type = e.event_type;
	*qp_num = 0;
	switch (e.event_type) {
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
		*qp_num = e.element.qp->qp_num;
		break;
	default:
		break;
	}
	rv.ibv_ack_async_event(&e);
	return 0;
}

const char *rv_async_str(int type) { return rv.ibv_event_type_str(type); }

// ---- memory

int rv_alloc_pd(struct ibv_context *ctx, struct ibv_pd **out)
{
	*out = rv.ibv_alloc_pd(ctx);
	return *out ? 0 : failed();
}

int rv_dealloc_pd(struct ibv_pd *pd) { return rv.ibv_dealloc_pd(pd); }

int rv_reg_mr(struct ibv_pd *pd, uint64_t addr, uint64_t len, int access, struct ibv_mr **out)
{
	*out = rv.ibv_reg_mr(pd, (void *)(uintptr_t)addr, len, access);
	return *out ? 0 : failed();
}

int rv_dereg_mr(struct ibv_mr *mr) { return rv.ibv_dereg_mr(mr); }

// ---- queues

int rv_create_cq(struct ibv_context *ctx, int depth, struct rv_cq **out)
{
	int err;
	struct rv_cq *cq = calloc(1, sizeof(*cq));
	if (!cq)
		return ENOMEM;
	cq->channel = rv.ibv_create_comp_channel(ctx);
	if (!cq->channel) {
		err = failed();
		free(cq);
		return err;
	}
	err = nonblocking(cq->channel->fd);
	if (!err) {
		cq->cq = rv.ibv_create_cq(ctx, depth, NULL, cq->channel, 0);
		err = cq->cq ? 0 : failed();
	}
	if (err) {
		rv.ibv_destroy_comp_channel(cq->channel);
		free(cq);
		return err;
	}
	*out = cq;
	return 0;
}

int rv_destroy_cq(struct rv_cq *cq)
{
	int err = rv.ibv_destroy_cq(cq->cq);
	if (err)
		return err;
	err = rv.ibv_destroy_comp_channel(cq->channel);
	free(cq);
	return err;
}

int rv_cq_fd(struct rv_cq *cq) { return cq->channel->fd; }

static void post_failed(struct rv_cq *cq, uint64_t wr_id, int err)
{
	cq->failures[cq->nfailures++] = (struct rv_failure){wr_id, err < 0 ? -err : err};
}

enum { CHAIN = 64 }; // requests posted in one call

static void post_recvs(struct rv_cq *cq, int n)
{
	struct ibv_recv_wr wrs[CHAIN], *bad;
	for (int i = 0; i < n;) {
		int k = 0;
		struct ibv_qp *qp = cq->recvs[i].qp;
		for (; i < n && k < CHAIN && cq->recvs[i].qp == qp; i++, k++) {
			struct rv_recv *r = &cq->recvs[i];
			wrs[k] = (struct ibv_recv_wr){.wr_id = r->wr_id, .next = &wrs[k + 1], .sg_list = &r->sge, .num_sge = r->sge.length > 0};
		}
		wrs[k - 1].next = NULL;
		bad = wrs;
		int err = ibv_post_recv(qp, wrs, &bad);
		if (err)
			post_failed(cq, bad->wr_id, err);
	}
}

// bind_window makes wr the request that gives w a key. A window that is bound
// to nothing has a key all the same; it must not be one that peers use next.
//
// Libraries read the key that w has before from the struct ibv_mw. They get a
// copy: as soon as wr is posted the peer may answer on another connection, whose
// owner makes the next request of w.
static void bind_window(struct ibv_send_wr *wr, struct ibv_mw *copy, struct rv_window *w, uint32_t key, int on)
{
	*copy = *w->mw;
	copy->rkey = w->key;
	w->key = on ? key : key ^ 0x80;
	wr->opcode = IBV_WR_BIND_MW;
	wr->bind_mw.mw = copy;
	wr->bind_mw.rkey = w->key;
	wr->bind_mw.bind_info.mr = w->mr;
	wr->bind_mw.bind_info.addr = w->addr;
	wr->bind_mw.bind_info.length = on ? w->len : 0;
	wr->bind_mw.bind_info.mw_access_flags = on ? w->access : 0;
}

static void fill(struct ibv_send_wr *wr, struct ibv_mw *copy, struct rv_send *s, struct ibv_sge *sges)
{
	memset(wr, 0, sizeof(*wr));
	wr->wr_id = s->wr_id;
	wr->send_flags = s->signaled ? IBV_SEND_SIGNALED : 0;
	wr->sg_list = sges;
	wr->num_sge = s->num_sge;
	switch (s->opcode) {
	case RV_INVALIDATE:
	case RV_REGISTER:
		bind_window(wr, copy, s->window, s->rkey, s->opcode == RV_REGISTER);
		return;
	case IBV_WR_SEND_WITH_INV:
		wr->invalidate_rkey = s->rkey;
		break;
	case IBV_WR_SEND_WITH_IMM:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		wr->imm_data = htobe32(s->imm);
		break;
	default:
		break;
	}
	wr->opcode = s->opcode;
	wr->wr.rdma.remote_addr = s->remote_addr;
	wr->wr.rdma.rkey = s->opcode == IBV_WR_SEND_WITH_INV ? 0 : s->rkey;
}

static void post_sends(struct rv_cq *cq, int n)
{
	struct ibv_send_wr wrs[CHAIN], *bad;
	struct ibv_mw copies[CHAIN];
	struct ibv_sge *sges = cq->sges;
	for (int i = 0; i < n;) {
		int k = 0;
		struct ibv_qp *qp = cq->sends[i].qp;
		for (; i < n && k < CHAIN && cq->sends[i].qp == qp; i++, k++) {
			fill(&wrs[k], &copies[k], &cq->sends[i], sges);
			wrs[k].next = &wrs[k + 1];
			sges += cq->sends[i].num_sge;
		}
		wrs[k - 1].next = NULL;
		bad = wrs;
		int err = ibv_post_send(qp, wrs, &bad);
		if (err)
			post_failed(cq, bad->wr_id, err);
	}
}

static void copy_wc(struct rv_wc *to, struct ibv_wc *from)
{
	*to = (struct rv_wc){
		.wr_id = from->wr_id, .byte_len = from->byte_len, .vendor_err = from->vendor_err,
		.status = from->status, .opcode = from->opcode, .flags = from->wc_flags,
	};
	if (from->wc_flags & IBV_WC_WITH_IMM)
		to->imm = be32toh(from->imm_data);
	else if (from->wc_flags & IBV_WC_WITH_INV)
		to->inv_key = from->invalidated_rkey;
}

int rv_turn(struct rv_cq *cq, int nrecv, int nsend, int max)
{
	struct ibv_wc wcs[RV_WCS];
	if (nrecv)
		post_recvs(cq, nrecv);
	if (nsend)
		post_sends(cq, nsend);
	if (!max)
		return 0;
	int n = ibv_poll_cq(cq->cq, max, wcs);
	for (int i = 0; i < n; i++)
		copy_wc(&cq->wcs[i], &wcs[i]);
	return n > 0 ? n : 0;
}

int rv_arm(struct rv_cq *cq)
{
	struct ibv_cq *which;
	void *context;
	if (cq->armed && rv.ibv_get_cq_event(cq->channel, &which, &context) == 0) {
		rv.ibv_ack_cq_events(which, 1);
		cq->armed = 0;
	}
	if (cq->armed)
		return 0; // nothing has completed since
	int err = ibv_req_notify_cq(cq->cq, 0);
	cq->armed = !err;
	return err;
}

// ---- windows

// any_gid finds an address of the port to reach it by: one of IPv4 before
// others, because these need no address on the network interface.
static int any_gid(struct ibv_context *ctx, int port, int len, union ibv_gid *gid, int *index)
{
	union ibv_gid g;
	*index = -1;
	for (int i = 0; i < len && i < 64; i++) {
		if (rv.ibv_query_gid(ctx, port, i, &g) || (!g.global.subnet_prefix && !g.global.interface_id))
			continue;
		int v4 = !g.global.subnet_prefix && g.raw[10] == 0xff && g.raw[11] == 0xff;
		if (*index < 0 || v4) {
			*gid = g;
			*index = i;
		}
		if (v4)
			break;
	}
	return *index < 0 ? EADDRNOTAVAIL : 0;
}

static int active_port(struct ibv_context *ctx, struct ibv_port_attr *a)
{
	for (int port = 1; port < 8; port++) {
		memset(a, 0, sizeof(*a));
		if (rv.ibv_query_port(ctx, port, (struct _compat_ibv_port_attr *)a))
			break;
		if (a->state == IBV_PORT_ACTIVE)
			return port;
	}
	return 0;
}

static int join(struct ibv_qp *qp, uint32_t peer)
{
	struct ibv_port_attr pa;
	union ibv_gid gid;
	int index, err, port = active_port(qp->context, &pa);
	if (!port)
		return ENETDOWN;
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = port, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE};
	if ((err = rv.ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)))
		return err;
	a = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_256, .dest_qp_num = peer, .min_rnr_timer = 12,
		.ah_attr = {.port_num = port, .dlid = pa.lid}};
	if (pa.link_layer == IBV_LINK_LAYER_ETHERNET) {
		if ((err = any_gid(qp->context, port, pa.gid_tbl_len, &gid, &index)))
			return err;
		a.ah_attr.is_global = 1;
		a.ah_attr.grh.dgid = gid;
		a.ah_attr.grh.sgid_index = index;
		a.ah_attr.grh.hop_limit = 1;
	}
	if ((err = rv.ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)))
		return err;
	a = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .timeout = 10, .retry_cnt = 3, .rnr_retry = 3};
	return rv.ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
				IBV_QP_MAX_QP_RD_ATOMIC);
}

static struct ibv_qp *loop_qp(struct rv_loop *l, struct ibv_pd *pd)
{
	struct ibv_qp_init_attr a = {.send_cq = l->cq, .recv_cq = l->cq, .qp_type = IBV_QPT_RC,
		.cap = {.max_send_wr = 4, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1}};
	return rv.ibv_create_qp(pd, &a);
}

int rv_loop_open(struct rv_loop *l, struct ibv_pd *pa, struct ibv_pd *pb)
{
	int err;
	memset(l, 0, sizeof(*l));
	if (!(l->cq = rv.ibv_create_cq(pa->context, 16, NULL, NULL, 0)) || !(l->a = loop_qp(l, pa)) || !(l->b = loop_qp(l, pb)))
		err = failed();
	else if (!(err = join(l->a, l->b->qp_num)))
		err = join(l->b, l->a->qp_num);
	if (err)
		rv_loop_close(l);
	return err;
}

void rv_loop_close(struct rv_loop *l)
{
	if (l->a)
		rv.ibv_destroy_qp(l->a);
	if (l->b)
		rv.ibv_destroy_qp(l->b);
	if (l->cq)
		rv.ibv_destroy_cq(l->cq);
	memset(l, 0, sizeof(*l));
}

// run posts wr and waits for it, up to three seconds: 0, an errno, or minus
// the status of the completion. Most take microseconds.
static int run(struct rv_loop *l, struct ibv_qp *qp, struct ibv_send_wr *wr)
{
	struct ibv_send_wr *bad;
	struct ibv_wc wc;
	struct timespec start, now;
	wr->send_flags = IBV_SEND_SIGNALED;
	int err = ibv_post_send(qp, wr, &bad);
	if (err)
		return err < 0 ? -err : err;
	clock_gettime(CLOCK_MONOTONIC, &start);
	for (;;) {
		int n = ibv_poll_cq(l->cq, 1, &wc);
		if (n < 0)
			return EIO;
		if (n > 0)
			return -(int)wc.status;
		clock_gettime(CLOCK_MONOTONIC, &now);
		if (now.tv_sec - start.tv_sec > 2)
			return ETIMEDOUT;
		sched_yield();
	}
}

static int move(struct rv_loop *l, struct ibv_qp *qp, struct rv_window *w, uint32_t key, int on)
{
	struct ibv_send_wr wr;
	struct ibv_mw copy;
	memset(&wr, 0, sizeof(wr));
	bind_window(&wr, &copy, w, key, on);
	return run(l, qp, &wr);
}

static uint32_t next_key(uint32_t key) { return (key & ~0xffu) | ((key + 1) & 0xff); }

int rv_window_open(struct rv_loop *l, struct ibv_pd *pd, struct rv_window *w)
{
	w->mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
	if (!w->mw)
		return failed();
	w->key = w->mw->rkey;
	int err = move(l, l->a, w, next_key(w->key), 1);
	if (err) {
		ibv_dealloc_mw(w->mw);
		w->mw = NULL;
	}
	return err < 0 ? EIO : err;
}

int rv_window_close(struct rv_window *w)
{
	w->mw->rkey = w->key;
	return ibv_dealloc_mw(w->mw);
}

struct probe {
	struct ibv_pd *server, *client;
	struct ibv_mr *smr, *cmr;
	struct rv_loop one, two; // a: the server's end, b: the client's
	struct rv_window w;
	uint8_t mem[64], src[64];
};

static int probe_write(struct probe *p, struct rv_loop *l, uint32_t key)
{
	struct ibv_sge sge = {.addr = (uintptr_t)p->src, .length = 8, .lkey = p->cmr->lkey};
	struct ibv_send_wr wr = {.opcode = IBV_WR_RDMA_WRITE, .sg_list = &sge, .num_sge = 1,
		.wr.rdma = {.remote_addr = (uintptr_t)p->mem, .rkey = key}};
	return run(l, l->b, &wr);
}

// probe_steps: a window made on one connection serves the other, moves from
// there, and the old key and the closed window let nothing through.
static const char *probe_steps(struct probe *p)
{
	if (rv_window_open(&p->one, p->server, &p->w))
		return "it does not bind windows of type 1";
	uint32_t key = p->w.key;
	memset(p->src, 1, sizeof(p->src));
	if (probe_write(p, &p->two, key) || p->mem[0] != 1)
		return "a window bound on one connection does not serve another";
	if (move(&p->two, p->two.a, &p->w, key, 0) || move(&p->two, p->two.a, &p->w, next_key(key), 1))
		return "it does not bind a window again on another connection";
	memset(p->src, 2, sizeof(p->src));
	if (probe_write(p, &p->one, next_key(key)) || p->mem[0] != 2)
		return "a window that was bound again does not serve its first connection";
	memset(p->src, 3, sizeof(p->src));
	if (!probe_write(p, &p->two, key) || p->mem[0] == 3)
		return "the old key of a window still works";
	if (move(&p->one, p->one.a, &p->w, next_key(key), 0))
		return "it does not unbind a window";
	if (!probe_write(p, &p->one, next_key(key)) || p->mem[0] == 3)
		return "a window that was unbound still works";
	return NULL;
}

const char *rv_probe(struct ibv_context *ctx)
{
	struct probe *p = calloc(1, sizeof(*p));
	const char *why = "it refuses what the test of its windows needs";
	if (!p)
		return "no memory";
	int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND;
	if ((p->server = rv.ibv_alloc_pd(ctx)) && (p->client = rv.ibv_alloc_pd(ctx)) &&
	    (p->smr = rv.ibv_reg_mr(p->server, p->mem, sizeof(p->mem), access)) &&
	    (p->cmr = rv.ibv_reg_mr(p->client, p->src, sizeof(p->src), IBV_ACCESS_LOCAL_WRITE)) &&
	    !rv_loop_open(&p->one, p->server, p->client) && !rv_loop_open(&p->two, p->server, p->client)) {
		p->w = (struct rv_window){.mr = p->smr, .addr = (uintptr_t)p->mem, .len = sizeof(p->mem), .access = IBV_ACCESS_REMOTE_WRITE};
		why = probe_steps(p);
	}
	rv_loop_close(&p->one);
	rv_loop_close(&p->two);
	if (p->w.mw)
		ibv_dealloc_mw(p->w.mw);
	if (p->smr)
		rv.ibv_dereg_mr(p->smr);
	if (p->cmr)
		rv.ibv_dereg_mr(p->cmr);
	if (p->server)
		rv.ibv_dealloc_pd(p->server);
	if (p->client)
		rv.ibv_dealloc_pd(p->client);
	free(p);
	return why;
}
