/*
 * Callbacks that throw: instep::caught makes a status of an exception; one that is let out ends the process, not more.
 */
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <stdexcept>

#include "check.h"

namespace {

instep_status throws(void*, const instep_call*) { throw std::runtime_error("on purpose"); }

instep_stepper* create(instep_status (*enqueue)(void*, const instep_call*)) {
    instep_layout* layout = layout_of("w", 1);
    instep_collective collective{};
    collective.size = sizeof collective;
    collective.enqueue = enqueue;
    instep_stepper_options options{};
    options.size = sizeof options;
    options.layout = layout;
    options.optimizer = &sgd;
    options.collective = &collective;
    options.threads = 1;
    instep_stepper* stepper;
    OK(instep_stepper_create(&options, &stepper));
    OK(instep_layout_free(layout));
    return stepper;
}

instep_status pass(instep_stepper* stepper) {
    float value = 1;
    instep_status status = instep_stepper_begin(stepper, 1);
    if (status == INSTEP_OK) status = instep_stepper_write(stepper, {INSTEP_GRAD, 0, nullptr}, &value, 1);
    if (status == INSTEP_OK) status = instep_stepper_finish(stepper);
    return status != INSTEP_OK ? status : instep_stepper_read(stepper, {INSTEP_PARAM, 0, nullptr}, &value, 1);
}

void an_exception_that_is_let_out_ends_the_process() {
    fflush(nullptr);
    pid_t child = fork(); /* before the first handle */
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(freopen("/dev/null", "w", stderr));
        pass(create(throws));
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

void a_caught_exception_ends_the_stepper() {
    instep_stepper* stepper = create(instep::caught<throws>);
    ANSWERS(INSTEP_POISONED, pass(stepper));
    CHECK(strstr(instep_last_error(), "the callback threw an exception"));
    (void)instep_stepper_abandon(stepper, nullptr, 0, nullptr); /* the pass may be open */
    ANSWERS(INSTEP_POISONED, instep_stepper_free(stepper));
}

}  // namespace

int main(int count, char**) {
    if (count == 1) an_exception_that_is_let_out_ends_the_process(); /* sanitizers report the abort */
    a_caught_exception_ends_the_stepper();
    return 0;
}
