/*
 * Trains y = 3x - 1 by a stepper that owns its memory, saves a checkpoint, and goes on with it in another stepper.
 *
 * cc train.c $(pkg-config --cflags --libs instep)
 * ./a.out FOLDER
 */
#include <instep.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SLOPE, OFFSET };

static void must(instep_status status) {
    if (status != INSTEP_OK) {
        fprintf(stderr, "%s: %s\n", instep_status_name(status), instep_last_error());
        exit(1);
    }
}

static float read(instep_stepper* stepper, uint32_t param) {
    float value;
    must(instep_stepper_read(stepper, (instep_tensor_id){.kind = INSTEP_PARAM, .param = param}, &value, 1));
    return value;
}

static void train(instep_stepper* stepper, int first, int end) {
    for (int step = first; step < end; ++step) {
        float x = (float)(step % 8) / 4;
        must(instep_stepper_begin(stepper, 1));
        float error = read(stepper, SLOPE) * x + read(stepper, OFFSET) - (3 * x - 1); /* waits for the last step */
        float* slope_grad; /* where it lies; instep_stepper_write copies */
        instep_tensor_id slope = {.kind = INSTEP_GRAD, .param = SLOPE}, offset = {.kind = INSTEP_GRAD, .param = OFFSET};
        must(instep_stepper_address(stepper, slope, INSTEP_WRITE, (void**)&slope_grad, NULL));
        *slope_grad = error * x;
        must(instep_stepper_write(stepper, offset, &error, 1));
        must(instep_stepper_grad_ready(stepper, OFFSET));
        must(instep_stepper_grad_ready(stepper, SLOPE)); /* the bucket is complete: it is stepped now */
        must(instep_stepper_finish(stepper));
    }
}

int main(int count, char** arguments) {
    char path[4096];
    if (count != 2) {
        fprintf(stderr, "usage: %s FOLDER\n", arguments[0]);
        return 2;
    }
    snprintf(path, sizeof path, "%s/line.safetensors", arguments[1]);
    instep_layout* layout;
    must(instep_layout_create(&layout));
    must(instep_layout_add(layout, &(instep_param){.size = sizeof(instep_param), .name = "slope"}, NULL));
    must(instep_layout_add(layout, &(instep_param){.size = sizeof(instep_param), .name = "offset"}, NULL));
    instep_hyper lr = {"lr", 0.05};
    instep_optimizer adamw = {.size = sizeof adamw, .name = "AdamW", .hypers = &lr, .hyper_count = 1};
    instep_stepper_options options = {.size = sizeof options, .layout = layout, .optimizer = &adamw, .threads = 1};

    instep_stepper* stepper;
    must(instep_stepper_create(&options, &stepper));
    train(stepper, 0, 250);
    instep_scalar step = {.name = "step", .kind = INSTEP_INTEGER, .integer = 250};
    must(instep_stepper_save(stepper, path, &step, 1));
    train(stepper, 250, 500);

    instep_stepper* resumed;
    options.mode = INSTEP_MODE_NORMED;
    must(instep_stepper_create(&options, &resumed));
    must(instep_layout_free(layout));
    must(instep_stepper_load(resumed, path, &step, 1));
    train(resumed, (int)step.integer, 500);

    float all[2][2] = {{read(stepper, SLOPE), read(stepper, OFFSET)}, {read(resumed, SLOPE), read(resumed, OFFSET)}};
    must(instep_stepper_free(stepper));
    must(instep_stepper_free(resumed));
    printf("y = %.3f x %+.3f\n", (double)all[0][0], (double)all[0][1]);
    int is_line = all[0][0] > 2.9f && all[0][0] < 3.1f && all[0][1] > -1.1f && all[0][1] < -0.9f;
    return is_line && memcmp(all[0], all[1], sizeof all[0]) == 0 ? 0 : 1; /* bit for bit, in another mode */
}
