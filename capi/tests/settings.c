/*
 * What a stepper keeps and tells: states, averages, copies, progress, frozen parameters, loss scale, status, endings.
 */
#include "check.h"

static void write_grad(instep_stepper* stepper, uint32_t param, float value) {
    OK(instep_stepper_write(stepper, (instep_tensor_id){.kind = INSTEP_GRAD, .param = param}, &value, 1));
}

static float read(instep_stepper* stepper, uint32_t kind, uint32_t param, const char* state) {
    float value;
    OK(instep_stepper_read(stepper, (instep_tensor_id){kind, param, state}, &value, 1));
    return value;
}

static void tensors_and_progress(void) {
    instep_layout* layout = layout_of("a", 1);
    instep_optimizer nadam = {.size = sizeof nadam, .name = "NAdam"};
    instep_optimizer plain = {.size = sizeof plain, .name = "SGD"};
    OK(instep_layout_add(layout, &(instep_param){.size = sizeof(instep_param), .name = "b", .group = "slow"}, NULL));
    instep_param narrow = {.size = sizeof narrow, .name = "c", .group = "slow", .dtype = INSTEP_BF16};
    OK(instep_layout_add(layout, &narrow, NULL));
    instep_precision plain_states = {.size = sizeof plain_states};
    instep_precision precision = {.size = sizeof precision, .states = INSTEP_STATES_BF16};
    instep_stepper_options options = {
        .size = sizeof options,
        .layout = layout,
        .optimizer = &nadam,
        .groups = &(instep_group){.name = "slow", .optimizer = &sgd, .precision = &plain_states},
        .group_count = 1,
        .precision = &precision,
        .copy = INSTEP_BF16,
        .ema_decay = 0.5,
        .is_inline = 1,
        .threads = 1,
    };
    instep_stepper* stepper;
    OK(instep_stepper_create(&options, &stepper));
    float one = 1;
    OK(instep_stepper_write(stepper, (instep_tensor_id){.kind = INSTEP_PARAM, .param = 1}, &one, 1));
    OK(instep_stepper_begin(stepper, 2));
    write_grad(stepper, 1, 1);
    OK(instep_stepper_grad_ready(stepper, 1));
    OK(instep_stepper_next_micro_batch(stepper));
    write_grad(stepper, 1, 3);
    write_grad(stepper, 0, 1);
    void* address;
    uint32_t dtype;
    instep_tensor_id narrow_grad = {.kind = INSTEP_GRAD, .param = 2};
    OK(instep_stepper_address(stepper, narrow_grad, INSTEP_WRITE, &address, &dtype));
    CHECK(dtype == INSTEP_BF16);
    *(uint16_t*)address = 0x3f80; /* 1 */
    OK(instep_stepper_finish(stepper));
    CHECK(read(stepper, INSTEP_PARAM, 2, NULL) == -1);
    CHECK(read(stepper, INSTEP_PARAM, 1, NULL) == -2);
    CHECK(read(stepper, INSTEP_COPY, 1, NULL) == -2);
    CHECK(read(stepper, INSTEP_EMA, 1, NULL) == -2);
    CHECK(read(stepper, INSTEP_GRAD, 1, NULL) == 3);
    float moment = read(stepper, INSTEP_STATE, 0, "exp_avg");
    CHECK(moment > 0.09f && moment < 0.11f);
    OK(instep_stepper_address(stepper, (instep_tensor_id){INSTEP_STATE, 0, "exp_avg"}, INSTEP_WRITE, &address, &dtype));
    CHECK(dtype == INSTEP_BF16);
    *(uint16_t*)address = 0x3f80;
    CHECK(read(stepper, INSTEP_STATE, 0, "exp_avg") == 1);
    OK(instep_stepper_address(stepper, (instep_tensor_id){.kind = INSTEP_PARAM, .param = 1}, INSTEP_READ, &address,
                              &dtype));
    CHECK(dtype == INSTEP_F32 && *(float*)address == -2);

    uint64_t count;
    double carried;
    OK(instep_stepper_progress(stepper, 0, &count, &carried));
    CHECK(count == 1 && carried > 0 && carried < 1);
    OK(instep_stepper_set_progress(stepper, 0, 7, 0.25));
    OK(instep_stepper_progress(stepper, 0, &count, &carried));
    CHECK(count == 7 && carried == 0.25);
    ANSWERS(INSTEP_CONFIG, instep_stepper_set_progress(stepper, 0, 7, 2));
    ANSWERS(INSTEP_CONFIG, instep_stepper_set_progress(stepper, 0, 7, 1)); /* no product of seven momenta */
    ANSWERS(INSTEP_CONFIG, instep_stepper_set_progress(stepper, 1, UINT64_MAX, 1));
    OK(instep_stepper_set_progress(stepper, 1, 5, 1));
    OK(instep_stepper_progress(stepper, 1, &count, &carried));
    CHECK(count == 5 && carried == 1);
    ANSWERS(INSTEP_CONFIG, instep_stepper_set_progress(stepper, 1, 5, 0.5));

    rate.value = 0.25;
    OK(instep_stepper_set_optimizer(stepper, "slow", &sgd));
    rate.value = 1;
    SAYS(INSTEP_CONFIG, "group `default`: its optimizer is NAdam, not SGD;",
         instep_stepper_set_optimizer(stepper, NULL, &plain));
    OK(instep_stepper_set_frozen(stepper, 0, 1));
    float frozen = read(stepper, INSTEP_PARAM, 0, NULL);
    OK(instep_stepper_begin(stepper, 1));
    float value = 4;
    ANSWERS(INSTEP_ORDER, instep_stepper_write(stepper, (instep_tensor_id){.kind = INSTEP_GRAD}, &value, 1));
    write_grad(stepper, 1, 4);
    OK(instep_stepper_finish(stepper));
    CHECK(read(stepper, INSTEP_PARAM, 0, NULL) == frozen);
    CHECK(read(stepper, INSTEP_PARAM, 1, NULL) == -3);
    OK(instep_stepper_free(stepper));
    OK(instep_layout_free(layout));
}

