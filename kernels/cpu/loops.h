/* The CPU's loops around a rule. One is plain f32, and compilers vectorise it. The other is written with vectors, and also
 * reads and writes remainders and bf16 states.
 *
 * A loop knows nothing of tiles or its callers. It has no branch on data, because some instruction sets could then not
 * vectorise it. */
#ifndef INSTEP_CPU_LOOPS_H
#define INSTEP_CPU_LOOPS_H

#include "numeric/scaled.h"
#include "cpu/tensors.h"

namespace {

/* Number of elements of one round: a cache line of f32, and whole vectors of every instruction set. */
constexpr uint32_t LANES = 16;

/* Whether a rule's update is a quotient. Its three functions may then run in separate stages of a loop. */
template <class Rule, class = void>
struct HasRounds {
    static constexpr bool value = false;
};

template <class Rule>
struct HasRounds<Rule, decltype(static_cast<void>(Rule::template denominator<float>))> {
    static constexpr bool value = true;
};

template <int K>
struct Number {
    constexpr operator int() const { return K; }
};

/* Calls `f` with each state's number as a compile-time constant. */
template <class Rule, class F>
INSTEP_INLINE void each_state(const F& f) {
    if constexpr (Rule::STATES > 0) f(Number<0>{});
    if constexpr (Rule::STATES > 1) f(Number<1>{});
    if constexpr (Rule::STATES > 2) f(Number<2>{});
}

/* Returns the sum of the checked values of one element after its update. If one of them is infinite or NaN, so is the
 * sum. A sum of finite values may overflow, but this false alarm only costs a second check. A rule that is scaled by
 * norms does not step its parameter here. */
template <class Rule, uint32_t HIDDEN, class F>
INSTEP_INLINE F alarm_of(F param, F sum, const F* state) {
    F alarm = {};
    if constexpr (!IsScaled<Rule>::value) alarm = param;
    if constexpr ((HIDDEN & HIDDEN_GRADIENT) != 0) alarm += sum;
    if constexpr (Rule::STATES > 0 && (HIDDEN & hidden_state(0)) != 0) alarm += state[0];
    if constexpr (Rule::STATES > 1 && (HIDDEN & hidden_state(1)) != 0) alarm += state[1];
    if constexpr (Rule::STATES > 2 && (HIDDEN & hidden_state(2)) != 0) alarm += state[2];
    return alarm;
}

INSTEP_INLINE bool any_lane(const float* alarms) {
#if INSTEP_HAS_VECTORS
    Words any = {};
    for (uint32_t lane = 0; lane < LANES; lane += WIDTH) any |= special(load_floats(alarms + lane));
    return any_sign(any);
#else
    uint32_t any = 0;
    for (uint32_t lane = 0; lane < LANES; ++lane) any |= special(alarms[lane]);
    return any >> 31 != 0;
#endif
}

#if INSTEP_HAS_VECTORS

/* Updates the states. Returns the quotient, or the parameter if the rule has no quotient. */
template <class Rule, class F>
INSTEP_INLINE F first_round(const typename Rule::Scalars& s, uint32_t flags, F p, F g, F* state) {
    if constexpr (HasRounds<Rule>::value) {
        static_assert(Rule::HIDDEN == 0, "the parameter shows all that is infinite or NaN");
        const F numerator = Rule::numerator(s, flags, p, g, state);
        return numerator / Rule::denominator(s, flags, state);
    } else {
        return Rule::update(s, flags, p, g, state);
    }
}

INSTEP_INLINE Floats load_state(const float* x) { return load_floats(x); }
INSTEP_INLINE Floats load_state(const uint16_t* x) { return float_of(load_upper_halves(x)); }

template <bool>
INSTEP_INLINE void store_state(float* to, Floats x, const RandomPosition&, Words, uint32_t) { store_floats(to, x); }

/* Rounds a state to bf16. `mixed` is used only if rounding is stochastic. */
template <bool STOCHASTIC>
INSTEP_INLINE void store_state(uint16_t* to, Floats x, const RandomPosition& at, Words mixed, uint32_t stream) {
    const Words bits = bits_of(x);
    const Words nan = reinterpret_cast<Words>(x != x); /* a carry could turn a NaN into a zero */
    const Words up = STOCHASTIC ? at.word(mixed, stream) >> 16 : (bits >> 16 & 1u) + 0x7fffu;
    store_upper_halves(to, (bits + up) | nan);
}

/* Steps whole vectors, and returns whether there is an alarm. Root and division take long, so the loop updates the next
 * states before it steps a parameter. Compilers do not change this order themselves. */
template <class Rule, bool STOCHASTIC, class Tensors, class State>
INSTEP_INLINE bool step_vectors(const typename Rule::Scalars& s, uint32_t flags, float factor, const RandomPosition& at,
                                uint64_t ahead_bytes, uint64_t count, const Tensors& tensors, State* const* states) {
    constexpr bool ROUNDS = HasRounds<Rule>::value;
    State* to[INSTEP_MAX_STATES] = {states[0], states[1], states[2]};
    Floats alarm = {};
    Words numbers = lane_numbers() + at.low; /* lower words of the elements' numbers */
    const auto begin = [&](uint64_t i) __attribute__((always_inline)) {
        if (ahead_bytes) {
            tensors.fetch(i, ahead_bytes);
            each_state<Rule>([&](auto k) __attribute__((always_inline)) { prefetch(to[k] + i, ahead_bytes); });
        }
        const Floats sum = tensors.grad(i);
        Floats state[INSTEP_MAX_STATES] = {};
        each_state<Rule>([&](auto k) __attribute__((always_inline)) { state[k] = load_state(to[k] + i); });
        const Floats x = first_round<Rule>(s, flags, tensors.param(i), sum * factor, state);
        if constexpr (!ROUNDS) alarm += alarm_of<Rule, Rule::HIDDEN>(x, sum, state);
        const Words mixed = STOCHASTIC ? at.mixed(numbers) : Words{};
        numbers += WIDTH;
        each_state<Rule>([&](auto k) __attribute__((always_inline)) {
            store_state<STOCHASTIC>(to[k] + i, state[k], at, mixed, FIRST_STATE_STREAM + k);
        });
        return x;
    };
    const auto land = [&](uint64_t i, Floats x) __attribute__((always_inline)) {
        if constexpr (ROUNDS) {
            x = Rule::stepped(s, flags, tensors.param(i), x);
            alarm += x;
        }
        tensors.store(i, x);
    };
    Floats older = begin(0);
#pragma GCC unroll 1
    for (uint64_t i = WIDTH; i < count; i += WIDTH) {
        const Floats newer = begin(i);
        land(i - WIDTH, older);
        older = newer;
    }
    land(count - WIDTH, older);
    return any_sign(special(alarm));
}

/* Returns whether step_vectors can step a run of a rule with these scalars. */
template <class Rule>
INSTEP_INLINE bool has_vector_loop(const typename Rule::Scalars& s, uint32_t count) {
    const uint32_t flags = Rule::flags(s);
    return Rule::STATES > 0 && count > 0 && count % WIDTH == 0 && ((flags == Rule::COMMON[0]) | (flags == Rule::COMMON[1]));
}

/* Steps one run of one segment, like step_runs. */
template <class Rule, bool STOCHASTIC, class Tensors, class State>
__attribute__((noinline)) uint32_t step_vector_run(const typename Rule::Scalars& scalars, float multiplier,
                                                   const RandomPosition& position, uint64_t ahead_bytes, uint32_t count,
                                                   const Tensors& lent, State* const* states) {
    const typename Rule::Scalars s = scalars;
    const RandomPosition at = position;
    const Tensors tensors = lent;
    const float factor = Rule::factor(s, multiplier);
    const bool alarmed =
        Rule::flags(s) == Rule::COMMON[0]
            ? step_vectors<Rule, STOCHASTIC>(s, Rule::COMMON[0], factor, at, ahead_bytes, count, tensors, states)
            : step_vectors<Rule, STOCHASTIC>(s, Rule::COMMON[1], factor, at, ahead_bytes, count, tensors, states);
    if (!alarmed) return 0;
    for (int k = 0; k < Rule::STATES; ++k) make_canonical(states[k], count);
    return tensors.settle(count);
}

#endif

/* With WITH_CHANGE, `change` gets the change of a rule that is scaled by norms. */
template <class Rule, uint32_t HIDDEN, bool WITH_CHANGE>
INSTEP_INLINE void step_elements(const typename Rule::Scalars& s, uint32_t flags, float factor, uint32_t count, float* __restrict p,
                                 const float* __restrict g, float* __restrict state0, float* __restrict state1,
                                 float* __restrict state2, float* __restrict change, float* __restrict alarms) {
#pragma GCC unroll 1 /* compilers do not vectorise sixteen copies of a short body */
    for (uint32_t i = 0; i < count; ++i) {
        const float sum = g[i];
        float state[INSTEP_MAX_STATES] = {};
        if constexpr (Rule::STATES > 0) state[0] = state0[i];
        if constexpr (Rule::STATES > 1) state[1] = state1[i];
        if constexpr (Rule::STATES > 2) state[2] = state2[i];
        const float param = Rule::update(s, flags, p[i], sum * factor, state);
        alarms[i] += alarm_of<Rule, HIDDEN>(param, sum, state);
        if constexpr (!IsScaled<Rule>::value) p[i] = param;
        if constexpr (WITH_CHANGE) change[i] = Rule::change(s, flags, param, state);
        if constexpr (Rule::STATES > 0) state0[i] = state[0];
        if constexpr (Rule::STATES > 1) state1[i] = state[1];
        if constexpr (Rule::STATES > 2) state2[i] = state[2];
    }
}

/* Returns the address of element i, or null for a state that the rule does not keep. */
INSTEP_INLINE float* from(float* state, uint64_t i) { return state ? state + i : nullptr; }

/* Returns whether there is an alarm: a value may be infinite or NaN. Alarms are added up by lane, and the lanes
 * are combined once per run. */
template <class Rule, uint32_t HIDDEN, bool WITH_CHANGE>
INSTEP_INLINE bool step_rounds(const typename Rule::Scalars& s, uint32_t flags, float factor, uint64_t ahead_bytes,
                               uint32_t count, float* p, const float* g, float* state0, float* state1, float* state2,
                               float* change) {
    float alarms[LANES] = {};
    uint32_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        if (ahead_bytes) {
            prefetch(p + i, ahead_bytes);
            prefetch(g + i, ahead_bytes);
            if constexpr (Rule::STATES > 0) prefetch(state0 + i, ahead_bytes);
            if constexpr (Rule::STATES > 1) prefetch(state1 + i, ahead_bytes);
            if constexpr (Rule::STATES > 2) prefetch(state2 + i, ahead_bytes);
        }
        step_elements<Rule, HIDDEN, WITH_CHANGE>(s, flags, factor, LANES, p + i, g + i, from(state0, i), from(state1, i),
                                                 from(state2, i), from(change, i), alarms);
    }
    if (i < count) {
        step_elements<Rule, HIDDEN, WITH_CHANGE>(s, flags, factor, count - i, p + i, g + i, from(state0, i), from(state1, i),
                                                 from(state2, i), from(change, i), alarms);
    }
    return any_lane(alarms);
}

