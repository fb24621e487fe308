/*
 * Data-parallel training with streams, events and an all-reduce of the program's own: examples/cuda_ddp in C.
 *
 * `ddp RANKS` starts itself once per rank, each with a GPU: scripts/software-gpu.sh --ddp. Every rank compares the
 * parameters with those of the same steps on the CPU, bit by bit.
 */
#include <cuda.h>
#include <nccl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../tests/check.h"

enum { BUCKETS = 3, ELEMENTS = 5000, STEPS = 5, BYTES = ELEMENTS * sizeof(float) };

#define GPU(call)                                         \
    do {                                                  \
        int code_ = (int)(call);                          \
        if (code_ != 0) FAIL("%s answers %d", #call, code_); \
    } while (0)

/* Stands for a rank's backward pass: eighths, whose sums are exact in any order. */
static void backward(float* to, int rank, int step, int bucket) {
    for (int k = 0; k < ELEMENTS; ++k) to[k] = (float)((k + 7 * bucket + 31 * step + 101 * rank) % 64) / 8 - 4;
}

static instep_stepper* stepper_of(int rank, int ranks, const instep_memory* memory, const instep_cuda* cuda) {
    instep_layout* layout;
    instep_stepper* stepper;
    size_t shape = ELEMENTS;
    OK(instep_layout_create(&layout));
    const char* names[BUCKETS] = {"p0", "p1", "p2"};
    for (int k = 0; k < BUCKETS; ++k) {
        instep_param param = {.size = sizeof param, .name = names[k], .shape = &shape, .dimensions = 1};
        OK(instep_layout_add(layout, &param, NULL));
    }
    instep_optimizer adamw = {.size = sizeof adamw, .name = "AdamW"};
    instep_stepper_options options = {.size = sizeof options,
                                      .layout = layout,
                                      .optimizer = &adamw,
                                      .rank = (uint32_t)rank,
                                      .world_size = (uint32_t)ranks,
                                      .sums_by_caller = 1,
                                      .memory = memory,
                                      .cuda = cuda};
    OK(instep_stepper_create(&options, &stepper));
    OK(instep_layout_free(layout));
    return stepper;
}

static void train(int rank, int ranks, ncclUniqueId id, float trained[BUCKETS][ELEMENTS]) {
    CUcontext context;
    CUstream compute, sums;
    ncclComm_t comm;
    GPU(cuInit(0));
    GPU(cuDevicePrimaryCtxRetain(&context, rank));
    GPU(cuCtxPushCurrent(context));
    GPU(cuStreamCreate(&compute, CU_STREAM_NON_BLOCKING));
    GPU(cuStreamCreate(&sums, CU_STREAM_NON_BLOCKING));
    GPU(ncclCommInitRank(&comm, ranks, id, rank));

    /* The program's: parameters, and a flat bucket for the gradient of each. */
    static float values[ELEMENTS];
    for (int k = 0; k < ELEMENTS; ++k) values[k] = 1;
    CUdeviceptr params[BUCKETS], grads[BUCKETS];
    void* addresses[BUCKETS];
    instep_bucket buckets[BUCKETS];
    uint32_t numbers[BUCKETS] = {0, 1, 2};
    size_t offset = 0;
    for (int k = 0; k < BUCKETS; ++k) {
        GPU(cuMemAlloc(&params[k], BYTES));
        GPU(cuMemAlloc(&grads[k], BYTES));
        GPU(cuMemcpyHtoDAsync(params[k], values, BYTES, compute));
        addresses[k] = (void*)(uintptr_t)params[k];
        buckets[k] = (instep_bucket){.address = (void*)(uintptr_t)grads[k],
                                     .elements = ELEMENTS,
                                     .params = &numbers[k],
                                     .offsets = &offset,
                                     .param_count = 1};
    }
    instep_memory memory = {
        .size = sizeof memory, .params = addresses, .param_count = BUCKETS, .buckets = buckets, .bucket_count = BUCKETS};
    instep_cuda cuda = {.size = sizeof cuda, .ordinal = (uint32_t)rank, .compute_stream = compute};
    instep_stepper* stepper = stepper_of(rank, ranks, &memory, &cuda);

    CUevent written, summed;
    GPU(cuEventCreate(&written, CU_EVENT_DISABLE_TIMING));
    GPU(cuEventCreate(&summed, CU_EVENT_DISABLE_TIMING));
    for (int step = 0; step < STEPS; ++step) {
        OK(instep_stepper_begin(stepper, 1));
        for (uint32_t k = 0; k < BUCKETS; ++k) {
            instep_tensor_id param = {.kind = INSTEP_PARAM, .param = k}, grad = {.kind = INSTEP_GRAD, .param = k};
            /* From here on the compute stream comes after the bucket's last step. */
            OK(instep_stepper_address(stepper, param, INSTEP_READ, &(void*){NULL}, NULL));
            OK(instep_stepper_address(stepper, grad, INSTEP_WRITE, &(void*){NULL}, NULL));
            backward(values, rank, step, (int)k);
            GPU(cuMemcpyHtoDAsync(grads[k], values, BYTES, compute));
            GPU(cuEventRecord(written, compute));
            GPU(cuStreamWaitEvent(sums, written, 0));
            void* bucket = (void*)(uintptr_t)grads[k];
            GPU(ncclAllReduce(bucket, bucket, ELEMENTS, ncclFloat, ncclSum, comm, sums));
            GPU(cuEventRecord(summed, sums));
            OK(instep_stepper_bucket_ready_after(stepper, k, summed)); /* the event may be recorded again after it */
            GPU(cuStreamSynchronize(compute));                         /* `values` is written anew */
        }
        OK(instep_stepper_finish(stepper));
    }
    OK(instep_stepper_free(stepper));
    for (int k = 0; k < BUCKETS; ++k) GPU(cuMemcpyDtoH(trained[k], params[k], BYTES));
    GPU(ncclCommDestroy(comm));
}

/* The same steps on the CPU. */
static void train_on_the_cpu(int ranks, float trained[BUCKETS][ELEMENTS]) {
    static float sum[ELEMENTS], of_rank[ELEMENTS];
    instep_stepper* stepper = stepper_of(0, ranks, NULL, NULL);
    for (int k = 0; k < ELEMENTS; ++k) sum[k] = 1;
    for (uint32_t k = 0; k < BUCKETS; ++k) {
        OK(instep_stepper_write(stepper, (instep_tensor_id){.kind = INSTEP_PARAM, .param = k}, sum, ELEMENTS));
    }
    for (int step = 0; step < STEPS; ++step) {
        OK(instep_stepper_begin(stepper, 1));
        for (uint32_t k = 0; k < BUCKETS; ++k) {
            memset(sum, 0, sizeof sum);
            for (int rank = 0; rank < ranks; ++rank) {
                backward(of_rank, rank, step, (int)k);
                for (int at = 0; at < ELEMENTS; ++at) sum[at] += of_rank[at];
            }
            OK(instep_stepper_write(stepper, (instep_tensor_id){.kind = INSTEP_GRAD, .param = k}, sum, ELEMENTS));
            OK(instep_stepper_grad_ready(stepper, k));
        }
        OK(instep_stepper_finish(stepper));
    }
    for (uint32_t k = 0; k < BUCKETS; ++k) {
        OK(instep_stepper_read(stepper, (instep_tensor_id){.kind = INSTEP_PARAM, .param = k}, trained[k], ELEMENTS));
    }
    OK(instep_stepper_free(stepper));
}

/* Makes NCCL's id, starts every rank, and waits for the ranks. */
static int start(const char* program, const char* ranks) {
    ncclUniqueId id;
    char digits[2 * sizeof id + 1], rank[12];
    GPU(ncclGetUniqueId(&id));
    for (size_t k = 0; k < sizeof id; ++k) sprintf(&digits[2 * k], "%02x", ((unsigned char*)&id)[k]);
    for (int k = 0; k < atoi(ranks); ++k) {
        sprintf(rank, "%d", k);
        if (fork() == 0) {
            execl(program, program, ranks, rank, digits, (char*)NULL);
            FAIL("%s cannot be started", program);
        }
    }
    int status, failed = 0;
    while (wait(&status) > 0) failed |= status;
    return failed != 0;
}

int main(int count, char** arguments) {
    if (count == 2) return start(arguments[0], arguments[1]);
    if (count != 4) FAIL("usage: %s RANKS", arguments[0]);
    static float here[BUCKETS][ELEMENTS], there[BUCKETS][ELEMENTS];
    int ranks = atoi(arguments[1]), rank = atoi(arguments[2]);
    ncclUniqueId id;
    for (size_t k = 0; k < sizeof id; ++k) {
        unsigned byte;
        if (sscanf(&arguments[3][2 * k], "%2x", &byte) != 1) FAIL("the id is too short");
        ((unsigned char*)&id)[k] = (unsigned char)byte;
    }
    train(rank, ranks, id, there);
    train_on_the_cpu(ranks, here);
    if (memcmp(here, there, sizeof here) != 0) FAIL("rank %d: other bits than the CPU's", rank);
    printf("rank %d of %d: %d steps, with the bits of the CPU\n", rank, ranks, STEPS);
    return 0;
}
