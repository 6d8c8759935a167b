// The functions of the libraries, found at run time. What the headers define
// inline (ibv_post_send, ibv_poll_cq, ...) needs no symbol.

#ifndef RNBD_IBVERBS_SYM_H
#define RNBD_IBVERBS_SYM_H

#include "lib.h"

// Macros of the headers that stand for functions.
#undef ibv_reg_mr
#undef ibv_query_port

#define F(f) __typeof__(f) *f
struct rv_symbols {
	F(ibv_query_device);
	F(ibv_query_gid);
	F(ibv_alloc_pd);
	F(ibv_dealloc_pd);
	F(ibv_reg_mr);
	F(ibv_dereg_mr);
	F(ibv_create_comp_channel);
	F(ibv_destroy_comp_channel);
	F(ibv_create_cq);
	F(ibv_destroy_cq);
	F(ibv_get_cq_event);
	F(ibv_ack_cq_events);
	F(ibv_create_qp);
	F(ibv_modify_qp);
	F(ibv_destroy_qp);
	F(ibv_get_async_event);
	F(ibv_ack_async_event);
	F(ibv_event_type_str);
	F(ibv_query_port);
	F(rdma_get_devices);
	F(rdma_create_event_channel);
	F(rdma_get_cm_event);
	F(rdma_ack_cm_event);
	F(rdma_create_id);
	F(rdma_destroy_id);
	F(rdma_bind_addr);
	F(rdma_listen);
	F(rdma_resolve_addr);
	F(rdma_resolve_route);
	F(rdma_create_qp);
	F(rdma_destroy_qp);
	F(rdma_connect);
	F(rdma_accept);
	F(rdma_reject);
	F(rdma_disconnect);
	F(rdma_set_option);
};
#undef F

extern struct rv_symbols rv;

#endif
