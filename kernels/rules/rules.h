/* Includes every rule that optimizers.def lists, and asserts the properties that all of them share.
 *
 * A new rule needs only a row in optimizers.def, and no change of this file. */
#ifndef INSTEP_RULES_RULES_H
#define INSTEP_RULES_RULES_H

#include <stddef.h>

#include "numeric/scaled.h"

#define INSTEP_RULE_HEADERS
#include "optimizers.def"
#undef INSTEP_RULE_HEADERS

namespace {

#define OPTIMIZER(name, Rule, min_states, max_states)                                                               \
    static_assert(sizeof(Rule##Scalars) <= sizeof(InstepScalars) && alignof(Rule##Scalars) <= alignof(InstepScalars), \
                  "the scalars of " #Rule " must fit into a record");                                                \
    static_assert(__is_trivially_copyable(Rule##Scalars), "a record is copied by its bytes");                        \
    static_assert(sizeof(Instep##Rule##Hyper) <= sizeof(double[8]), "more words would move the other rules'");       \
    static_assert(offsetof(Instep##Rule##Hyper, lr) == 0, "what the multiplier multiplies");                         \
    static_assert(max_states <= INSTEP_MAX_STATES, "as many as the arguments of a step name");
#include "optimizers.def"
#undef OPTIMIZER

}  // namespace

#endif
