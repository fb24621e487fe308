/*
 * One handle on two threads, callbacks that call back, failing callbacks, and a fork: each is a status, and none hangs.
 */
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

/* A rank with a callback that waits where the test wants it to. */
struct rank {
    instep_stepper* stepper;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    int is_inside, may_leave, calls, releases, aborts;
    instep_status answer;
};

static void move(struct rank* rank, int* flag, int* until) {
    pthread_mutex_lock(&rank->mutex);
    *flag = 1;
    pthread_cond_broadcast(&rank->changed);
    while (until && !*until) pthread_cond_wait(&rank->changed, &rank->mutex);
    pthread_mutex_unlock(&rank->mutex);
}

static instep_status copy(const instep_call* call) {
    if (call->src != call->dst) memcpy(call->dst, call->src, call->bytes);
    return INSTEP_OK;
}

static instep_status wait_inside(void* data, const instep_call* call) {
    struct rank* rank = data;
    if (call->kind == INSTEP_ALL_REDUCE) move(rank, &rank->is_inside, &rank->may_leave);
    return copy(call);
}

static instep_status call_back(void* data, const instep_call* call) {
    struct rank* rank = data;
    instep_layout* layout;
    ANSWERS(INSTEP_BUSY, instep_stepper_finish(rank->stepper));
    SAYS(INSTEP_BUSY, "library: called by a callback", instep_stepper_free(rank->stepper));
    ANSWERS(INSTEP_BUSY, instep_layout_create(&layout));
    CHECK(strcmp(instep_version(), VERSION) == 0);
    ++rank->calls;
    return copy(call);
}

static instep_status fail(void* data, const instep_call* call) {
    (void)call;
    return ((struct rank*)data)->answer;
}

static void count_abort(void* data, const char* cause) {
    CHECK(strlen(cause) > 0);
    ++((struct rank*)data)->aborts;
}

static void count_release(void* data) { ++((struct rank*)data)->releases; }

static instep_stepper* create(struct rank* rank, instep_status (*enqueue)(void*, const instep_call*),
                              uint32_t is_inline) {
    instep_layout* layout = layout_of("w", 1);
    instep_collective collective = {
        .size = sizeof collective, .data = rank, .enqueue = enqueue, .abort = count_abort, .release = count_release};
    instep_stepper_options options = {
        .size = sizeof options,
        .layout = layout,
        .optimizer = &sgd,
        .collective = &collective,
        .is_inline = is_inline,
        .threads = 1,
    };
    OK(instep_stepper_create(&options, &rank->stepper));
    OK(instep_layout_free(layout));
    return rank->stepper;
}

/* If another thread fails, the next call that notices it returns the status. */
static instep_status pass(instep_stepper* stepper) {
    float grad = 1;
    instep_status status = instep_stepper_begin(stepper, 1);
    if (status == INSTEP_OK) status = instep_stepper_write(stepper, (instep_tensor_id){.kind = INSTEP_GRAD}, &grad, 1);
    if (status == INSTEP_OK) status = instep_stepper_grad_ready(stepper, 0);
    if (status == INSTEP_OK) status = instep_stepper_finish(stepper);
    return status != INSTEP_OK ? status
                               : instep_stepper_read(stepper, (instep_tensor_id){.kind = INSTEP_PARAM}, &grad, 1);
}

#define NEW_RANK {.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER}

static void* train(void* data) {
    OK(pass(((struct rank*)data)->stepper));
    return NULL;
}

static void a_handle_in_use_is_busy(void) {
    struct rank rank = NEW_RANK;
    pthread_t thread;
    instep_stepper* stepper = create(&rank, wait_inside, 1);
    pthread_create(&thread, NULL, train, &rank);
    pthread_mutex_lock(&rank.mutex);
    while (!rank.is_inside) pthread_cond_wait(&rank.changed, &rank.mutex);
    pthread_mutex_unlock(&rank.mutex);
    SAYS(INSTEP_BUSY, "stepper: another thread is in a call on it;", instep_stepper_finish(stepper));
    ANSWERS(INSTEP_BUSY, instep_stepper_free(stepper));
    move(&rank, &rank.may_leave, NULL);
    pthread_join(thread, NULL);
    CHECK(rank.releases == 0);
    OK(instep_stepper_free(stepper));
    CHECK(rank.releases == 1);
}

static void a_callback_that_calls_back_gets_busy(void) {
    for (uint32_t is_inline = 0; is_inline < 2; ++is_inline) {
        struct rank rank = NEW_RANK;
        instep_stepper* stepper = create(&rank, call_back, is_inline);
        OK(pass(stepper));
        OK(instep_stepper_free(stepper));
        CHECK(rank.calls > 0 && rank.releases == 1);
    }
}

