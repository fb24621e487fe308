/*
 * Steps one bucket now, on memory of the program's own: for engines that sum gradients themselves.
 *
 * cc step_bucket.c $(pkg-config --cflags --libs instep)
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

int main(void) {
    instep_layout* layout;
    must(instep_layout_create(&layout));
    must(instep_layout_add(
        layout,
        &(instep_param){.size = sizeof(instep_param), .name = "weight", .shape = (size_t[]){3, 2}, .dimensions = 2},
        NULL));
    must(instep_layout_add(
        layout, &(instep_param){.size = sizeof(instep_param), .name = "bias", .shape = (size_t[]){2}, .dimensions = 1},
        NULL));

    instep_hyper hypers[] = {{"lr", 0.1}, {"beta1", 0.9}};
    instep_optimizer adamw = {.size = sizeof adamw, .name = "AdamW", .hypers = hypers, .hyper_count = 2};
    instep_bucket_step_options options = {.size = sizeof options, .layout = layout, .optimizer = &adamw};
    instep_bucket_step* step;
    must(instep_bucket_step_create(&options, &step));
    must(instep_layout_free(layout));

    float params[8] = {1, 1, 1, 1, 1, 1, 1, 1}, exp_avg[8] = {0}, exp_avg_sq[8] = {0};
    for (int k = 0; k < 10; ++k) {
        float summed[8]; /* over two ranks: the gradient of (p * p) / 2 on each */
        for (int i = 0; i < 8; ++i) summed[i] = 2 * params[i];
        instep_tensors tensors = {
            .size = sizeof tensors,
            .params = {.address = params, .count = 8},
            .grads = {.address = summed, .count = 8},
            .states = {{.address = exp_avg, .count = 8}, {.address = exp_avg_sq, .count = 8}},
        };
        instep_scaling mean = {.size = sizeof mean, .world_size = 2};
        must(instep_bucket_step_step(step, &tensors, &mean, NULL, NULL));
    }
    must(instep_bucket_step_free(step));
    printf("after 10 steps: %.4f\n", (double)params[0]);
    return params[0] < 0.5f ? 0 : 1;
}
