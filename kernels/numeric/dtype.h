/* The size of an element of each dtype, and its conversion from and to f32.
 *
 * Each switch lists every dtype and has no default, so the compiler reports a dtype that a switch lacks
 * (-Werror=switch). This file depends on math.h. */
#ifndef INSTEP_NUMERIC_DTYPE_H
#define INSTEP_NUMERIC_DTYPE_H

#include "numeric/math.h"

namespace {

INSTEP_INLINE uint32_t bytes_of(uint32_t dtype) {
    switch (static_cast<InstepDtype>(dtype)) {
        case INSTEP_DTYPE_F32: return 4;
        case INSTEP_DTYPE_BF16:
        case INSTEP_DTYPE_F16: return 2;
    }
    __builtin_unreachable();
}

/* Converts the 16-bit dtypes. f32 needs no conversion, so no caller passes it. */
INSTEP_INLINE float widened(uint16_t x, uint32_t dtype) {
    switch (static_cast<InstepDtype>(dtype)) {
        case INSTEP_DTYPE_BF16: return from_bfloat16(x);
        case INSTEP_DTYPE_F16: return from_half(x);
        case INSTEP_DTYPE_F32: break;
    }
    __builtin_unreachable();
}

INSTEP_INLINE uint16_t narrowed(float x, uint32_t dtype) {
    switch (static_cast<InstepDtype>(dtype)) {
        case INSTEP_DTYPE_BF16: return bfloat16_of(x);
        case INSTEP_DTYPE_F16: return half_of(x);
        case INSTEP_DTYPE_F32: break;
    }
    __builtin_unreachable();
}

}  // namespace

#endif
