/*
 * A stepper on the program's own tensors: each parameter in its own allocation, gradients in a flat bucket that the
 * program sums over its ranks itself. The bucket is reallocated on the way, and a parameter is left out of a pass.
 *
 * cc borrowed.c $(pkg-config --cflags --libs instep)
 */
#include <instep.h>
#include <stdio.h>
#include <stdlib.h>

static void must(instep_status status) {
    if (status != INSTEP_OK) {
        fprintf(stderr, "%s: %s\n", instep_status_name(status), instep_last_error());
        exit(1);
    }
}

/* The program's own all-reduce, here of one rank. */
static void all_reduce(float* bucket, size_t elements) {
    (void)bucket;
    (void)elements;
}

int main(void) {
    size_t three = 3;
    uint32_t weight, bias;
    instep_layout* layout;
    must(instep_layout_create(&layout));
    must(instep_layout_add(
        layout, &(instep_param){.size = sizeof(instep_param), .name = "weight", .shape = &three, .dimensions = 1},
        &weight));
    must(instep_layout_add(layout, &(instep_param){.size = sizeof(instep_param), .name = "bias"}, &bias));

    float *weights = calloc(3, sizeof *weights), *biases = calloc(1, sizeof *biases);
    float* grads = calloc(4, sizeof *grads);
    uint32_t in_bucket[] = {bias, weight};
    size_t offsets[] = {0, 1};
    instep_bucket bucket = {.address = grads, .elements = 4, .params = in_bucket, .offsets = offsets, .param_count = 2};
    instep_memory memory = {
        .size = sizeof memory,
        .params = (void*[]){weights, biases},
        .param_count = 2,
        .buckets = &bucket,
        .bucket_count = 1,
    };
    instep_hyper lr = {"lr", 1};
    instep_optimizer sgd = {.size = sizeof sgd, .name = "SGD", .hypers = &lr, .hyper_count = 1};
    instep_stepper_options options = {
        .size = sizeof options,
        .layout = layout,
        .optimizer = &sgd,
        .memory = &memory,
        .sums_by_caller = 1,
        .threads = 1,
    };
    instep_stepper* stepper;
    must(instep_stepper_create(&options, &stepper));
    must(instep_layout_free(layout));

    for (int step = 0; step < 3; ++step) {
        if (step == 2) { /* the bucket moves */
            float *moved = calloc(4, sizeof *moved), *old = grads;
            bucket.address = moved;
            instep_memory elsewhere = {.size = sizeof elsewhere, .buckets = &bucket, .bucket_count = 1};
            must(instep_stepper_rebind(stepper, &elsewhere, NULL));
            free(old);
            grads = moved;
        }
        must(instep_stepper_begin(stepper, 1));
        void* address;
        must(instep_stepper_address(stepper, (instep_tensor_id){.kind = INSTEP_GRAD, .param = weight}, INSTEP_WRITE,
                                    &address, NULL));
        must(instep_stepper_address(stepper, (instep_tensor_id){.kind = INSTEP_GRAD, .param = bias}, INSTEP_WRITE,
                                    &address, NULL));
        for (int k = 0; k < 4; ++k) grads[k] = (float)(k + 1); /* backward */
        all_reduce(grads, 4);
        if (step == 1) must(instep_stepper_set_unused(stepper, &bias, 1)); /* no rank used it */
        must(instep_stepper_bucket_ready(stepper, 0));
        must(instep_stepper_finish(stepper));
    }
    must(instep_stepper_free(stepper)); /* waits for the last step; the tensors are the program's again */
    printf("%g %g %g %g\n", (double)biases[0], (double)weights[0], (double)weights[1], (double)weights[2]);
    int is_right = biases[0] == -2 && weights[0] == -6 && weights[1] == -9 && weights[2] == -12;
    free(weights);
    free(biases);
    free(grads);
    return is_right ? 0 : 1;
}
