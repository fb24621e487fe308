/*
 * Wrong arguments: each call answers a status, says what is wrong, and changes nothing.
 */
#include "check.h"

static void handles(void) {
    instep_layout* layout = layout_of("w", 4);
    ANSWERS(INSTEP_NULL, instep_layout_create(NULL));
    SAYS(INSTEP_NULL, "layout: the handle is null;", instep_layout_find(NULL, "w", &(uint32_t){0}));
    SAYS(INSTEP_HANDLE, "stepper: the handle is that of a layout;", instep_stepper_finish((instep_stepper*)layout));
    ANSWERS(INSTEP_HANDLE, instep_norm_free((instep_norm*)layout));
    int number = 0;
    ANSWERS(INSTEP_HANDLE, instep_layout_free((instep_layout*)&number));
    ANSWERS(INSTEP_HANDLE, instep_bucket_step_free((instep_bucket_step*)(uintptr_t)-1));
    OK(instep_layout_free(layout));
    SAYS(INSTEP_HANDLE, "layout: the handle was freed;", instep_layout_free(layout));
    instep_layout* other = layout_of("w", 4);
    CHECK(other != layout);
    ANSWERS(INSTEP_HANDLE, instep_layout_free(layout));
    OK(instep_layout_free(other));
    OK(instep_layout_free(NULL));
    OK(instep_bucket_step_free(NULL));
    OK(instep_norm_free(NULL));
    OK(instep_stepper_free(NULL));
}

static void layouts(void) {
    instep_layout* layout = layout_of("w", 4);
    instep_param param = {.size = sizeof param};
    uint32_t number = 7;
    SAYS(INSTEP_NULL, "name: null;", instep_layout_add(layout, &param, NULL));
    ANSWERS(INSTEP_NULL, instep_layout_add(layout, NULL, NULL));
    param.name = "\xff";
    SAYS(INSTEP_ARGUMENT, "name: not UTF-8;", instep_layout_add(layout, &param, NULL));
    param.name = "v";
    param.dimensions = 2;
    SAYS(INSTEP_NULL, "shape: null;", instep_layout_add(layout, &param, NULL));
    param.dimensions = 0;
    param.action = 3;
    SAYS(INSTEP_ARGUMENT, "action: 3 stands for nothing;", instep_layout_add(layout, &param, NULL));
    param.action = INSTEP_ACTION_AVERAGE;
    param.is_local = 2;
    ANSWERS(INSTEP_ARGUMENT, instep_layout_add(layout, &param, NULL));
    param.is_local = 0;
    param.size = 7;
    SAYS(INSTEP_ARGUMENT, "instep_param: its size is 7;", instep_layout_add(layout, &param, NULL));
    /* A newer program's struct, with a field that this library does not know. */
    struct {
        instep_param param;
        size_t newer;
    } larger = {.param = {.size = sizeof larger, .name = "v"}, .newer = 1};
    SAYS(INSTEP_ARGUMENT, "instep_param: its size is", instep_layout_add(layout, &larger.param, NULL));
    larger.newer = 0;
    /* A size that nobody has set. */
    param = (instep_param){.size = SIZE_MAX - 7, .name = "v"};
    SAYS(INSTEP_ARGUMENT, "instep_param: its size is 18446744073709551608;", instep_layout_add(layout, &param, NULL));
    OK(instep_layout_add(layout, &larger.param, &number));
    CHECK(number == 1);
    SAYS(INSTEP_LAYOUT, "`z`: no parameter has this name;", instep_layout_find(layout, "z", &number));
    OK(instep_layout_find(layout, "w", &number));
    CHECK(number == 0);
    SAYS(INSTEP_ORDER, "layout: in use", instep_layout_add(layout, &larger.param, NULL));
    OK(instep_layout_free(layout));

    /* An older program's struct, without the last fields. */
    layout = layout_of("w", 4);
    instep_param older = {.size = offsetof(instep_param, uses), .name = "w", .uses = 1000};
    OK(instep_layout_add(layout, &older, NULL));
    SAYS(INSTEP_LAYOUT, "`w`: registered twice;", instep_layout_find(layout, "w", &number));
    OK(instep_layout_free(layout));
    layout = layout_of("endless", SIZE_MAX);
    ANSWERS(INSTEP_LAYOUT, instep_layout_find(layout, "endless", &number));
    OK(instep_layout_free(layout));
}