/* Parameters that are clipped together, alone and not at all. */
static instep_layout* layout_of_groups(void) {
    instep_layout* layout = layout_of("a", 1);
    OK(instep_layout_add(layout, &(instep_param){.size = sizeof(instep_param), .name = "b", .group = "alone"}, NULL));
    OK(instep_layout_add(layout, &(instep_param){.size = sizeof(instep_param), .name = "c", .group = "free"}, NULL));
    return layout;
}

static instep_stepper_options clipped(instep_layout* layout, const instep_group groups[2]) {
    return (instep_stepper_options){
        .size = sizeof(instep_stepper_options),
        .layout = layout,
        .optimizer = &sgd,
        .groups = groups,
        .group_count = 2,
        .mode = INSTEP_MODE_NORMED,
        .clip = INSTEP_CLIP_GLOBAL,
        .max_norm = 1,
        .threads = 1,
    };
}

static void clips_of_groups(void) {
    instep_layout* layout = layout_of_groups();
    instep_group groups[] = {{.name = "alone", .clip = INSTEP_GROUP_CLIP_ALONE, .max_norm = 2},
                             {.name = "free", .clip = INSTEP_GROUP_CLIP_NONE}};
    instep_stepper_options options = clipped(layout, groups);
    instep_stepper* stepper;
    OK(instep_stepper_create(&options, &stepper));
    OK(instep_stepper_begin(stepper, 1));
    for (uint32_t param = 0; param < 3; ++param) write_grad(stepper, param, 8);
    OK(instep_stepper_finish(stepper));
    const float expected[] = {-1, -2, -8};
    for (uint32_t param = 0; param < 3; ++param) {
        float off = read(stepper, INSTEP_PARAM, param, NULL) - expected[param];
        CHECK(off < 1e-5f && off > -1e-5f);
    }
    const char* const names[] = {NULL, "alone", "free"};
    for (int k = 0; k < 3; ++k) {
        double norm = 0;
        uint32_t has_norm = 0;
        OK(instep_stepper_group_norm(stepper, names[k], &norm, &has_norm));
        CHECK(norm == 8 && has_norm == 1);
    }
    double norm;
    uint32_t has_norm;
    ANSWERS(INSTEP_CONFIG, instep_stepper_group_norm(stepper, "other", &norm, &has_norm));
    OK(instep_stepper_free(stepper));
    groups[0].max_norm = -1;
    SAYS(INSTEP_CONFIG, "group_clip = alone: -1 is out of range;", instep_stepper_create(&options, &stepper));
    OK(instep_layout_free(layout));
}