/* One run of one segment, in f32. Its streams never overlap, because each is in a separate memory. */
struct Run {
    uint32_t count;
    float* p;
    const float* g;
    float* states[INSTEP_MAX_STATES]; /* null if the rule does not keep the state */
    float* change;                    /* of a rule that is scaled by norms, if the caller wants it */
};

/* After an alarm, makes the NaNs of a run canonical. Returns whether a gradient was infinite or NaN. */
template <class Rule>
__attribute__((noinline, cold)) bool check_run(const Run& run) {
    if (!IsScaled<Rule>::value) make_canonical(run.p, run.count);
    for (int k = 0; k < Rule::STATES; ++k) make_canonical(run.states[k], run.count);
    return any_special(run.g, run.count);
}

/* Steps a run, and returns whether there is an alarm. */
template <class Rule, uint32_t HIDDEN, bool WITH_CHANGE>
INSTEP_INLINE bool step_run(const typename Rule::Scalars& s, uint32_t flags, float factor, uint64_t ahead_bytes, const Run& run) {
    const auto* const x = run.states;
#if INSTEP_HAS_VECTORS
    if constexpr (HasRounds<Rule>::value && HIDDEN == 0) {
        const uint32_t whole = run.count / WIDTH * WIDTH;
        const WholeTensors tensors = {run.p, run.g};
        bool alarmed = whole != 0 && step_vectors<Rule, false>(s, flags, factor, {}, ahead_bytes, whole, tensors, x);
        for (uint32_t i = whole; i < run.count; ++i) {
            float alarm = 0.0f;
            step_elements<Rule, HIDDEN, false>(s, flags, factor, 1, run.p + i, run.g + i, from(x[0], i), from(x[1], i), from(x[2], i),
                                               nullptr, &alarm);
            alarmed |= special(alarm) >> 31 != 0;
            asm volatile("" ::: "memory"); /* no vectors: for so few elements, they only make the object larger */
        }
        return alarmed;
    }
#endif
    return step_rounds<Rule, HIDDEN, WITH_CHANGE>(s, flags, factor, ahead_bytes, run.count, run.p, run.g, x[0], x[1], x[2], run.change);
}

