/*
 * Checks of the C tests: each one that fails names its line and the library's last error, and ends the program.
 */
#ifndef CHECK_H
#define CHECK_H

#include <instep.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FAIL(...) \
    (fprintf(stderr, "%s:%d: ", __FILE__, __LINE__), fprintf(stderr, __VA_ARGS__), fputc('\n', stderr), exit(1))

#define CHECK(condition)                          \
    do {                                          \
        if (!(condition)) FAIL("%s", #condition); \
    } while (0)

/* Whether a call answers a status. */
#define ANSWERS(expected, call)                                                                             \
    do {                                                                                                    \
        instep_status answer_ = (call);                                                                     \
        if (answer_ != (expected))                                                                          \
            FAIL("%s: %s, not %s: %s", #call, instep_status_name(answer_), #expected, instep_last_error()); \
    } while (0)

#define OK(call) ANSWERS(INSTEP_OK, call)

/* Whether a call answers a status with a text that begins so. */
#define SAYS(expected, text, call)                                                                                  \
    do {                                                                                                            \
        ANSWERS(expected, call);                                                                                    \
        if (strncmp(instep_last_error(), text, strlen(text)) != 0) FAIL("%s: says %s", #call, instep_last_error()); \
    } while (0)

/* A layout of one parameter, and SGD of learning rate 1. */
static inline instep_layout* layout_of(const char* name, size_t elements) {
    instep_layout* layout;
    instep_param param;
    memset(&param, 0, sizeof param);
    param.size = sizeof param;
    param.name = name;
    param.shape = &elements;
    param.dimensions = 1;
    OK(instep_layout_create(&layout));
    OK(instep_layout_add(layout, &param, NULL));
    return layout;
}

static instep_hyper rate = {"lr", 1};
static instep_optimizer sgd = {sizeof sgd, "sgd", &rate, 1};

#endif
