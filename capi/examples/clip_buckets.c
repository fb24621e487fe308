/*
 * Clips the gradients of two buckets by their common norm, then steps both; changes a learning rate; resumes step
 * counts.
 *
 * cc clip_buckets.c $(pkg-config --cflags --libs instep) -lm
 */
#include <instep.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static void must(instep_status status) {
    if (status != INSTEP_OK) {
        fprintf(stderr, "%s: %s\n", instep_status_name(status), instep_last_error());
        exit(1);
    }
}

/* A bucket of one parameter. */
static instep_bucket_step* bucket_of(instep_layout* layout, const instep_optimizer* sgd, const char* name,
                                     size_t elements) {
    uint32_t param;
    must(instep_layout_find(layout, name, &param));
    size_t offset = 0;
    instep_bucket_step_options options = {
        .size = sizeof options,
        .layout = layout,
        .optimizer = sgd,
        .params = &param,
        .offsets = &offset,
        .param_count = 1,
        .elements = elements,
        .threads = 2,
    };
    instep_bucket_step* step;
    must(instep_bucket_step_create(&options, &step));
    return step;
}

int main(void) {
    size_t three = 3, one = 1;
    instep_layout* layout;
    must(instep_layout_create(&layout));
    must(instep_layout_add(
        layout, &(instep_param){.size = sizeof(instep_param), .name = "weight", .shape = &three, .dimensions = 1},
        NULL));
    must(instep_layout_add(
        layout, &(instep_param){.size = sizeof(instep_param), .name = "bias", .shape = &one, .dimensions = 1}, NULL));
    instep_hyper lr = {"lr", 1};
    instep_optimizer sgd = {.size = sizeof sgd, .name = "sgd", .hypers = &lr, .hyper_count = 1};
    instep_bucket_step* first = bucket_of(layout, &sgd, "weight", 3);
    instep_bucket_step* second = bucket_of(layout, &sgd, "bias", 1);
    must(instep_layout_free(layout));

    float weight[3] = {0}, bias[1] = {0}, weight_grad[3] = {4, 4, 4}, bias_grad[1] = {4};
    instep_tensors of_first = {.size = sizeof of_first,
                               .params = {.address = weight, .count = 3},
                               .grads = {.address = weight_grad, .count = 3}};
    instep_tensors of_second = {
        .size = sizeof of_second, .params = {.address = bias, .count = 1}, .grads = {.address = bias_grad, .count = 1}};

    instep_norm* norm;
    must(instep_norm_create(NULL, &norm));
    instep_scaling mean = {.size = sizeof mean, .world_size = 2};
    must(instep_norm_begin(norm, &mean, NULL));
    must(instep_norm_add(norm, first, &of_first.grads, NULL));
    must(instep_norm_add(norm, second, &of_second.grads, NULL));
    must(instep_norm_decide(norm, 2, 1, NULL)); /* clips to 2; skips infinities */
    must(instep_bucket_step_step(first, &of_first, NULL, norm, NULL));
    must(instep_bucket_step_step(second, &of_second, NULL, norm, NULL));
    instep_decision decision = {.size = sizeof decision};
    must(instep_norm_read(norm, &decision));
    must(instep_norm_free(norm));
    printf("norm %g, clipped by %g: %g and %g\n", decision.norm, decision.clip, (double)weight[2], (double)bias[0]);
    if (decision.norm != 4 || fabsf(weight[2] + 1) > 1e-6f || fabsf(bias[0] + 1) > 1e-6f) return 1;

    lr.value = 0.5;
    must(instep_bucket_step_set_optimizer(second, NULL, &sgd));
    must(instep_bucket_step_step(second, &of_second, &mean, NULL, NULL));
    if (fabsf(bias[0] + 2) > 1e-6f) return 1;

    uint64_t count;
    must(instep_bucket_step_progress(second, 1, &count, NULL));
    if (count != 2) return 1;
    must(instep_bucket_step_set_progress(second, 1, 100, 1));
    must(instep_bucket_step_progress(second, 1, &count, NULL));
    must(instep_bucket_step_free(first));
    must(instep_bucket_step_free(second));
    return count == 100 ? 0 : 1;
}
