// What C does for the provider: the libraries are opened at run time, batches
// cross into C once. Every function that can fail returns 0 or an errno.

#ifndef RNBD_IBVERBS_LIB_H
#define RNBD_IBVERBS_LIB_H

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <stdint.h>

// rv_load opens the libraries, once. It returns NULL, or the words of the
// dynamic linker for what is missing.
const char *rv_load(void);

// ---- devices

struct rv_device {
	struct ibv_context *ctx;
	char name[64];
	int ports;
	int iwarp;    // no InfiniBand transport
	int send_inv; // SEND WITH INVALIDATE
	int windows;  // memory windows of type 1
	int max_qp_wr, max_sge, max_cqe;
};

// rv_devices lists the contexts that librdmacm has open, at most max of them,
// and sets *n to their number. The list is for ever.
int rv_devices(struct rv_device *out, int max, int *n);
int rv_async_fd(struct ibv_context *ctx);

// rv_async takes one asynchronous event without waiting; EAGAIN: there is none.
// *qp_num is of the queue pair concerned, 0 for none.
int rv_async(struct ibv_context *ctx, int *type, uint32_t *qp_num);
const char *rv_async_str(int type);

// ---- memory

int rv_alloc_pd(struct ibv_context *ctx, struct ibv_pd **out);
int rv_dealloc_pd(struct ibv_pd *pd);
int rv_reg_mr(struct ibv_pd *pd, uint64_t addr, uint64_t len, int access, struct ibv_mr **out);
int rv_dereg_mr(struct ibv_mr *mr);

// rv_window is a memory window of type 1 and what it is bound to.
struct rv_window {
	struct ibv_mw *mw;
	struct ibv_mr *mr;
	uint64_t addr, len;
	unsigned access;
	uint32_t key; // after all requests so far
};

// rv_loop is two queue pairs of this process, connected to each other.
struct rv_loop {
	struct ibv_cq *cq;
	struct ibv_qp *a, *b;
};

int rv_loop_open(struct rv_loop *l, struct ibv_pd *pa, struct ibv_pd *pb);
void rv_loop_close(struct rv_loop *l);
int rv_window_open(struct rv_loop *l, struct ibv_pd *pd, struct rv_window *w);
int rv_window_close(struct rv_window *w);

// rv_probe tries what rotation of keys needs. It returns NULL, or what the
// device did not do.
const char *rv_probe(struct ibv_context *ctx);

// ---- queues

// rv_send is a work request as the owner of a completion queue leaves it.
struct rv_send {
	struct ibv_qp *qp;
	struct rv_window *window; // RV_INVALIDATE, RV_REGISTER
	uint64_t wr_id, remote_addr;
	uint32_t rkey, imm;
	int opcode; // enum ibv_wr_opcode, or one of the following
	int signaled;
	int num_sge; // the next ones of rv_cq.sges
};

enum { RV_INVALIDATE = 1000, RV_REGISTER };

struct rv_recv {
	struct ibv_qp *qp;
	uint64_t wr_id;
	struct ibv_sge sge; // length 0: none
};

struct rv_wc {
	uint64_t wr_id;
	uint32_t byte_len, imm, inv_key, vendor_err;
	int status, opcode;
	unsigned flags; // IBV_WC_WITH_IMM, IBV_WC_WITH_INV
};

enum { RV_SENDS = 256, RV_SGES = 1024, RV_RECVS = 256, RV_WCS = 64 };

// rv_failure is a request that could not be posted. Those behind it in its chain
// were not tried.
struct rv_failure {
	uint64_t wr_id;
	int err; // errno
};

// rv_cq is a completion queue with what waits to be posted.
struct rv_cq {
	struct ibv_cq *cq;
	struct ibv_comp_channel *channel;
	int armed;
	int nfailures; // since the caller set it to 0, which it does after a turn
	struct rv_send sends[RV_SENDS];
	struct ibv_sge sges[RV_SGES];
	struct rv_recv recvs[RV_RECVS];
	struct rv_wc wcs[RV_WCS];
	struct rv_failure failures[RV_SENDS + RV_RECVS]; // one for each chain of a turn
};

int rv_create_cq(struct ibv_context *ctx, int depth, struct rv_cq **out);
int rv_destroy_cq(struct rv_cq *cq);
int rv_cq_fd(struct rv_cq *cq);

// rv_turn posts the first nrecv receives and nsend sends, then polls up to max
// completions into wcs and returns their number.
int rv_turn(struct rv_cq *cq, int nrecv, int nsend, int max);

// rv_arm makes the channel readable at the next completion.
int rv_arm(struct rv_cq *cq);

// ---- connections

struct rv_addr {
	int family; // AF_INET, AF_INET6, or AF_IB: ip is the GID
	uint16_t port;
	uint32_t scope;
	uint8_t ip[16];
};

// rv_event is an event of the connection manager, acknowledged already.
struct rv_event {
	int type, status;
	struct rdma_cm_id *id; // of a connection request
	uint64_t handle;       // of the id; of a connection request: of the listener's
	int private_len;
	uint8_t private_data[256];
};

int rv_create_channel(struct rdma_event_channel **out);
int rv_channel_fd(struct rdma_event_channel *ch);
int rv_next_event(struct rdma_event_channel *ch, struct rv_event *out);

// rv_create_id makes an identifier for addresses of the family.
int rv_create_id(struct rdma_event_channel *ch, uint64_t handle, int family, struct rdma_cm_id **out);
void rv_adopt_id(struct rdma_cm_id *id, uint64_t handle);
void rv_destroy_id(struct rdma_cm_id *id);
struct ibv_context *rv_id_context(struct rdma_cm_id *id);
int rv_id_port_num(struct rdma_cm_id *id);
void rv_local_addr(struct rdma_cm_id *id, struct rv_addr *out);
void rv_remote_addr(struct rdma_cm_id *id, struct rv_addr *out);
int rv_listen(struct rdma_cm_id *id, struct rv_addr *at, int backlog);
int rv_resolve_addr(struct rdma_cm_id *id, struct rv_addr *src, struct rv_addr *dst, int ms);
int rv_resolve_route(struct rdma_cm_id *id, int ms);

// rv_create_qp makes the queue pair of id and posts the first receives.
int rv_create_qp(struct rdma_cm_id *id, struct ibv_pd *pd, struct rv_cq *cq, int sends, int recvs, int sges,
		 struct rv_recv *first, int nfirst);
void rv_destroy_qp(struct rdma_cm_id *id);
struct ibv_qp *rv_qp(struct rdma_cm_id *id);
uint32_t rv_qp_num(struct rdma_cm_id *id);

// rv_patience sets how long a peer is told to wait when a receive is missing.
void rv_patience(struct rdma_cm_id *id);

// rv_ack_timeout sets how long the peer may take to acknowledge a packet before
// it is sent again: 4.096 us * 2^exponent. Before the connection is made.
int rv_ack_timeout(struct rdma_cm_id *id, int exponent);

int rv_connect(struct rdma_cm_id *id, const uint8_t *priv, int len, int ird, int ord);
int rv_accept(struct rdma_cm_id *id, const uint8_t *priv, int len, int ird, int ord);
int rv_reject(struct rdma_cm_id *id, const uint8_t *priv, int len);
void rv_disconnect(struct rdma_cm_id *id);

#endif
