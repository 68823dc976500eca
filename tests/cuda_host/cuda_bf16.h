/* cuda_bf16.h - bfloat16 with CUDA's names, for the host implementation of CUDA.
   Conversions round to nearest even. NaN becomes 0x7FFF, as in CUDA. */
#ifndef CUDA_HOST_BF16_H
#define CUDA_HOST_BF16_H
#include "cuda_runtime.h"

struct alignas(2) __nv_bfloat16_raw {
    unsigned short x;
};

struct alignas(4) __nv_bfloat162_raw {
    unsigned short x, y;
};

struct alignas(2) __nv_bfloat16 {
    unsigned short __x;
    __nv_bfloat16() = default;

    __nv_bfloat16(const __nv_bfloat16_raw &r) : __x(r.x) {}

    __nv_bfloat16(float f) : __x(cuda_host_to_bf16(f)) {}

    operator float() const {
        return cuda_host_from_bf16(__x);
    }

    operator __nv_bfloat16_raw() const {
        __nv_bfloat16_raw r;
        r.x = __x;
        return r;
    }
};

struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
    __nv_bfloat162() = default;

    __nv_bfloat162(const __nv_bfloat16 &a, const __nv_bfloat16 &b) : x(a), y(b) {}
};

typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;
static_assert(sizeof(__nv_bfloat16) == 2 && sizeof(__nv_bfloat162) == 4, "as CUDA's");

inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short u) {
    __nv_bfloat16_raw r;
    r.x = u;
    return __nv_bfloat16(r);
}

inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 h) {
    return h.__x;
}

inline __nv_bfloat16 __float2bfloat16(float f) {
    return __nv_bfloat16(f);
}

inline __nv_bfloat16 __float2bfloat16_rn(float f) {
    return __nv_bfloat16(f);
}

inline float __bfloat162float(__nv_bfloat16 h) {
    return (float)h;
}

inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
    return __nv_bfloat162(__nv_bfloat16(a), __nv_bfloat16(b));
}

inline __nv_bfloat162 __float2bfloat162_rn(float a) {
    return __floats2bfloat162_rn(a, a);
}

inline __nv_bfloat162 __float22bfloat162_rn(float2 a) {
    return __floats2bfloat162_rn(a.x, a.y);
}

inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) {
    return __nv_bfloat162(a, b);
}

inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 a) {
    return __nv_bfloat162(a, a);
}

inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) {
    return __nv_bfloat162(a, b);
}

inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 v) {
    return v.x;
}

inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 v) {
    return v.y;
}

inline float __low2float(__nv_bfloat162 v) {
    return (float)v.x;
}

inline float __high2float(__nv_bfloat162 v) {
    return (float)v.y;
}

inline float2 __bfloat1622float2(__nv_bfloat162 v) {
    return make_float2((float)v.x, (float)v.y);
}
#endif