/* One gradient that is not finite skips the steps of all groups, whichever group has it and however it is clipped. */
static void skips_of_groups(void) {
    instep_layout* layout = layout_of_groups();
    instep_group groups[] = {{.name = "alone", .clip = INSTEP_GROUP_CLIP_ALONE, .max_norm = 2},
                             {.name = "free", .clip = INSTEP_GROUP_CLIP_NONE}};
    instep_stepper_options options = clipped(layout, groups);
    options.skip_nonfinite = 1;
    options.bucket_cap_bytes = 4;
    instep_stepper* stepper;
    OK(instep_stepper_create(&options, &stepper));
    const float infinity = 1e30f * 1e30f, wrong[] = {infinity, -infinity, infinity - infinity};
    for (uint32_t spoiled = 0; spoiled < 3; ++spoiled) {
        OK(instep_stepper_begin(stepper, 1));
        for (uint32_t param = 0; param < 3; ++param) write_grad(stepper, param, param == spoiled ? wrong[spoiled] : 8);
        OK(instep_stepper_finish(stepper));
        instep_pass_status status = {.size = sizeof status};
        OK(instep_stepper_status(stepper, 1, &status));
        CHECK(status.is_skipped && status.first_nonfinite_bucket >= 0);
        for (uint32_t param = 0; param < 3; ++param) CHECK(read(stepper, INSTEP_PARAM, param, NULL) == 0);
    }
    OK(instep_stepper_begin(stepper, 1));
    for (uint32_t param = 0; param < 3; ++param) write_grad(stepper, param, 8);
    OK(instep_stepper_finish(stepper));
    for (uint32_t param = 0; param < 3; ++param) CHECK(read(stepper, INSTEP_PARAM, param, NULL) < -0.99f);
    OK(instep_stepper_free(stepper));
    OK(instep_layout_free(layout));
}

static void status_and_loss_scale(void) {
    instep_layout* layout = layout_of("w", 1);
    instep_loss_scaler scaler = {.size = sizeof scaler, .initial_scale = 8};
    instep_stepper_options options = {
        .size = sizeof options,
        .layout = layout,
        .optimizer = &sgd,
        .mode = INSTEP_MODE_NORMED,
        .clip = INSTEP_CLIP_GLOBAL,
        .max_norm = 1,
        .loss_scaler = &scaler,
        .world_size = 2,
        .sums_by_caller = 1,
        .threads = 1,
    };
    instep_stepper* stepper;
    OK(instep_stepper_create(&options, &stepper));
    instep_pass_status status = {.size = sizeof status};
    OK(instep_stepper_status(stepper, 0, &status));
    CHECK(status.pass == 0 && status.first_nonfinite_bucket == -1);
    double scale;
    OK(instep_stepper_loss_scale(stepper, &scale));
    CHECK(scale == 8);
    OK(instep_stepper_begin(stepper, 1));
    write_grad(stepper, 0, 64); /* a mean of 4, clipped to 1 */
    OK(instep_stepper_grad_ready(stepper, 0));
    OK(instep_stepper_finish(stepper));
    OK(instep_stepper_status(stepper, 1, &status));
    CHECK(status.pass == 1 && !status.is_skipped && status.has_norm && status.norm == 4 && status.loss_scale == 8);
    CHECK(status.clip > 0.24 && status.clip < 0.26);
    OK(instep_stepper_begin(stepper, 1));
    write_grad(stepper, 0, 1e30f * 1e30f);
    OK(instep_stepper_grad_ready(stepper, 0));
    OK(instep_stepper_finish(stepper));
    memset(&status, 0xff, sizeof status);
    status.size = offsetof(instep_pass_status, norm); /* an older program's */
    OK(instep_stepper_status(stepper, 1, &status));
    CHECK(status.pass == 2 && status.is_skipped && status.first_nonfinite_bucket == -1);
    CHECK(status.size == offsetof(instep_pass_status, norm) && status.norm != status.norm); /* all ones, as it was */
    status.size = sizeof status;
    OK(instep_stepper_status(stepper, 1, &status));
    CHECK(status.first_nonfinite_bucket == 0);
    OK(instep_stepper_loss_scale(stepper, &scale));
    CHECK(scale == 4);
    OK(instep_stepper_free(stepper));
    OK(instep_layout_free(layout));
}

