/*
 * A collective of the program's own: four ranks are threads, and the sum is made in a callback that may throw.
 *
 * c++ -std=c++17 ranks.cpp $(pkg-config --cflags --libs instep) -pthread
 */
#include <instep.h>

#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

void must(instep_status status) {
    if (status != INSTEP_OK)
        throw std::runtime_error(std::string(instep_status_name(status)) + ": " + instep_last_error());
}

/* Frees a handle where its scope ends. */
template <auto free>
struct Free {
    template <class T>
    void operator()(T* handle) const {
        free(handle);
    }
};
using Layout = std::unique_ptr<instep_layout, Free<instep_layout_free>>;
using Stepper = std::unique_ptr<instep_stepper, Free<instep_stepper_free>>;

/* Where the ranks meet. */
class Meeting {
   public:
    explicit Meeting(unsigned ranks) : calls(ranks) {}

    /* Every rank brings its call; the last one to come computes. */
    void meet(unsigned rank, const instep_call& call) {
        std::unique_lock<std::mutex> lock(mutex);
        calls[rank] = &call;
        if (++arrived == calls.size()) {
            arrived = 0;
            ++round;
            compute();
            all.notify_all();
            return;
        }
        auto mine = round;
        auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(call.deadline_ms);
        if (!all.wait_until(lock, until, [&] { return round != mine || is_aborted; }))
            throw std::runtime_error("deadline");
        if (is_aborted) throw std::runtime_error("aborted");
    }

    void abort() {
        std::lock_guard<std::mutex> lock(mutex);
        is_aborted = true;
        all.notify_all();
    }

   private:
    void compute() {
        for (auto* call : calls)
            if (std::memcmp(call->key, calls[0]->key, sizeof call->key) != 0)
                throw std::runtime_error("ranks are out of step");
        auto count = calls[0]->bytes / sizeof(float);
        std::vector<float> result(count);
        for (auto* call : calls) {
            auto* from = static_cast<const float*>(call->src);
            for (std::size_t k = 0; k < count; ++k)
                result[k] += from[k];                  /* in the order of ranks, so all have the same bits */
            if (call->kind == INSTEP_BROADCAST) break; /* rank 0's alone */
        }
        for (auto* call : calls) std::memcpy(call->dst, result.data(), call->bytes);
    }

    std::mutex mutex;
    std::condition_variable all;
    std::vector<const instep_call*> calls;
    std::size_t arrived = 0, round = 0;
    bool is_aborted = false;
};

struct Rank {
    Meeting* meeting;
    unsigned rank;
};

instep_status sum(void* data, const instep_call* call) {
    auto* self = static_cast<Rank*>(data);
    self->meeting->meet(self->rank, *call);
    return INSTEP_OK;
}

void end(void* data, const char*) { static_cast<Rank*>(data)->meeting->abort(); }

float train(Rank self, unsigned ranks) {
    instep_layout* made;
    must(instep_layout_create(&made));
    Layout layout(made);
    instep_param weight{};
    weight.size = sizeof weight;
    weight.name = "weight";
    must(instep_layout_add(layout.get(), &weight, nullptr));

    instep_collective collective{};
    collective.size = sizeof collective;
    collective.data = &self;
    collective.enqueue = instep::caught<sum>;
    collective.abort = end;

    instep_hyper lr{"lr", 1};
    instep_optimizer sgd{sizeof sgd, "sgd", &lr, 1};
    instep_stepper_options options{};
    options.size = sizeof options;
    options.layout = layout.get();
    options.optimizer = &sgd;
    options.rank = self.rank;
    options.world_size = ranks;
    options.collective = &collective;
    options.threads = 1;
    instep_stepper* created;
    must(instep_stepper_create(&options, &created));
    Stepper stepper(created);
    for (int step = 0; step < 10; ++step) {
        must(instep_stepper_begin(stepper.get(), 1));
        float grad = static_cast<float>(self.rank);
        must(instep_stepper_write(stepper.get(), {INSTEP_GRAD, 0, nullptr}, &grad, 1));
        must(instep_stepper_grad_ready(stepper.get(), 0));
        must(instep_stepper_finish(stepper.get()));
    }
    float result;
    must(instep_stepper_read(stepper.get(), {INSTEP_PARAM, 0, nullptr}, &result, 1));
    must(instep_stepper_free(stepper.release()));
    return result;
}

}  // namespace

int main() {
    const unsigned ranks = 4;
    Meeting meeting(ranks);
    std::vector<float> results(ranks);
    std::vector<std::thread> threads;
    for (unsigned rank = 0; rank < ranks; ++rank) {
        threads.emplace_back([&, rank] {
            try {
                results[rank] = train({&meeting, rank}, ranks);
            } catch (const std::exception& error) {
                std::fprintf(stderr, "rank %u: %s\n", rank, error.what());
            }
        });
    }
    for (auto& thread : threads) thread.join();
    std::printf("ten steps by the mean of 0, 1, 2 and 3: %g\n", static_cast<double>(results[0]));
    for (float result : results)
        if (result != -15) return 1;
    return 0;
}
