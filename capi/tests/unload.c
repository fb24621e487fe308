/*
 * The library stays in memory after dlclose, because its threads may still run. This program is not linked with it.
 */
#include <dlfcn.h>
#include <instep.h>
#include <stdio.h>

typedef instep_status create_layout(instep_layout**);
typedef instep_status add(instep_layout*, const instep_param*, uint32_t*);
typedef instep_status create_stepper(const instep_stepper_options*, instep_stepper**);
typedef instep_status begin(instep_stepper*, uint32_t);
typedef instep_status end(instep_stepper*);

int main(int count, char** arguments) {
    void* library = count == 2 ? dlopen(arguments[1], RTLD_NOW) : NULL;
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    instep_layout* layout;
    instep_stepper* stepper;
    instep_hyper lr = {"lr", 1};
    instep_optimizer sgd = {.size = sizeof sgd, .name = "sgd", .hypers = &lr, .hyper_count = 1};
    instep_stepper_options options = {.size = sizeof options, .optimizer = &sgd};
    if (((create_layout*)dlsym(library, "instep_layout_create"))(&layout)) return 3;
    if (((add*)dlsym(library, "instep_layout_add"))(layout, &(instep_param){.size = sizeof(instep_param), .name = "w"},
                                                    NULL))
        return 4;
    options.layout = layout;
    if (((create_stepper*)dlsym(library, "instep_stepper_create"))(&options, &stepper)) return 5;
    begin* begins = (begin*)dlsym(library, "instep_stepper_begin");
    end *finishes = (end*)dlsym(library, "instep_stepper_finish"), *frees = (end*)dlsym(library, "instep_stepper_free");
    if (begins(stepper, 1) || finishes(stepper)) return 6; /* its threads run */
    if (dlclose(library)) return 7;
    if (begins(stepper, 1) || finishes(stepper) || frees(stepper)) return 8;
    library = dlopen(arguments[1], RTLD_NOW); /* the same one, which knows its handles */
    if (!library) return 9;
    return ((end*)dlsym(library, "instep_stepper_free"))(stepper) == INSTEP_HANDLE ? 0 : 10;
}