static void abandoned_passes(void) {
    instep_layout* layout = layout_of("a", 1);
    OK(instep_layout_add(layout, &(instep_param){.size = sizeof(instep_param), .name = "b"}, NULL));
    instep_stepper_options options = {
        .size = sizeof options, .layout = layout, .optimizer = &sgd, .bucket_cap_bytes = 4, .threads = 1};
    instep_stepper* stepper;
    OK(instep_stepper_create(&options, &stepper));
    OK(instep_stepper_begin(stepper, 1));
    write_grad(stepper, 0, 1);
    write_grad(stepper, 1, 1);
    OK(instep_stepper_bucket_ready(stepper, 0));
    uint32_t buckets[2] = {7, 7};
    size_t count;
    OK(instep_stepper_abandon(stepper, buckets, 2, &count)); /* bucket 0 stays stepped */
    CHECK(count == 1 && buckets[0] == 0 && buckets[1] == 7);
    CHECK(read(stepper, INSTEP_PARAM, 0, NULL) + read(stepper, INSTEP_PARAM, 1, NULL) == -1);
    OK(instep_stepper_begin(stepper, 1));
    OK(instep_stepper_abandon(stepper, NULL, 0, NULL));
    OK(instep_stepper_free(stepper));
    OK(instep_layout_free(layout));
}

/* A rank that joins, buckets in the order of their gradients, and parameters for other programs. */
static void between_passes(const char* path) {
    instep_layout* layout = layout_of("a", 1);
    OK(instep_layout_add(layout, &(instep_param){.size = sizeof(instep_param), .name = "b"}, NULL));
    instep_stepper_options options = {.size = sizeof options,
                                      .layout = layout,
                                      .optimizer = &sgd,
                                      .inputs = INSTEP_INPUTS_BY_CONTRIBUTORS,
                                      .bucket_cap_bytes = 4,
                                      .ema_decay = 0.5,
                                      .threads = 1};
    instep_stepper* stepper;
    OK(instep_stepper_create(&options, &stepper));
    OK(instep_stepper_begin(stepper, 1));
    for (uint32_t param = 0; param < 2; ++param) { /* backward hands the last one over first, and this does not */
        write_grad(stepper, param, 1);
        OK(instep_stepper_grad_ready(stepper, param));
    }
    OK(instep_stepper_finish(stepper));
    uint32_t is_rebuilt = 7, goes_on = 7;
    OK(instep_stepper_rebuild_buckets(stepper, &is_rebuilt));
    CHECK(is_rebuilt == 1);
    OK(instep_stepper_rebuild_buckets(stepper, NULL));
    CHECK(read(stepper, INSTEP_PARAM, 0, NULL) == -1);
    OK(instep_stepper_join(stepper, &goes_on)); /* the only rank has no data */
    CHECK(goes_on == 0 && read(stepper, INSTEP_PARAM, 0, NULL) == -1);
    OK(instep_stepper_export(stepper, path, 1, 1));
    FILE* file = fopen(path, "rb");
    CHECK(file && fseek(file, 0, SEEK_END) == 0 && ftell(file) > 8);
    fclose(file);
    CHECK(remove(path) == 0);
    ANSWERS(INSTEP_ARGUMENT, instep_stepper_export(stepper, path, 2, 0));
    ANSWERS(INSTEP_NULL, instep_stepper_export(stepper, NULL, 0, 0));
    ANSWERS(INSTEP_NULL, instep_stepper_join(stepper, NULL));
    OK(instep_stepper_free(stepper));
    options.inputs = INSTEP_INPUTS_EVEN;
    OK(instep_stepper_create(&options, &stepper));
    ANSWERS(INSTEP_CONFIG, instep_stepper_join(stepper, &goes_on));
    OK(instep_stepper_free(stepper));
    options.inputs = INSTEP_INPUTS_BY_CONTRIBUTORS + INSTEP_INPUTS_BY_WORLD_SIZE;
    ANSWERS(INSTEP_ARGUMENT, instep_stepper_create(&options, &stepper));
    OK(instep_layout_free(layout));
}

