/*
 * Writes what `instep replay` needs to repeat the steps of this program, and what the program got: check.sh compares
 * them, bit for bit.
 *
 * replay FOLDER
 */
#include "check.h"

enum { WEIGHT = 300, BIAS = 7, ALL = WEIGHT + BIAS, PASSES = 3 };

/* A tensor of a safetensors file. */
struct tensor {
    char name[64];
    const char* dtype;
    const void* data;
    size_t elements;
};

struct file {
    struct tensor tensors[32];
    int count;
};

static size_t bytes_of(const struct tensor* tensor) {
    return tensor->elements * (strcmp(tensor->dtype, "F32") == 0 ? 4 : 2);
}

static void add(struct file* file, const char* kind, const char* name, const char* dtype, const void* data,
                size_t elements) {
    struct tensor* tensor = &file->tensors[file->count++];
    snprintf(tensor->name, sizeof tensor->name, "%s.%s", kind, name);
    *tensor = (struct tensor){.dtype = dtype, .data = data, .elements = elements};
    snprintf(tensor->name, sizeof tensor->name, "%s.%s", kind, name);
}

/* Both parameters of a flat run. */
static void add_both(struct file* file, const char* kind, const char* of, const char* dtype, const void* run) {
    size_t width = strcmp(dtype, "F32") == 0 ? 4 : 2;
    char name[32];
    snprintf(name, sizeof name, "weight%s", of);
    add(file, kind, name, dtype, run, WEIGHT);
    snprintf(name, sizeof name, "bias%s", of);
    add(file, kind, name, dtype, (const char*)run + WEIGHT * width, BIAS);
}

static FILE* open_in(const char* folder, const char* name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE* out = fopen(path, "wb");
    CHECK(out);
    return out;
}

static void write(const struct file* file, const char* metadata, const char* folder, const char* name) {
    char header[8192];
    int length = snprintf(header, sizeof header, "{\"__metadata__\":{%s}", metadata);
    size_t offset = 0;
    for (int k = 0; k < file->count; ++k) {
        const struct tensor* one = &file->tensors[k];
        length += snprintf(header + length, sizeof header - (size_t)length,
                           ",\"%s\":{\"dtype\":\"%s\",\"shape\":[%zu],\"data_offsets\":[%zu,%zu]}", one->name,
                           one->dtype, one->elements, offset, offset + bytes_of(one));
        offset += bytes_of(one);
    }
    length += snprintf(header + length, sizeof header - (size_t)length, "}");
    while (length % 8) header[length++] = ' ';
    FILE* out = open_in(folder, name);
    uint64_t prefix = (uint64_t)length;
    CHECK(fwrite(&prefix, 8, 1, out) == 1 && fwrite(header, (size_t)length, 1, out) == 1);
    for (int k = 0; k < file->count; ++k)
        CHECK(fwrite(file->tensors[k].data, bytes_of(&file->tensors[k]), 1, out) == 1);
    CHECK(fclose(out) == 0);
}

/* Values between -1 and 1 that bf16 can hold. */
static float next(uint32_t* state) {
    *state = *state * 1664525 + 1013904223;
    return (float)((int)(*state >> 24) - 128) / 128;
}

static void fill(float* floats, uint16_t* halves, uint32_t* state) {
    for (int k = 0; k < ALL; ++k) {
        floats[k] = next(state);
        uint32_t bits;
        memcpy(&bits, &floats[k], 4);
        halves[k] = (uint16_t)(bits >> 16);
    }
}