static void a_callback_that_fails_ends_the_stepper(void) {
    struct rank rank = NEW_RANK;
    rank.answer = 77;
    instep_stepper* stepper = create(&rank, fail, 0);
    ANSWERS(INSTEP_POISONED, pass(stepper));
    CHECK(strstr(instep_last_error(), "enqueue failed with 77"));
    (void)instep_stepper_abandon(stepper, NULL, 0, NULL); /* the pass may be open */
    ANSWERS(INSTEP_POISONED, instep_stepper_free(stepper));
    ANSWERS(INSTEP_HANDLE, instep_stepper_free(stepper));
    CHECK(rank.releases == 1 && rank.aborts > 0);
}

static void a_stepper_that_was_not_created_releases_nothing(void) {
    struct rank rank = NEW_RANK;
    instep_layout* layout = layout_of("w", 1);
    instep_stepper* stepper;
    instep_collective collective = {
        .size = sizeof collective, .data = &rank, .enqueue = fail, .release = count_release};
    instep_stepper_options options = {
        .size = sizeof options, .layout = layout, .optimizer = &sgd, .collective = &collective, .skip_nonfinite = 1};
    ANSWERS(INSTEP_CONFIG, instep_stepper_create(&options, &stepper)); /* in INSTEP_MODE_EAGER */
    CHECK(rank.releases == 0);
    OK(instep_layout_free(layout));
}

static instep_bucket_step* shared_step;

static void* step_often(void* data) {
    float *params = data, grads[4] = {1, 1, 1, 1};
    instep_tensors tensors = {
        .size = sizeof tensors, .params = {.address = params, .count = 4}, .grads = {.address = grads, .count = 4}};
    for (int done = 0; done < 1000;) {
        instep_status status = instep_bucket_step_step(shared_step, &tensors, NULL, NULL, NULL);
        if (status == INSTEP_OK) {
            ++done;
        } else {
            ANSWERS(INSTEP_BUSY, status);
        }
    }
    return NULL;
}

static void threads_that_share_a_step_lose_no_step(void) {
    instep_layout* layout = layout_of("w", 4);
    instep_bucket_step_options options = {.size = sizeof options, .layout = layout, .optimizer = &sgd};
    OK(instep_bucket_step_create(&options, &shared_step));
    OK(instep_layout_free(layout));
    float params[2][4] = {{0}};
    pthread_t threads[2];
    for (int k = 0; k < 2; ++k) pthread_create(&threads[k], NULL, step_often, params[k]);
    for (int k = 0; k < 2; ++k) pthread_join(threads[k], NULL);
    CHECK(params[0][0] == -1000 && params[1][3] == -1000);
    uint64_t count;
    OK(instep_bucket_step_progress(shared_step, 0, &count, NULL));
    CHECK(count == 2000);
    OK(instep_bucket_step_free(shared_step));
}

/* What a function returns in a forked child. It comes by a pipe, because the exit status belongs to tools that look for
 * leaks. */
static char in_child(char (*function)(instep_stepper*), instep_stepper* stepper) {
    int ends[2];
    CHECK(pipe(ends) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        char answer = function(stepper);
        _exit(write(ends[1], &answer, 1) == 1 ? 0 : 1);
    }
    close(ends[1]);
    char answer = -1;
    CHECK(read(ends[0], &answer, 1) == 1);
    close(ends[0]);
    CHECK(waitpid(child, NULL, 0) == child);
    return answer;
}

static char use_handles(instep_stepper* stepper) {
    instep_layout* layout;
    if (instep_layout_create(&layout) != INSTEP_FORKED || instep_stepper_begin(stepper, 1) != INSTEP_FORKED) return 1;
    if (instep_stepper_free(stepper) != INSTEP_FORKED || strcmp(instep_version(), VERSION) != 0) return 2;
    return strncmp(instep_last_error(), "process: forked", 15) == 0 ? 0 : 3;
}

static void a_forked_child_gets_a_status(void) {
    struct rank rank = NEW_RANK;
    rank.may_leave = 1;
    instep_stepper* stepper = create(&rank, wait_inside, 0);
    OK(pass(stepper)); /* threads run */
    CHECK(in_child(use_handles, stepper) == 0);
    OK(pass(stepper)); /* the parent goes on */
    OK(instep_stepper_free(stepper));
}

static char make_handles(instep_stepper* stepper) {
    (void)stepper;
    instep_layout* layout;
    return instep_layout_create(&layout) == INSTEP_OK && instep_layout_free(layout) == INSTEP_OK ? 0 : 1;
}

static void a_child_of_a_process_without_handles_works(void) { CHECK(in_child(make_handles, NULL) == 0); }

int main(void) {
    a_child_of_a_process_without_handles_works();
    a_handle_in_use_is_busy();
    a_callback_that_calls_back_gets_busy();
    a_callback_that_fails_ends_the_stepper();
    a_stepper_that_was_not_created_releases_nothing();
    threads_that_share_a_step_lose_no_step();
    a_forked_child_gets_a_status();
    return 0;
}
