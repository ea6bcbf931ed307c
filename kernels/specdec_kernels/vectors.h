// Vectors of floats and the few functions of them that the C++ forms need.
//
// Every lane of every function depends on that lane alone, so results do not depend on the width,
// which is that of the machine's registers.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
constexpr int LANES = 16;
constexpr bool MANY_REGISTERS = true;
#elif defined(__AVX__)
#include <immintrin.h>
constexpr int LANES = 8;
constexpr bool MANY_REGISTERS = false;
#else
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif
constexpr int LANES = 4;
constexpr bool MANY_REGISTERS = true;
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4)));
typedef uint16_t halves __attribute__((vector_size(LANES * 2)));
typedef uint8_t quarters __attribute__((vector_size(LANES)));
typedef int8_t bytes __attribute__((vector_size(LANES)));

#define INLINE static inline __attribute__((always_inline))

INLINE vec splat(float x) { return x - vec{}; }
INLINE vec load(const float* p) { vec v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float* p, vec v) { memcpy(p, &v, sizeof v); }

// The same operation in every loop that is compiled, or bits would depend on the compiler's mood.
INLINE vec fma(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE vec larger(vec a, vec b) { return a > b ? a : b; }

// e^x for x <= 0, about 1 ulp; 0 below -87, NaN for NaN. Cephes' expf.
INLINE vec exp_negative(vec x) {
    const vec low = splat(-87.0f);
    const ivec vanishes = x < low;
    vec clamped = vanishes ? low : x;
    const vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vec shifted = fma(clamped, splat(1.44269504088896341f), magic);
    const vec n = shifted - magic;
    vec r = fma(n, splat(-0.693359375f), clamped);
    r = fma(n, splat(2.12194440e-4f), r);
    vec p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + splat(1.0f);
    const ivec exponent = __builtin_convertvector(n, ivec) + 127;
    const vec power = (vec)(exponent << 23);
    return vanishes ? vec{} : p * power;
}

INLINE vec tanh_of(vec x) {
    const vec magnitude = x < 0.0f ? -x : x;
    const vec t = exp_negative(magnitude * splat(-2.0f));
    const vec y = (splat(1.0f) - t) / (splat(1.0f) + t);
    return x < 0.0f ? -y : y;
}

// Element types of caches and queries, as fp32; every conversion is exact.
struct Fp32 {
    typedef float type;
    INLINE vec read(const float* p) { return load(p); }
};

struct Bf16 {
    typedef uint16_t type;
    INLINE vec read(const uint16_t* p) {
        halves h;
        memcpy(&h, p, sizeof h);
        return (vec)(__builtin_convertvector(h, uvec) << 16);
    }
};

struct Fp16 {
    typedef uint16_t type;
    INLINE vec read(const uint16_t* p) {
        halves h;
        memcpy(&h, p, sizeof h);
        const uvec bits = __builtin_convertvector(h, uvec);
        const uvec magnitude = bits & 0x7fffu;
        const vec scaled = (vec)(magnitude << 13) * splat(0x1p112f);
        const uvec special = (magnitude << 13) | 0x7f800000u;
        const uvec value = magnitude >= 0x7c00u ? special : (uvec)scaled;
        return (vec)(value | (bits & 0x8000u) << 16);
    }
};

struct Int8 {
    typedef int8_t type;
    INLINE vec read(const int8_t* p) {
        bytes b;
        memcpy(&b, p, sizeof b);
        return __builtin_convertvector(__builtin_convertvector(b, ivec), vec);
    }
};

struct Fp8 {  // e4m3fn
    typedef uint8_t type;
    INLINE vec read(const uint8_t* p) {
        quarters q;
        memcpy(&q, p, sizeof q);
        const uvec bits = __builtin_convertvector(q, uvec);
        const uvec magnitude = bits & 0x7fu;
        const vec scaled = (vec)(magnitude << 20) * splat(0x1p120f);
        const uvec value = magnitude == 0x7fu ? uvec{} + 0x7fc00000u : (uvec)scaled;
        return (vec)(value | (bits & 0x80u) << 24);
    }
};

INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

INLINE uint16_t to_fp16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 16 & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00);  // rounds to 2^16 or above
    if (magnitude < 0x38800000u) {  // below 2^-14: a multiple of 2^-24, rounded by an addition
        float y;
        memcpy(&y, &magnitude, 4);
        y += 0.5f;
        uint32_t rounded;
        memcpy(&rounded, &y, 4);
        return (uint16_t)(sign | (rounded - 0x3f000000u));
    }
    return (uint16_t)(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13);
}