/* Steps in one precision, and leaves NAME-config.json, NAME-input.safetensors and NAME-stepped.safetensors. */
static void run(const char* folder, const char* name, int is_narrow) {
    static float params[ALL], grads[PASSES][ALL], master[ALL], exp_avg[ALL], exp_avg_sq[ALL];
    static uint16_t narrow_params[ALL], narrow_grads[PASSES][ALL], narrow_exp_avg[ALL], narrow_exp_avg_sq[ALL];
    uint32_t random = 1;
    const char* dtype = is_narrow ? "BF16" : "F32";
    struct file input = {.count = 0}, stepped = {.count = 0};
    fill(params, narrow_params, &random);
    memcpy(master, params, sizeof master);
    memset(exp_avg, 0, sizeof exp_avg);
    memset(exp_avg_sq, 0, sizeof exp_avg_sq);
    add_both(&input, "param", "", dtype, is_narrow ? (void*)narrow_params : params);
    for (int pass = 0; pass < PASSES; ++pass) {
        char kind[32];
        snprintf(kind, sizeof kind, "grad.%d", pass);
        fill(grads[pass], narrow_grads[pass], &random);
        add_both(&input, kind, "", dtype, is_narrow ? (void*)narrow_grads[pass] : grads[pass]);
    }
    char file_name[64];
    snprintf(file_name, sizeof file_name, "%s-input.safetensors", name);
    write(&input, "", folder, file_name);

    instep_layout* layout = layout_of("weight", WEIGHT);
    size_t seven = BIAS;
    instep_param bias = {.size = sizeof bias, .name = "bias", .shape = &seven, .dimensions = 1, .group = "plain"};
    OK(instep_layout_add(layout, &bias, NULL));
    instep_hyper decayed[] = {{"lr", 0.01}, {"beta2", 0.95}, {"weight_decay", 0.1}},
                 plain[] = {{"lr", 0.01}, {"weight_decay", 0}};
    instep_optimizer adamw = {.size = sizeof adamw, .name = "AdamW", .hypers = decayed, .hyper_count = 3};
    instep_optimizer without_decay = {.size = sizeof adamw, .name = "adamw", .hypers = plain, .hyper_count = 2};
    instep_precision precision = {
        .size = sizeof precision,
        .param = INSTEP_BF16,
        .grad = INSTEP_BF16,
        .master = INSTEP_MASTER_F32,
        .states = INSTEP_STATES_BF16,
        .is_stochastic = 1,
        .seed = 5,
    };
    instep_bucket_step_options options = {
        .size = sizeof options,
        .layout = layout,
        .optimizer = &adamw,
        .groups = &(instep_group){.name = "plain", .optimizer = &without_decay},
        .group_count = 1,
        .precision = is_narrow ? &precision : NULL,
        .threads = 2,
    };
    instep_bucket_step* step;
    OK(instep_bucket_step_create(&options, &step));
    OK(instep_layout_free(layout));
    void* apart[] = {params, params + WEIGHT};
    instep_tensors tensors = {.size = sizeof tensors};
    if (is_narrow) {
        tensors.params = (instep_tensor){.address = narrow_params, .count = ALL};
        tensors.master = (instep_tensor){.address = master, .count = ALL};
        memset(narrow_exp_avg, 0, sizeof narrow_exp_avg);
        memset(narrow_exp_avg_sq, 0, sizeof narrow_exp_avg_sq);
        tensors.states[0] = (instep_tensor){.address = narrow_exp_avg, .count = ALL};
        tensors.states[1] = (instep_tensor){.address = narrow_exp_avg_sq, .count = ALL};
    } else { /* each parameter by its own address */
        tensors.params = (instep_tensor){.addresses = apart, .count = 2};
        tensors.states[0] = (instep_tensor){.address = exp_avg, .count = ALL};
        tensors.states[1] = (instep_tensor){.address = exp_avg_sq, .count = ALL};
    }
    for (int pass = 0; pass < PASSES; ++pass) {
        instep_scaling scaling = {.size = sizeof scaling, .world_size = 3, .loss_scale = 0.5};
        tensors.grads = (instep_tensor){.address = is_narrow ? (void*)narrow_grads[pass] : grads[pass], .count = ALL};
        OK(instep_bucket_step_step(step, &tensors, &scaling, NULL, NULL));
    }
    OK(instep_bucket_step_free(step));

    add_both(&stepped, "param", "", dtype, is_narrow ? (void*)narrow_params : params);
    add_both(&stepped, "state", ".exp_avg", dtype, tensors.states[0].address);
    add_both(&stepped, "state", ".exp_avg_sq", dtype, tensors.states[1].address);
    if (is_narrow) add_both(&stepped, "master", "", "F32", master);
    snprintf(file_name, sizeof file_name, "%s-stepped.safetensors", name);
    write(&stepped, "\"step.weight\":\"3\",\"step.bias\":\"3\"", folder, file_name);
    snprintf(file_name, sizeof file_name, "%s-config.json", name);
    FILE* config = open_in(folder, file_name);
    fprintf(config,
            "{\"optimizer\":\"adamw\",\"world_size\":3,\"loss_scale\":0.5,\"dtypes\":{%s},\"groups\":["
            "{\"params\":[\"weight\"],\"lr\":0.01,\"betas\":[0.9,0.95],\"weight_decay\":0.1},"
            "{\"params\":[\"bias\"],\"lr\":0.01,\"weight_decay\":0}]}",
            is_narrow ? "\"param\":\"bf16\",\"grad\":\"bf16\",\"master\":\"f32\",\"moments\":\"bf16\",\"rounding\":"
                        "\"stochastic\",\"seed\":5"
                      : "");
    CHECK(fclose(config) == 0);
}

int main(int count, char** arguments) {
    CHECK(count == 2);
    run(arguments[1], "f32", 0);
    run(arguments[1], "bf16", 1);
    return 0;
}