/* A rate and a beta change alone; a whole replacement resets what it leaves out. */
static void hyperparameters(void) {
    instep_layout* layout = layout_of("w", 1);
    instep_hyper first[] = {{"lr", 1}, {"momentum", 0.5}};
    instep_optimizer momentum = {.size = sizeof momentum, .name = "SGD", .hypers = first, .hyper_count = 2};
    instep_bucket_step_options options = {.size = sizeof options, .layout = layout, .optimizer = &momentum};
    instep_bucket_step* step;
    OK(instep_bucket_step_create(&options, &step));
    float param = 0, grad = 1, buffer = 0;
    instep_tensors tensors = {.size = sizeof tensors,
                              .params = {.address = &param, .count = 1},
                              .grads = {.address = &grad, .count = 1}};
    SAYS(INSTEP_LAYOUT, "state `momentum_buffer` of SGD (group `default`): missing",
         instep_bucket_step_step(step, &tensors, NULL, NULL, NULL));
    tensors.states[0] = (instep_tensor){.address = &buffer, .count = 1};
    OK(instep_bucket_step_step(step, &tensors, NULL, NULL, NULL)); /* buffer 1 */
    CHECK(param == -1);
    OK(instep_bucket_step_set_lr(step, NULL, 0.5));
    OK(instep_bucket_step_step(step, &tensors, NULL, NULL, NULL)); /* buffer 1.5 */
    CHECK(param == -1.75f);
    OK(instep_bucket_step_set_hyper(step, "default", &(instep_hyper){"momentum", 0.25}, 1));
    OK(instep_bucket_step_step(step, &tensors, NULL, NULL, NULL)); /* buffer 1.375 */
    CHECK(param == -2.4375f);
    first[0].value = 0.5;
    momentum.hyper_count = 1;
    OK(instep_bucket_step_set_optimizer(step, NULL, &momentum)); /* without momentum, as by default */
    OK(instep_bucket_step_step(step, &tensors, NULL, NULL, NULL));
    CHECK(param == -2.9375f && buffer == 1.375f);

    /* No gradient in this call: parameter, buffer and count stay. */
    tensors.params = (instep_tensor){.addresses = (void*[]){&param}, .count = 1};
    tensors.grads = (instep_tensor){.addresses = (void*[]){NULL}, .count = 1};
    instep_norm* norm;
    OK(instep_norm_create(NULL, &norm));
    OK(instep_norm_begin(norm, NULL, NULL));
    OK(instep_norm_add(norm, step, &tensors.grads, NULL));
    OK(instep_norm_decide(norm, 0, 0, NULL));
    OK(instep_bucket_step_step(step, &tensors, NULL, norm, NULL));
    SAYS(INSTEP_ORDER, "bucket of `w`: stepped by this decision already;",
         instep_bucket_step_step(step, &tensors, NULL, norm, NULL));
    instep_decision decision = {.size = sizeof decision};
    OK(instep_norm_read(norm, &decision));
    CHECK(decision.norm == 0);
    OK(instep_norm_free(norm));
    OK(instep_bucket_step_step(step, &tensors, NULL, NULL, NULL));
    uint64_t updates;
    OK(instep_bucket_step_progress(step, 0, &updates, NULL));
    CHECK(param == -2.9375f && buffer == 1.375f && updates == 4);
    OK(instep_bucket_step_free(step));

    instep_hyper betas[] = {{"lr", 1}, {"beta1", 0.5}, {"beta2", 0.5}, {"eps", 0}};
    instep_optimizer adam = {.size = sizeof adam, .name = "Adam", .hypers = betas, .hyper_count = 4};
    instep_stepper_options of_stepper = {.size = sizeof of_stepper, .layout = layout, .optimizer = &adam, .threads = 1};
    instep_stepper* stepper;
    OK(instep_stepper_create(&of_stepper, &stepper));
    ANSWERS(INSTEP_CONFIG, instep_stepper_set_hyper(stepper, "other", betas, 1));
    ANSWERS(INSTEP_CONFIG, instep_stepper_set_lr(stepper, NULL, -1));
    OK(instep_stepper_set_lr(stepper, NULL, 2));
    OK(instep_stepper_set_hyper(stepper, NULL, &(instep_hyper){"beta2", 0.75}, 1)); /* beta1 stays */
    OK(instep_stepper_begin(stepper, 1));
    write_grad(stepper, 0, 1);
    OK(instep_stepper_finish(stepper));
    CHECK(read(stepper, INSTEP_STATE, 0, "exp_avg") == 0.5f);
    CHECK(read(stepper, INSTEP_STATE, 0, "exp_avg_sq") == 0.25f);
    CHECK(read(stepper, INSTEP_PARAM, 0, NULL) == -2);
    OK(instep_stepper_free(stepper));
    OK(instep_layout_free(layout));
}

