//go:build linux && cgo && ibverbs

#include "sym.h"
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/ib.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>

static int result(int r) { return r == 0 ? 0 : errno ? errno : EIO; }

int rv_create_channel(struct rdma_event_channel **out)
{
	*out = rv.rdma_create_event_channel();
	if (!*out)
		return result(-1);
	int flags = fcntl((*out)->fd, F_GETFL);
	return result(flags < 0 ? -1 : fcntl((*out)->fd, F_SETFL, flags | O_NONBLOCK));
}

int rv_channel_fd(struct rdma_event_channel *ch) { return ch->fd; }

int rv_next_event(struct rdma_event_channel *ch, struct rv_event *out)
{
	struct rdma_cm_event *e;
	if (rv.rdma_get_cm_event(ch, &e))
		return result(-1);
	*out = (struct rv_event){.type = e->event, .status = e->status, .id = e->id};
	struct rdma_cm_id *owner = e->event == RDMA_CM_EVENT_CONNECT_REQUEST ? e->listen_id : e->id;
	out->handle = (uintptr_t)owner->context;
	switch (e->event) {
	case RDMA_CM_EVENT_CONNECT_REQUEST:
	case RDMA_CM_EVENT_ESTABLISHED:
	case RDMA_CM_EVENT_REJECTED:
		if (e->param.conn.private_data) {
			out->private_len = e->param.conn.private_data_len;
			memcpy(out->private_data, e->param.conn.private_data, out->private_len);
		}
		break;
	default:
		break;
	}
	return result(rv.rdma_ack_cm_event(e));
}

int rv_create_id(struct rdma_event_channel *ch, uint64_t handle, int family, struct rdma_cm_id **out)
{
	enum rdma_port_space space = family == AF_IB ? RDMA_PS_IB : RDMA_PS_TCP;
	return result(rv.rdma_create_id(ch, out, (void *)(uintptr_t)handle, space));
}

void rv_adopt_id(struct rdma_cm_id *id, uint64_t handle) { id->context = (void *)(uintptr_t)handle; }

void rv_destroy_id(struct rdma_cm_id *id)
{
	rv_destroy_qp(id);
	rv.rdma_destroy_id(id);
}

struct ibv_context *rv_id_context(struct rdma_cm_id *id) { return id->verbs; }

int rv_id_port_num(struct rdma_cm_id *id) { return id->port_num; }

static void from_sockaddr(struct rv_addr *to, struct sockaddr *from)
{
	memset(to, 0, sizeof(*to));
	to->family = from->sa_family;
	if (from->sa_family == AF_INET) {
		struct sockaddr_in *in = (struct sockaddr_in *)from;
		to->port = ntohs(in->sin_port);
		memcpy(to->ip, &in->sin_addr, 4);
	} else if (from->sa_family == AF_INET6) {
		struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)from;
		to->port = ntohs(in6->sin6_port);
		to->scope = in6->sin6_scope_id;
		memcpy(to->ip, &in6->sin6_addr, 16);
	} else if (from->sa_family == AF_IB) {
		struct sockaddr_ib *ib = (struct sockaddr_ib *)from;
		to->port = be64toh(ib->sib_sid) & RDMA_IB_IP_PORT_MASK;
		memcpy(to->ip, &ib->sib_addr, 16);
	}
}

// The port is the end of a service id, all of whose bits count.
static void to_sockaddr_ib(struct sockaddr_ib *ib, struct rv_addr *from)
{
	ib->sib_family = AF_IB;
	ib->sib_pkey = htons(0xffff); // the partition that all nodes are in
	ib->sib_sid = htobe64(RDMA_IB_PS_IB | from->port);
	ib->sib_sid_mask = htobe64(UINT64_MAX);
	memcpy(&ib->sib_addr, from->ip, 16);
}

static struct sockaddr *to_sockaddr(struct sockaddr_storage *to, struct rv_addr *from)
{
	memset(to, 0, sizeof(*to));
	if (from->family == AF_INET) {
		struct sockaddr_in *in = (struct sockaddr_in *)to;
		in->sin_family = AF_INET;
		in->sin_port = htons(from->port);
		memcpy(&in->sin_addr, from->ip, 4);
	} else if (from->family == AF_IB) {
		to_sockaddr_ib((struct sockaddr_ib *)to, from);
	} else {
		struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)to;
		in6->sin6_family = AF_INET6;
		in6->sin6_port = htons(from->port);
		in6->sin6_scope_id = from->scope;
		memcpy(&in6->sin6_addr, from->ip, 16);
	}
	return (struct sockaddr *)to;
}

