// A device that takes no requests of some queue pairs. The program prints what
// rv_turn reports of them: the number of a request and the errno, a line each.

#include "../verbs.c"
struct rv_symbols rv; // nothing of the libraries is called

enum { QPS = 600 };

static struct ibv_context context;
static struct ibv_qp qps[QPS]; // odd ones refuse

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	*bad = wr;
	return qp->qp_num % 2 ? ENOMEM : 0;
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	*bad = wr;
	return qp->qp_num % 2 ? -EINVAL : 0; // some libraries return it negated
}

static void turn(struct rv_cq *cq, int recvs, int sends)
{
	rv_turn(cq, recvs, sends, 0);
	printf("turn\n");
	for (int i = 0; i < cq->nfailures; i++)
		printf("%llu %d\n", (unsigned long long)cq->failures[i].wr_id, cq->failures[i].err);
	cq->nfailures = 0;
}

int main(void)
{
	static struct rv_cq cq;
	context.ops.post_send = post_send;
	context.ops.post_recv = post_recv;
	for (int i = 0; i < QPS; i++)
		qps[i] = (struct ibv_qp){.context = &context, .qp_num = i};
	for (int i = 0; i < 5; i++) { // queue pairs 0, 1, 2, 3, 1
		cq.sends[i] = (struct rv_send){.qp = &qps[i % 4 + i / 4], .wr_id = 10 + i};
		cq.recvs[i] = (struct rv_recv){.qp = &qps[i % 4 + i / 4], .wr_id = 20 + i};
	}
	turn(&cq, 0, 5);
	turn(&cq, 5, 0);
	turn(&cq, 5, 5);
	turn(&cq, 0, 1);
	for (int i = 0; i < RV_SENDS; i++) // as many as a turn can have
		cq.sends[i] = (struct rv_send){.qp = &qps[2 * i + 1], .wr_id = i};
	for (int i = 0; i < RV_RECVS; i++)
		cq.recvs[i] = (struct rv_recv){.qp = &qps[2 * i + 1], .wr_id = RV_SENDS + i};
	turn(&cq, RV_RECVS, RV_SENDS);
	return 0;
}