static void optimizers(void) {
    const char* name = "";
    instep_hyper hyper = {"rate", 1};
    instep_optimizer optimizer = {.size = sizeof optimizer, .name = "adamw"};
    OK(instep_optimizer_state_name(&optimizer, 1, &name));
    CHECK(strcmp(name, "exp_avg_sq") == 0);
    OK(instep_optimizer_state_name(&optimizer, 2, &name));
    CHECK(name == NULL);
    optimizer.hypers = &hyper;
    optimizer.hyper_count = 1;
    SAYS(INSTEP_UNSUPPORTED, "`rate`: AdamW has no such hyperparameter;",
         instep_optimizer_state_name(&optimizer, 0, &name));
    hyper = (instep_hyper){"beta1", 1};
    SAYS(INSTEP_CONFIG, "betas.0 = 1: out of range;", instep_optimizer_state_name(&optimizer, 0, &name));
    optimizer.name = "adamx";
    SAYS(INSTEP_UNSUPPORTED, "optimizer `adamx`: not registered;", instep_optimizer_state_name(&optimizer, 0, &name));
    optimizer.hypers = NULL;
    ANSWERS(INSTEP_NULL, instep_optimizer_state_name(&optimizer, 0, &name));
}

static void bucket_steps(void) {
    instep_layout* layout = layout_of("w", 4);
    instep_bucket_step *step, *untouched = NULL;
    instep_bucket_step_options options = {.size = sizeof options, .layout = layout, .optimizer = &sgd};
    instep_bucket_step_options wrong = options;
    wrong.copy = 4;
    ANSWERS(INSTEP_ARGUMENT, instep_bucket_step_create(&wrong, &untouched));
    wrong = options;
    wrong.gradients = INSTEP_GRADIENTS_RELEASE;
    ANSWERS(INSTEP_CONFIG, instep_bucket_step_create(&wrong, &untouched));
    wrong = options;
    wrong.optimizer = NULL;
    SAYS(INSTEP_NULL, "instep_optimizer: null;", instep_bucket_step_create(&wrong, &untouched));
    wrong = options;
    wrong.params = &(uint32_t){1};
    wrong.offsets = &(size_t){0};
    wrong.param_count = 1;
    SAYS(INSTEP_LAYOUT, "parameter 1: the layout has 1;", instep_bucket_step_create(&wrong, &untouched));
    wrong.params = &(uint32_t){0};
    SAYS(INSTEP_LAYOUT, "gradient of `w`: ends outside", instep_bucket_step_create(&wrong, &untouched));
    wrong = options;
    instep_precision precision = {.size = sizeof precision, .master = INSTEP_MASTER_F32};
    wrong.precision = &precision;
    ANSWERS(INSTEP_CONFIG, instep_bucket_step_create(&wrong, &untouched));
    wrong = options;
    wrong.groups = &(instep_group){.name = "other", .optimizer = &sgd};
    wrong.group_count = 1;
    ANSWERS(INSTEP_LAYOUT, instep_bucket_step_create(&wrong, &untouched));
    wrong.groups = &(instep_group){.name = "default", .precision = &precision};
    SAYS(INSTEP_CONFIG, "group `default`: has a precision of its own;", instep_bucket_step_create(&wrong, &untouched));
    wrong.groups = &(instep_group){.name = "default", .clip = INSTEP_GROUP_CLIP_NONE};
    SAYS(INSTEP_CONFIG, "group `default`: has a clip of its own;", instep_bucket_step_create(&wrong, &untouched));
    wrong.groups = &(instep_group){.name = "default", .clip = INSTEP_GROUP_CLIP_NONE, .max_norm = 1};
    SAYS(INSTEP_ARGUMENT, "max_norm: set, but the group's clip", instep_bucket_step_create(&wrong, &untouched));
    wrong.groups = &(instep_group){.name = "default", .clip = 3};
    SAYS(INSTEP_ARGUMENT, "clip: 3 stands for nothing;", instep_bucket_step_create(&wrong, &untouched));
    wrong = options;
    wrong.threads = 100000;
    SAYS(INSTEP_CONFIG, "threads = 100000: out of range; use 1 to 1024", instep_bucket_step_create(&wrong, &untouched));
    wrong = options;
    wrong.reserved = 1;
    SAYS(INSTEP_ARGUMENT, "reserved: 1, though it has no meaning yet;", instep_bucket_step_create(&wrong, &untouched));
    wrong = options;
    wrong.precision = &(instep_precision){.size = sizeof(instep_precision), .reserved = 1};
    ANSWERS(INSTEP_ARGUMENT, instep_bucket_step_create(&wrong, &untouched));
    wrong = options;
    wrong.layout = layout_of("endless", (size_t)1 << 50);
    SAYS(INSTEP_LAYOUT, "bucket: 1125899906842624 elements,", instep_bucket_step_create(&wrong, &untouched));
    OK(instep_layout_free(wrong.layout));
    ANSWERS(INSTEP_NULL, instep_bucket_step_create(NULL, &untouched));
    ANSWERS(INSTEP_NULL, instep_bucket_step_create(&options, NULL));
    wrong = options;
    wrong.cuda = &(instep_cuda){.size = sizeof(instep_cuda), .ordinal = 10000};
    instep_status gpu = instep_bucket_step_create(&wrong, &untouched);
    CHECK(gpu == INSTEP_UNAVAILABLE || gpu == INSTEP_UNSUPPORTED);
    CHECK(untouched == NULL);
    OK(instep_bucket_step_create(&options, &step));

    float params[4] = {1, 1, 1, 1}, grads[4] = {1, 1, 1, 1}, more[4];
    instep_tensors tensors = {
        .size = sizeof tensors, .params = {.address = params, .count = 4}, .grads = {.address = grads, .count = 4}};
    instep_tensors broken = tensors;
    broken.params.count = 3;
    SAYS(INSTEP_LAYOUT, "parameters: a run of 3 elements, where the bucket has 4;",
         instep_bucket_step_step(step, &broken, NULL, NULL, NULL));
    broken = tensors;
    broken.grads = (instep_tensor){.addresses = (void*[]){grads, grads}, .count = 2};
    SAYS(INSTEP_LAYOUT, "gradients: 2 runs for 1 parameters;",
         instep_bucket_step_step(step, &broken, NULL, NULL, NULL));
    broken = tensors;
    broken.params = (instep_tensor){0};
    SAYS(INSTEP_LAYOUT, "parameters: missing;", instep_bucket_step_step(step, &broken, NULL, NULL, NULL));
    broken = tensors;
    broken.params.address = NULL;
    SAYS(INSTEP_LAYOUT, "parameters: the address is null; give the address of its elements",
         instep_bucket_step_step(step, &broken, NULL, NULL, NULL));
    broken.params.address = (char*)params + 1;
    SAYS(INSTEP_LAYOUT, "parameters: the address 0x", instep_bucket_step_step(step, &broken, NULL, NULL, NULL));
    broken = tensors;
    broken.grads.addresses = (void*[]){grads};
    broken.grads.count = 1;
    ANSWERS(INSTEP_ARGUMENT, instep_bucket_step_step(step, &broken, NULL, NULL, NULL));
    broken = tensors;
    broken.states[0] = (instep_tensor){.address = more, .count = 4};
    SAYS(INSTEP_LAYOUT, "states: given, but this step has none;",
         instep_bucket_step_step(step, &broken, NULL, NULL, NULL));
    broken.states[0] = (instep_tensor){0};
    broken.states[1] = (instep_tensor){.address = more, .count = 4};
    ANSWERS(INSTEP_LAYOUT, instep_bucket_step_step(step, &broken, NULL, NULL, NULL));
    ANSWERS(INSTEP_NULL, instep_bucket_step_step(step, NULL, NULL, NULL, NULL));
    instep_scaling scaling = {.size = sizeof scaling, .clip = 2};
    SAYS(INSTEP_CONFIG, "clip = 2: out of range;", instep_bucket_step_step(step, &tensors, &scaling, NULL, NULL));
    scaling = (instep_scaling){.size = sizeof scaling, .loss_scale = 1e300};
    SAYS(INSTEP_CONFIG, "loss_scale = 1e300: out of range;", instep_bucket_step_step(step, &tensors, &scaling, NULL, NULL));
    scaling = (instep_scaling){.size = sizeof scaling, .reserved = 1};
    ANSWERS(INSTEP_ARGUMENT, instep_bucket_step_step(step, &tensors, &scaling, NULL, NULL));
    scaling = (instep_scaling){.size = sizeof scaling, .grad_scale = (float*)((char*)grads + 1)};
    SAYS(INSTEP_ARGUMENT, "grad_scale: 0x", instep_bucket_step_step(step, &tensors, &scaling, NULL, NULL));
    scaling = (instep_scaling){.size = sizeof scaling, .found_inf = (float*)((char*)grads + 2)};
    ANSWERS(INSTEP_ARGUMENT, instep_bucket_step_step(step, &tensors, &scaling, NULL, NULL));
    broken = tensors;
    broken.grads.address = params;
    SAYS(INSTEP_LAYOUT, "parameters and gradients: overlap;", instep_bucket_step_step(step, &broken, NULL, NULL, NULL));
    scaling = (instep_scaling){.size = sizeof scaling};
    SAYS(INSTEP_ARGUMENT, "stream: given to a step on the CPU",
         instep_bucket_step_step(step, &tensors, NULL, NULL, &scaling));

    SAYS(INSTEP_ORDER, "bucket of `w`: has no tensors of a step; call instep_bucket_step_step first",
         instep_bucket_step_step_again(step, NULL));

    instep_norm* norm;
    instep_decision decision = {.size = sizeof decision};
    OK(instep_norm_create(NULL, &norm));
    ANSWERS(INSTEP_ORDER, instep_bucket_step_step(step, &tensors, NULL, norm, NULL));
    SAYS(INSTEP_ORDER, "norm: not begun", instep_norm_add(norm, step, &tensors.grads, NULL));
    ANSWERS(INSTEP_ORDER, instep_norm_decide(norm, 1, 0, NULL));
    ANSWERS(INSTEP_ORDER, instep_norm_read(norm, &decision));
    OK(instep_norm_begin(norm, NULL, NULL));
    ANSWERS(INSTEP_NULL, instep_norm_add(norm, step, NULL, NULL));
    SAYS(INSTEP_ORDER, "norm: no bucket was added;", instep_norm_decide(norm, 1, 0, NULL));
    OK(instep_norm_add(norm, step, &tensors.grads, NULL));
    SAYS(INSTEP_ORDER, "bucket of `w`: added to this norm already;", instep_norm_add(norm, step, &tensors.grads, NULL));
    ANSWERS(INSTEP_CONFIG, instep_norm_decide(norm, -1, 0, NULL));
    ANSWERS(INSTEP_ARGUMENT, instep_norm_decide(norm, 1, 2, NULL));
    OK(instep_norm_decide(norm, 1, 0, NULL));
    SAYS(INSTEP_ARGUMENT, "scaling: given beside a norm;",
         instep_bucket_step_step(step, &tensors, &scaling, norm, NULL));
    instep_bucket_step* stranger;
    OK(instep_bucket_step_create(&options, &stranger));
    SAYS(INSTEP_ORDER, "bucket of `w`: not added to this norm;",
         instep_bucket_step_step(stranger, &tensors, NULL, norm, NULL));
    OK(instep_bucket_step_free(stranger));
    ANSWERS(INSTEP_NULL, instep_norm_read(norm, NULL));
    decision.size = 3;
    ANSWERS(INSTEP_ARGUMENT, instep_norm_read(norm, &decision));
    OK(instep_norm_free(norm));

    instep_optimizer adam = {.size = sizeof adam, .name = "adam"};
    SAYS(INSTEP_CONFIG, "group `default`: its optimizer is SGD, not Adam;",
         instep_bucket_step_set_optimizer(step, NULL, &adam));
    ANSWERS(INSTEP_LAYOUT, instep_bucket_step_set_optimizer(step, "other", &sgd));
    ANSWERS(INSTEP_LAYOUT, instep_bucket_step_progress(step, 1, NULL, NULL));
    ANSWERS(INSTEP_CONFIG, instep_bucket_step_set_progress(step, 0, 1, -1));
    SAYS(INSTEP_CONFIG, "step_count = 18446744073709551615: out of range;",
         instep_bucket_step_set_progress(step, 0, UINT64_MAX, 1));
    SAYS(INSTEP_CONFIG, "lr = -1: out of range;", instep_bucket_step_set_lr(step, NULL, -1));
    ANSWERS(INSTEP_LAYOUT, instep_bucket_step_set_lr(step, "other", 1));
    ANSWERS(INSTEP_NULL, instep_bucket_step_set_hyper(step, NULL, NULL, 1));
    instep_hyper unknown = {"beta1", 0.5}, twice[] = {{"lr", 1}, {"lr", 2}}, torn[] = {{"lr", 5}, {"nesterov", 1}};
    SAYS(INSTEP_UNSUPPORTED, "`beta1`: SGD has no such hyperparameter; use one of lr, ",
         instep_bucket_step_set_hyper(step, NULL, &unknown, 1));
    SAYS(INSTEP_CONFIG, "`lr`: given twice;", instep_bucket_step_set_hyper(step, NULL, twice, 2));
    ANSWERS(INSTEP_CONFIG, instep_bucket_step_set_hyper(step, NULL, torn, 2));
    for (int k = 0; k < 4; ++k) CHECK(params[k] == 1);
    uint64_t count = 7;
    OK(instep_bucket_step_progress(step, 0, &count, NULL));
    CHECK(count == 0);
    OK(instep_bucket_step_step(step, &tensors, NULL, NULL, NULL));
    CHECK(params[0] == 0);

    grads[0] = 4;
    broken = tensors;
    broken.grads.address = params;
    ANSWERS(INSTEP_LAYOUT, instep_bucket_step_step(step, &broken, NULL, NULL, NULL));
    scaling = (instep_scaling){.size = sizeof scaling, .clip = 2};
    ANSWERS(INSTEP_CONFIG, instep_bucket_step_step_again(step, &scaling));
    scaling.clip = 0.5;
    OK(instep_bucket_step_step_again(step, &scaling));
    OK(instep_bucket_step_step_again(step, NULL));
    CHECK(params[0] == -6 && params[1] == -1.5f);
    OK(instep_bucket_step_progress(step, 0, &count, NULL));
    CHECK(count == 3);
    OK(instep_norm_create(NULL, &norm));
    OK(instep_norm_begin(norm, NULL, NULL));
    OK(instep_norm_add(norm, step, &tensors.grads, NULL));
    ANSWERS(INSTEP_ORDER, instep_bucket_step_step_again(step, NULL));
    OK(instep_norm_free(norm));
    ANSWERS(INSTEP_NULL, instep_bucket_step_step_again(NULL, NULL));
    CHECK(params[0] == -6);
    OK(instep_bucket_step_free(step));
    OK(instep_layout_free(layout));
}

