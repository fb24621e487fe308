/*
 * Everything that takes a GPU's memory or streams gives the bits that it gives on the CPU: bucket steps under a norm, a
 * stepper on its own tensors, and one on the program's, with sums of the program's own.
 *
 * Needs a GPU, or the software GPU: scripts/software-gpu.sh --capi. The driver is the file that INSTEP_CUDA names.
 */
#include <dlfcn.h>

#include "../tests/check.h"

enum { ELEMENTS = 1000, STEPS = 3 };

/* What this program calls of the driver, under the names and types of cuda.h; a status is 0. */
static int (*start)(unsigned);
static int (*retain)(void**, int);
static int (*push)(void*);
static int (*allocate)(uint64_t*, size_t);
static int (*release)(uint64_t);
static int (*upload)(uint64_t, const void*, size_t, void*);
static int (*download)(void*, uint64_t, size_t, void*);
static int (*make_stream)(void**, unsigned);
static int (*wait_for_stream)(void*);
static int (*make_event)(void**, unsigned);
static int (*record)(void*, void*);
static int (*hold)(void*, void*, unsigned);

#define GPU(call)                                         \
    do {                                                  \
        int code_ = (call);                               \
        if (code_ != 0) FAIL("%s answers %d", #call, code_); \
    } while (0)

static void find(void* driver, const char* name, void* place) {
    void* found = dlsym(driver, name);
    if (found == NULL) FAIL("the driver has no %s", name);
    memcpy(place, &found, sizeof found);
}

static void open_driver(void) {
    const char* path = getenv("INSTEP_CUDA");
    void* driver = dlopen(path != NULL ? path : "libcuda.so.1", RTLD_NOW);
    if (driver == NULL) FAIL("%s", dlerror());
    find(driver, "cuInit", &start);
    find(driver, "cuDevicePrimaryCtxRetain", &retain);
    find(driver, "cuCtxPushCurrent_v2", &push);
    find(driver, "cuMemAlloc_v2", &allocate);
    find(driver, "cuMemFree_v2", &release);
    find(driver, "cuMemcpyHtoDAsync_v2", &upload);
    find(driver, "cuMemcpyDtoHAsync_v2", &download);
    find(driver, "cuStreamCreate", &make_stream);
    find(driver, "cuStreamSynchronize", &wait_for_stream);
    find(driver, "cuEventCreate", &make_event);
    find(driver, "cuEventRecord", &record);
    find(driver, "cuStreamWaitEvent", &hold);
    void* context;
    GPU(start(0));
    GPU(retain(&context, 0));
    GPU(push(context));
}

/* An array on the CPU, or on the GPU of a stream. */
typedef struct {
    float* host;
    uint64_t device;
    void* stream;
} array;

static array filled(float first, float step, void* stream) {
    array made = {.host = malloc(ELEMENTS * sizeof(float)), .stream = stream};
    for (int k = 0; k < ELEMENTS; ++k) made.host[k] = first + step * (float)(k % 37);
    if (stream != NULL) {
        GPU(allocate(&made.device, ELEMENTS * sizeof(float)));
        GPU(upload(made.device, made.host, ELEMENTS * sizeof(float), stream));
    }
    return made;
}

static void* address(array of) { return of.stream != NULL ? (void*)(uintptr_t)of.device : of.host; }

/* Copies an array to the CPU, and frees it. */
static void take(array of, float* into) {
    if (of.stream != NULL) {
        GPU(download(of.host, of.device, ELEMENTS * sizeof(float), of.stream));
        GPU(wait_for_stream(of.stream));
        GPU(release(of.device));
    }
    memcpy(into, of.host, ELEMENTS * sizeof(float));
    free(of.host);
}

static instep_hyper lr = {"lr", 0.01};
static instep_optimizer adamw = {.size = sizeof adamw, .name = "adamw", .hypers = &lr, .hyper_count = 1};

static const char* const states[] = {"exp_avg", "exp_avg_sq"};

/* Steps of a bucket, clipped by its norm. */
static void bucket(const instep_cuda* gpu, void* stream, float results[3][ELEMENTS]) {
    instep_layout* layout = layout_of("weight", ELEMENTS);
    instep_bucket_step_options options = {.size = sizeof options, .layout = layout, .optimizer = &adamw, .cuda = gpu};
    instep_bucket_step* step;
    instep_norm* norm;
    OK(instep_bucket_step_create(&options, &step));
    OK(instep_norm_create(gpu, &norm));
    array params = filled(1, 0.25f, stream), grads = filled(-3, 0.5f, stream);
    array average = filled(0, 0, stream), square = filled(0, 0, stream);
    instep_tensors tensors = {
        .size = sizeof tensors,
        .params = {.address = address(params), .count = ELEMENTS},
        .grads = {.address = address(grads), .count = ELEMENTS},
        .states = {{.address = address(average), .count = ELEMENTS}, {.address = address(square), .count = ELEMENTS}},
    };
    instep_scaling mean = {.size = sizeof mean, .world_size = 2};
    for (int k = 0; k < STEPS; ++k) {
        OK(instep_norm_begin(norm, &mean, stream));
        OK(instep_norm_add(norm, step, &tensors.grads, stream));
        OK(instep_norm_decide(norm, 1, 1, stream));
        OK(instep_bucket_step_step(step, &tensors, NULL, norm, stream));
    }
    instep_decision decision = {.size = sizeof decision};
    OK(instep_norm_read(norm, &decision));
    CHECK(decision.norm > 1 && decision.clip < 1 && !decision.is_skipped);
    uint64_t count;
    OK(instep_bucket_step_progress(step, 0, &count, NULL));
    CHECK(count == STEPS);
    take(params, results[0]);
    take(average, results[1]);
    take(square, results[2]);
    take(grads, (float[ELEMENTS]){0});
    OK(instep_norm_free(norm));
    if (gpu != NULL) SAYS(INSTEP_UNSUPPORTED, "bucket step: on a GPU, where", instep_bucket_step_step_again(step, NULL));
    OK(instep_bucket_step_free(step));
    OK(instep_layout_free(layout));
}

/* Passes of a stepper with tensors of its own. */
static void own(const instep_cuda* gpu, void* stream, float results[3][ELEMENTS]) {
    (void)stream;
    instep_layout* layout = layout_of("weight", ELEMENTS);
    instep_stepper_options options = {
        .size = sizeof options, .layout = layout, .optimizer = &adamw, .mode = INSTEP_MODE_EAGER, .cuda = gpu};
    instep_stepper* stepper;
    OK(instep_stepper_create(&options, &stepper));
    OK(instep_layout_free(layout));
    array params = filled(1, 0.25f, NULL), grads = filled(-3, 0.5f, NULL);
    OK(instep_stepper_write(stepper, (instep_tensor_id){.kind = INSTEP_PARAM}, params.host, ELEMENTS));
    for (int k = 0; k < STEPS; ++k) {
        OK(instep_stepper_begin(stepper, 1));
        OK(instep_stepper_write(stepper, (instep_tensor_id){.kind = INSTEP_GRAD}, grads.host, ELEMENTS));
        OK(instep_stepper_grad_ready(stepper, 0));
        OK(instep_stepper_finish(stepper));
    }
    OK(instep_stepper_read(stepper, (instep_tensor_id){.kind = INSTEP_PARAM}, results[0], ELEMENTS));
    for (uint32_t k = 0; k < 2; ++k) {
        instep_tensor_id state = {.kind = INSTEP_STATE, .state = states[k]};
        OK(instep_stepper_read(stepper, state, results[1 + k], ELEMENTS));
    }
    OK(instep_stepper_free(stepper));
    take(params, (float[ELEMENTS]){0});
    take(grads, (float[ELEMENTS]){0});
}

/* Passes of a stepper on the program's tensors, which sums gradients itself, on a stream of its own. */
static void borrowed(const instep_cuda* gpu, void* stream, float results[3][ELEMENTS]) {
    void *sums = NULL, *written = NULL, *summed = NULL;
    if (gpu != NULL) {
        GPU(make_stream(&sums, 1));
        GPU(make_event(&written, 2));
        GPU(make_event(&summed, 2));
    }
    instep_layout* layout = layout_of("weight", ELEMENTS);
    array params = filled(1, 0.25f, stream), grads = filled(0, 0, stream), source = filled(-3, 0.5f, NULL);
    uint32_t first = 0;
    size_t offset = 0;
    instep_bucket bucket = {
        .address = address(grads), .elements = ELEMENTS, .params = &first, .offsets = &offset, .param_count = 1};
    instep_memory memory = {.size = sizeof memory,
                            .params = (void*[]){address(params)},
                            .param_count = 1,
                            .buckets = &bucket,
                            .bucket_count = 1};
    instep_stepper_options options = {.size = sizeof options,
                                      .layout = layout,
                                      .optimizer = &adamw,
                                      .memory = &memory,
                                      .mode = INSTEP_MODE_EAGER,
                                      .sums_by_caller = 1,
                                      .cuda = gpu};
    instep_stepper* stepper;
    OK(instep_stepper_create(&options, &stepper));
    OK(instep_layout_free(layout));
    for (int k = 0; k < STEPS; ++k) {
        OK(instep_stepper_begin(stepper, 1));
        void* at;
        OK(instep_stepper_address(stepper, (instep_tensor_id){.kind = INSTEP_GRAD}, INSTEP_WRITE, &at, NULL));
        CHECK(at == address(grads));
        if (gpu == NULL) {
            memcpy(at, source.host, ELEMENTS * sizeof(float));
            OK(instep_stepper_bucket_ready(stepper, 0));
        } else {
            /* Backward on the trainer's stream, then the sum, here another copy, on the program's. */
            GPU(upload(grads.device, params.host, ELEMENTS * sizeof(float), stream));
            GPU(record(written, stream));
            GPU(hold(sums, written, 0));
            GPU(upload(grads.device, source.host, ELEMENTS * sizeof(float), sums));
            GPU(record(summed, sums));
            CHECK(instep_stepper_bucket_ready_after(stepper, 0, NULL) == INSTEP_NULL);
            OK(instep_stepper_bucket_ready_after(stepper, 0, summed));
        }
        OK(instep_stepper_finish(stepper));
    }
    for (uint32_t k = 0; k < 2; ++k) {
        instep_tensor_id state = {.kind = INSTEP_STATE, .state = states[k]};
        OK(instep_stepper_read(stepper, state, results[1 + k], ELEMENTS));
    }
    OK(instep_stepper_free(stepper));
    take(params, results[0]);
    take(grads, (float[ELEMENTS]){0});
    take(source, (float[ELEMENTS]){0});
}

int main(void) {
    open_driver();
    void* stream;
    GPU(make_stream(&stream, 1));
    instep_cuda gpu = {.size = sizeof gpu, .compute_stream = stream};
    struct {
        const char* name;
        void (*run)(const instep_cuda*, void*, float[3][ELEMENTS]);
    } scenes[] = {{"bucket", bucket}, {"own", own}, {"borrowed", borrowed}};
    for (size_t k = 0; k < sizeof scenes / sizeof *scenes; ++k) {
        static float here[3][ELEMENTS], there[3][ELEMENTS];
        memset(here, 1, sizeof here);
        memset(there, 2, sizeof there);
        scenes[k].run(NULL, NULL, here);
        scenes[k].run(&gpu, stream, there);
        if (memcmp(here, there, sizeof here) != 0) FAIL("%s: other bits on the GPU", scenes[k].name);
        CHECK(here[0][0] != 1 && here[1][0] != 0);
        printf("%s: the same bits\n", scenes[k].name);
    }
    return 0;
}