/* NAdam's count and product come together. */
static void progress_of_a_bucket(void) {
    instep_layout* layout = layout_of("w", 1);
    instep_optimizer nadam = {.size = sizeof nadam, .name = "NAdam"};
    instep_bucket_step_options options = {.size = sizeof options, .layout = layout, .optimizer = &nadam};
    instep_bucket_step* step;
    OK(instep_bucket_step_create(&options, &step));
    OK(instep_bucket_step_set_progress(step, 0, 7, 0.25));
    ANSWERS(INSTEP_CONFIG, instep_bucket_step_set_progress(step, 0, 1000, 1));
    ANSWERS(INSTEP_CONFIG, instep_bucket_step_set_progress(step, 0, 0, 0));
    uint64_t count;
    double carried;
    OK(instep_bucket_step_progress(step, 0, &count, &carried));
    CHECK(count == 7 && carried == 0.25);
    OK(instep_bucket_step_free(step));
    OK(instep_layout_free(layout));
}

enum { ROW = 300, STRIDE = 512, ROWS = 6, FIRST = 1000 };

/* Trains some rows of a parameter with states in 8 bits. */
static void train_rows(float* params, size_t first, size_t rows) {
    static float grads[ROWS * STRIDE], scales[2][ROWS * STRIDE / 256];
    static uint8_t states[2][ROWS * STRIDE];
    memset(states, 0, sizeof states);
    memset(scales, 0, sizeof scales);
    instep_layout* layout = layout_of("w", rows * ROW);
    instep_optimizer adamw = {.size = sizeof adamw, .name = "AdamW"};
    instep_precision precision = {.size = sizeof precision, .states = INSTEP_STATES_8BIT, .is_stochastic = 1};
    instep_bucket_step_options options = {
        .size = sizeof options,
        .layout = layout,
        .optimizer = &adamw,
        .params = (uint32_t[]){0},
        .offsets = (size_t[]){0},
        .param_count = 1,
        .elements = rows * STRIDE,
        .precision = &precision,
        .row_elements = (uint64_t[]){ROW},
        .first_elements = (uint64_t[]){FIRST + first * ROW},
    };
    instep_bucket_step* step;
    OK(instep_bucket_step_create(&options, &step));
    instep_tensors tensors = {
        .size = sizeof tensors,
        .params = {.addresses = (void*[]){params + first * ROW}, .count = 1},
        .grads = {.addresses = (void*[]){grads}, .count = 1},
        .states = {{.address = states[0], .count = rows * STRIDE}, {.address = states[1], .count = rows * STRIDE}},
        .scales = {{.address = scales[0], .count = rows * STRIDE / 256}, {.address = scales[1], .count = rows * STRIDE / 256}},
    };
    for (int pass = 0; pass < 3; ++pass) {
        for (size_t k = 0; k < rows * ROW; ++k) grads[k] = (float)((first * ROW + k) * 37 % 101 + pass) - 50;
        OK(instep_bucket_step_step(step, &tensors, NULL, NULL, NULL));
    }
    OK(instep_bucket_step_free(step));
    options.first_elements = NULL;
    ANSWERS(INSTEP_NULL, instep_bucket_step_create(&options, &step));
    options.param_count = 0;
    SAYS(INSTEP_ARGUMENT, "row_elements: given without params", instep_bucket_step_create(&options, &step));
    OK(instep_layout_free(layout));
}

/* Shards that are cut between rows have the bits of the full parameter. */
static void rows_of_shards(void) {
    static float full[ROWS * ROW], sharded[ROWS * ROW];
    train_rows(full, 0, ROWS);
    train_rows(sharded, 0, 2);
    train_rows(sharded, 2, 4);
    CHECK(full[ROW] != 0 && memcmp(full, sharded, sizeof full) == 0);
}

int main(int count, char** arguments) {
    CHECK(count == 2);
    char path[4096];
    snprintf(path, sizeof path, "%s/exported.safetensors", arguments[1]);
    tensors_and_progress();
    hyperparameters();
    progress_of_a_bucket();
    rows_of_shards();
    between_passes(path);
    clips_of_groups();
    skips_of_groups();
    status_and_loss_scale();
    abandoned_passes();
    return 0;
}
