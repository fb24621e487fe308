/* An NCCL for tests, of one rank: every call goes on in the background, and is done after LOOKS looks at its state.
 *
 * VERSION is its version, and OUTCOME is the state that a sum comes to. After ncclCommFinalize no sum is accepted. */
#include <stddef.h>

enum { SUCCESS = 0, INVALID_USAGE = 5, IN_PROGRESS = 7 };
typedef struct { char bytes[128]; } ncclUniqueId;

#ifndef LOOKS
#define LOOKS 3
#endif
#ifndef VERSION
#define VERSION 23203
#endif
#ifndef OUTCOME
#define OUTCOME SUCCESS
#endif

static int communicator, is_final;
static long looks;
static int outcome;

static int begin(long wanted, int comes_to) {
    looks = wanted;
    outcome = comes_to;
    return IN_PROGRESS;
}

int ncclGetVersion(int *version) { *version = VERSION; return SUCCESS; }
const char *ncclGetErrorString(int code) { return code == 6 ? "a remote process exited" : "an error"; }
int ncclGetUniqueId(ncclUniqueId *id) { id->bytes[0] = 1; return SUCCESS; }
int ncclCommInitRankConfig(void **comm, int ranks, ncclUniqueId id, int rank, void *config) {
    *comm = &communicator;
    return begin(3, SUCCESS);
}
int ncclCommUserRank(void *comm, int *rank) { *rank = 0; return SUCCESS; }
int ncclCommCount(void *comm, int *ranks) { *ranks = 1; return SUCCESS; }
int ncclCommCuDevice(void *comm, int *device) { *device = 0; return SUCCESS; }
int ncclCommGetAsyncError(void *comm, int *state) {
    *state = looks > 0 ? IN_PROGRESS : outcome;
    looks -= looks > 0;
    return SUCCESS;
}
int ncclCommFinalize(void *comm) {
    is_final = 1;
    return begin(3, SUCCESS);
}
int ncclCommDestroy(void *comm) { return is_final ? SUCCESS : INVALID_USAGE; }
int ncclCommAbort(void *comm) { return SUCCESS; }
int ncclGroupStart(void) { return SUCCESS; }
int ncclGroupEnd(void) { return looks > 0 ? IN_PROGRESS : outcome; }
int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, void *comm, void *stream) {
    return is_final ? INVALID_USAGE : begin(LOOKS, OUTCOME);
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, void *comm, void *stream) {
    return ncclAllReduce(from, to, count, type, 0, comm, stream);
}
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, void *comm, void *stream) {
    return ncclAllReduce(from, to, count, type, op, comm, stream);
}
int ncclAllGather(const void *from, void *to, size_t count, int type, void *comm, void *stream) {
    return ncclAllReduce(from, to, count, type, 0, comm, stream);
}