static void steppers(void) {
    instep_layout* layout = layout_of("w", 4);
    instep_stepper *stepper, *untouched = NULL;
    instep_stepper_options options = {.size = sizeof options, .layout = layout, .optimizer = &sgd, .threads = 1};
    instep_stepper_options wrong = options;
    wrong.mode = 3;
    SAYS(INSTEP_ARGUMENT, "mode: 3 stands for nothing;", instep_stepper_create(&wrong, &untouched));
    wrong = options;
    wrong.clip = INSTEP_CLIP_GLOBAL;
    wrong.max_norm = 1;
    ANSWERS(INSTEP_CONFIG, instep_stepper_create(&wrong, &untouched)); /* in INSTEP_MODE_EAGER */
    wrong.clip = INSTEP_CLIP_NONE;
    ANSWERS(INSTEP_ARGUMENT, instep_stepper_create(&wrong, &untouched));
    wrong = options;
    wrong.rank = 1;
    ANSWERS(INSTEP_ARGUMENT, instep_stepper_create(&wrong, &untouched));
    wrong = options;
    wrong.sums_by_caller = 1;
    wrong.unused = INSTEP_UNUSED_SKIP;
    ANSWERS(INSTEP_CONFIG, instep_stepper_create(&wrong, &untouched)); /* with INSTEP_UNUSED_SKIP */
    wrong.collective = &(instep_collective){.size = sizeof(instep_collective)};
    SAYS(INSTEP_ARGUMENT, "sums_by_caller: 1 beside a collective;", instep_stepper_create(&wrong, &untouched));
    wrong = options;
    wrong.collective = &(instep_collective){.size = sizeof(instep_collective)};
    SAYS(INSTEP_NULL, "instep_collective: enqueue is null;", instep_stepper_create(&wrong, &untouched));
    wrong = options;
    wrong.loss_scale = 8;
    wrong.loss_scaler = &(instep_loss_scaler){.size = sizeof(instep_loss_scaler)};
    ANSWERS(INSTEP_ARGUMENT, instep_stepper_create(&wrong, &untouched));
    wrong.loss_scale = 0;
    wrong.mode = INSTEP_MODE_NORMED;
    wrong.skip_nonfinite = 1;
    wrong.loss_scaler = &(instep_loss_scaler){.size = sizeof(instep_loss_scaler), .reserved = 1};
    ANSWERS(INSTEP_ARGUMENT, instep_stepper_create(&wrong, &untouched));
    wrong = options;
    wrong.reserved_too = 1;
    SAYS(INSTEP_ARGUMENT, "reserved_too: 1", instep_stepper_create(&wrong, &untouched));
    wrong = options;
    float grads[4] = {0};
    instep_bucket bucket = {
        .address = grads, .elements = 4, .params = &(uint32_t){0}, .offsets = &(size_t){0}, .param_count = 1};
    instep_memory memory = {.size = sizeof memory,
                            .params = (void*[]){grads, grads},
                            .param_count = 2,
                            .buckets = &bucket,
                            .bucket_count = 1};
    wrong.memory = &memory;
    SAYS(INSTEP_LAYOUT, "params: 2 addresses, where the layout has 1;", instep_stepper_create(&wrong, &untouched));
    memory.param_count = 1;
    SAYS(INSTEP_LAYOUT, "`w` and bucket 0: overlap", instep_stepper_create(&wrong, &untouched));
    wrong.layout = NULL;
    ANSWERS(INSTEP_NULL, instep_stepper_create(&wrong, &untouched));
    CHECK(untouched == NULL);
    OK(instep_stepper_create(&options, &stepper));

    float values[4] = {0};
    void* address;
    instep_tensor_id w = {.kind = INSTEP_PARAM}, grad = {.kind = INSTEP_GRAD}, state = {.kind = INSTEP_STATE};
    ANSWERS(INSTEP_ARGUMENT, instep_stepper_read(stepper, (instep_tensor_id){.kind = 5}, values, 4));
    ANSWERS(INSTEP_LAYOUT, instep_stepper_read(stepper, (instep_tensor_id){.param = 1}, values, 4));
    ANSWERS(INSTEP_LAYOUT, instep_stepper_read(stepper, w, values, 3));
    ANSWERS(INSTEP_NULL, instep_stepper_read(stepper, w, NULL, 4));
    ANSWERS(INSTEP_NULL, instep_stepper_read(stepper, state, values, 4));
    state.state = "momentum_buffer";
    ANSWERS(INSTEP_UNSUPPORTED, instep_stepper_read(stepper, state, values, 4));
    ANSWERS(INSTEP_UNSUPPORTED, instep_stepper_read(stepper, (instep_tensor_id){.kind = INSTEP_EMA}, values, 4));
    ANSWERS(INSTEP_ORDER, instep_stepper_write(stepper, grad, values, 4));
    ANSWERS(INSTEP_ARGUMENT, instep_stepper_address(stepper, w, 2, &address, NULL));
    ANSWERS(INSTEP_NULL, instep_stepper_address(stepper, w, INSTEP_READ, NULL, NULL));
    ANSWERS(INSTEP_UNSUPPORTED, instep_stepper_rebind(stepper, &memory, NULL));
    ANSWERS(INSTEP_UNSUPPORTED, instep_stepper_bucket_ready_after(stepper, 0, NULL));
    ANSWERS(INSTEP_ORDER, instep_stepper_finish(stepper));
    ANSWERS(INSTEP_ORDER, instep_stepper_grad_ready(stepper, 0));
    ANSWERS(INSTEP_ORDER, instep_stepper_bucket_ready(stepper, 0));
    ANSWERS(INSTEP_ORDER, instep_stepper_next_micro_batch(stepper));
    ANSWERS(INSTEP_CONFIG, instep_stepper_set_unused(stepper, NULL, 0)); /* ranks count with INSTEP_UNUSED_SKIP */
    ANSWERS(INSTEP_ORDER, instep_stepper_abandon(stepper, NULL, 0, NULL));
    ANSWERS(INSTEP_FILE, instep_stepper_load(stepper, "/nowhere/at all", NULL, 0));
    ANSWERS(INSTEP_FILE, instep_stepper_save(stepper, "/nowhere/at all", NULL, 0));
    ANSWERS(INSTEP_NULL, instep_stepper_save(stepper, NULL, NULL, 0));
    ANSWERS(INSTEP_ARGUMENT,
            instep_stepper_save(stepper, "x", &(instep_scalar){.name = "x", .kind = INSTEP_ABSENT}, 1));
    instep_scalar twice[] = {{.name = "x"}, {.name = "x"}};
    SAYS(INSTEP_ARGUMENT, "scalars: `x` is named twice;", instep_stepper_save(stepper, "x", twice, 2));
    ANSWERS(INSTEP_ARGUMENT,
            instep_stepper_status(stepper, 2, &(instep_pass_status){.size = sizeof(instep_pass_status)}));
    ANSWERS(INSTEP_NULL, instep_stepper_loss_scale(stepper, NULL));

    OK(instep_stepper_begin(stepper, 0));
    ANSWERS(INSTEP_ORDER, instep_stepper_begin(stepper, 1));
    ANSWERS(INSTEP_ORDER, instep_stepper_grad_ready(stepper, 0)); /* not written */
    ANSWERS(INSTEP_LAYOUT, instep_stepper_bucket_ready(stepper, 1));
    ANSWERS(INSTEP_ORDER, instep_stepper_write(stepper, w, values, 4));
    ANSWERS(INSTEP_ORDER, instep_stepper_set_frozen(stepper, 0, 1));
    ANSWERS(INSTEP_ORDER, instep_stepper_set_optimizer(stepper, NULL, &sgd));
    ANSWERS(INSTEP_ORDER, instep_stepper_progress(stepper, 0, NULL, NULL));
    /* Freed inside a pass: it says so, and is freed. */
    SAYS(INSTEP_ORDER, "stepper: closed while a pass was open;", instep_stepper_free(stepper));
    ANSWERS(INSTEP_HANDLE, instep_stepper_free(stepper));
    OK(instep_layout_free(layout));
}

int main(void) {
    CHECK(strcmp(instep_version(), VERSION) == 0);
    CHECK(strcmp(instep_status_name(INSTEP_BUSY), "INSTEP_BUSY") == 0);
    CHECK(strcmp(instep_status_name(1000), "unknown status") == 0);
    CHECK(strcmp(instep_last_error(), "") == 0);
    handles();
    layouts();
    optimizers();
    bucket_steps();
    steppers();
    return 0;
}