void rv_local_addr(struct rdma_cm_id *id, struct rv_addr *out) { from_sockaddr(out, &id->route.addr.src_addr); }

void rv_remote_addr(struct rdma_cm_id *id, struct rv_addr *out) { from_sockaddr(out, &id->route.addr.dst_addr); }

int rv_listen(struct rdma_cm_id *id, struct rv_addr *at, int backlog)
{
	struct sockaddr_storage s;
	int err = result(rv.rdma_bind_addr(id, to_sockaddr(&s, at)));
	return err ? err : result(rv.rdma_listen(id, backlog));
}

int rv_resolve_addr(struct rdma_cm_id *id, struct rv_addr *src, struct rv_addr *dst, int ms)
{
	struct sockaddr_storage s, d;
	return result(rv.rdma_resolve_addr(id, src->family ? to_sockaddr(&s, src) : NULL, to_sockaddr(&d, dst), ms));
}

int rv_resolve_route(struct rdma_cm_id *id, int ms) { return result(rv.rdma_resolve_route(id, ms)); }

int rv_create_qp(struct rdma_cm_id *id, struct ibv_pd *pd, struct rv_cq *cq, int sends, int recvs, int sges,
		 struct rv_recv *first, int nfirst)
{
	struct ibv_recv_wr *bad;
	struct ibv_qp_init_attr a = {.send_cq = cq->cq, .recv_cq = cq->cq, .qp_type = IBV_QPT_RC,
		.cap = {.max_send_wr = sends, .max_recv_wr = recvs, .max_send_sge = sges, .max_recv_sge = 1}};
	int err = result(rv.rdma_create_qp(id, pd, &a));
	for (int i = 0; i < nfirst && !err; i++) {
		struct ibv_recv_wr wr = {.wr_id = first[i].wr_id, .sg_list = &first[i].sge, .num_sge = first[i].sge.length > 0};
		err = ibv_post_recv(id->qp, &wr, &bad);
	}
	return err < 0 ? -err : err;
}

void rv_destroy_qp(struct rdma_cm_id *id)
{
	if (id->qp)
		rv.rdma_destroy_qp(id);
}

struct ibv_qp *rv_qp(struct rdma_cm_id *id) { return id->qp; }

uint32_t rv_qp_num(struct rdma_cm_id *id) { return id->qp ? id->qp->qp_num : 0; }

void rv_patience(struct rdma_cm_id *id)
{
	struct ibv_qp_attr a = {.min_rnr_timer = 12}; // 0.64 ms; the connection manager sets 655 ms
	if (id->qp)
		rv.ibv_modify_qp(id->qp, &a, IBV_QP_MIN_RNR_TIMER);
}

int rv_ack_timeout(struct rdma_cm_id *id, int exponent)
{
	uint8_t t = exponent;
	return result(rv.rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &t, sizeof(t)));
}

static struct rdma_conn_param param(const uint8_t *priv, int len, int ird, int ord)
{
	return (struct rdma_conn_param){.private_data = len ? priv : NULL, .private_data_len = len,
		.responder_resources = ird, .initiator_depth = ord, .retry_count = 7, .rnr_retry_count = 7};
}

int rv_connect(struct rdma_cm_id *id, const uint8_t *priv, int len, int ird, int ord)
{
	struct rdma_conn_param p = param(priv, len, ird, ord);
	return result(rv.rdma_connect(id, &p));
}

int rv_accept(struct rdma_cm_id *id, const uint8_t *priv, int len, int ird, int ord)
{
	struct rdma_conn_param p = param(priv, len, ird, ord);
	return result(rv.rdma_accept(id, &p));
}

int rv_reject(struct rdma_cm_id *id, const uint8_t *priv, int len)
{
	return result(rv.rdma_reject(id, len ? priv : NULL, len));
}

void rv_disconnect(struct rdma_cm_id *id)
{
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_ERR};
	rv.rdma_disconnect(id);
	if (id->qp) // also where there was nothing to disconnect
		rv.ibv_modify_qp(id->qp, &a, IBV_QP_STATE);
}