template <class Rule, uint32_t HIDDEN, bool WITH_CHANGE>
INSTEP_INLINE uint32_t step_each(const typename Rule::Scalars& s, uint32_t flags, float factor, uint64_t ahead_bytes,
                                 const Run* runs, uint32_t run_count) {
    uint32_t nonfinite = 0;
    for (const Run* run = runs; run < runs + run_count; ++run) {
        if (step_run<Rule, HIDDEN, WITH_CHANGE>(s, flags, factor, ahead_bytes, *run)) nonfinite |= check_run<Rule>(*run);
    }
    return nonfinite;
}

/* Steps runs that have the same scalars; short runs take less time together. Flags are constants in the loops for the
 * two most common sets of flags. Otherwise each select costs three instructions per vector on SSE2. Special values are
 * rare, so a second loop finds them after an alarm. `noinline` keeps the dispatch's register pressure out of the loop,
 * and the loop inside the IEEE environment. */
template <class Rule, bool WITH_CHANGE = false>
__attribute__((noinline)) uint32_t step_runs(const typename Rule::Scalars& scalars, float multiplier, uint64_t ahead_bytes,
                                             const Run* runs, uint32_t run_count) {
    const typename Rule::Scalars s = scalars;
    const float factor = Rule::factor(s, multiplier);
    const uint32_t flags = Rule::flags(s);
    if (flags == Rule::COMMON[0]) {
        return step_each<Rule, Rule::HIDDEN, WITH_CHANGE>(s, Rule::COMMON[0], factor, ahead_bytes, runs, run_count);
    }
    if (flags == Rule::COMMON[1]) {
        return step_each<Rule, Rule::HIDDEN, WITH_CHANGE>(s, Rule::COMMON[1], factor, ahead_bytes, runs, run_count);
    }
    return step_each<Rule, HIDDEN_EVERYTHING, WITH_CHANGE>(s, flags, factor, ahead_bytes, runs, run_count);
}

}  // namespace

#endif
