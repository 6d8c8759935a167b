//go:build linux && cgo && ibverbs

#define _GNU_SOURCE // dlvsym
#include "sym.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>

struct rv_symbols rv;

// One line for each function: its name is that of the member of rv.
static const struct symbol {
	const char *name, *version;
	size_t offset;
} verbs_symbols[] = {
#define V(f, v) {#f, v, offsetof(struct rv_symbols, f)}
	V(ibv_query_device, "IBVERBS_1.1"), V(ibv_query_gid, "IBVERBS_1.1"),
	V(ibv_alloc_pd, "IBVERBS_1.1"), V(ibv_dealloc_pd, "IBVERBS_1.1"),
	V(ibv_reg_mr, "IBVERBS_1.1"), V(ibv_dereg_mr, "IBVERBS_1.1"),
	V(ibv_create_comp_channel, "IBVERBS_1.0"), V(ibv_destroy_comp_channel, "IBVERBS_1.0"),
	V(ibv_create_cq, "IBVERBS_1.1"), V(ibv_destroy_cq, "IBVERBS_1.1"),
	V(ibv_get_cq_event, "IBVERBS_1.1"), V(ibv_ack_cq_events, "IBVERBS_1.1"),
	V(ibv_create_qp, "IBVERBS_1.1"), V(ibv_modify_qp, "IBVERBS_1.1"), V(ibv_destroy_qp, "IBVERBS_1.1"),
	V(ibv_get_async_event, "IBVERBS_1.1"), V(ibv_ack_async_event, "IBVERBS_1.1"),
	V(ibv_event_type_str, "IBVERBS_1.1"),
	V(ibv_query_port, "IBVERBS_1.1"),
}, cm_symbols[] = {
#define C(f) V(f, "RDMACM_1.0")
	C(rdma_get_devices), C(rdma_create_event_channel), C(rdma_get_cm_event), C(rdma_ack_cm_event),
	C(rdma_create_id), C(rdma_destroy_id), C(rdma_bind_addr), C(rdma_listen),
	C(rdma_resolve_addr), C(rdma_resolve_route), C(rdma_create_qp), C(rdma_destroy_qp),
	C(rdma_connect), C(rdma_accept), C(rdma_reject), C(rdma_disconnect), C(rdma_set_option),
};

static const char *load(const char *file, const struct symbol *s, size_t n)
{
	void *lib = dlopen(file, RTLD_NOW | RTLD_LOCAL);
	if (!lib)
		return dlerror();
	for (size_t i = 0; i < n; i++) {
		void *f = dlvsym(lib, s[i].name, s[i].version);
		if (!f)
			return dlerror();
		*(void **)((char *)&rv + s[i].offset) = f;
	}
	return NULL;
}

static const char *loaded;

static void load_all(void)
{
	loaded = load("libibverbs.so.1", verbs_symbols, sizeof(verbs_symbols) / sizeof(verbs_symbols[0]));
	if (!loaded)
		loaded = load("librdmacm.so.1", cm_symbols, sizeof(cm_symbols) / sizeof(cm_symbols[0]));
}

const char *rv_load(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	pthread_once(&once, load_all);
	return loaded;
}
