// Vectors as wide as the instruction-set level that this file is compiled for, and the few things done with them.
//
// Sums are written as explicit fused multiply-adds and compiled with -ffp-contract=off, so that a row is rounded
// the same in every tile it can be part of.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

// W floats to a vector. A tile of a product is at most ROWS x SPAN vectors: accumulators, one row of weights and one
// broadcast value fit into the registers, of which AVX-512 and NEON have 32 and the others 16.
#if defined(__AVX512F__)
constexpr int W = 16, ROWS = 8, SPAN = 3;
#elif defined(__AVX2__)
constexpr int W = 8, ROWS = 4, SPAN = 3;
#elif defined(__aarch64__)
constexpr int W = 4, ROWS = 8, SPAN = 3;
#else
constexpr int W = 4, ROWS = 6, SPAN = 2;
#endif

#if defined(__AVX512BF16__)
constexpr bool DOT = true;  // bfloat16 is multiplied in pairs, by vdpbf16ps
#else
constexpr bool DOT = false;
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool HALVED = true;  // pairs of bfloat16 are widened one half at a time: no shuffles
#else
constexpr bool HALVED = false;
#endif

struct bf16 {
    uint16_t bits;
};
// An int8 weight whose partner is an activation in bfloat16; int8_t is one whose partner is in float.
struct int8_of_bf16 {
    int8_t value;
};
// As many int4 weights of one column, and what makes numbers of them. Their partners are in float.
constexpr int GROUP = 32;
struct int4 {
    char bytes[GROUP / 2 + 2 * sizeof(bf16)];
};

typedef float Floats __attribute__((vector_size(4 * W)));
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef uint32_t Words __attribute__((vector_size(4 * W)));
typedef uint16_t Halves __attribute__((vector_size(2 * W)));
typedef int8_t Bytes __attribute__((vector_size(W)));

// What activations are kept as, to be multiplied with T.
template <class T> constexpr bool PAIRED = DOT && (std::is_same_v<T, bf16> || std::is_same_v<T, int8_of_bf16>);
template <class T> constexpr bool GROUPED = std::is_same_v<T, int4>;
template <class T> constexpr bool WHOLE = HALVED && std::is_same_v<T, int8_of_bf16>;  // see int8.h
template <class T> using Act = std::conditional_t<PAIRED<T>, bf16, float>;
// Depths of a product are padded to this, with zero weights.
template <class T>
constexpr int UNIT = GROUPED<T> ? GROUP : PAIRED<T> || WHOLE<T> || (HALVED && std::is_same_v<T, bf16>) ? 2 : 1;
template <class T> constexpr int EACH = GROUPED<T> ? GROUP : 1;  // weights in a T

inline long up(long n, long unit) { return (n + unit - 1) / unit * unit; }

template <class V> inline V read(const void *at) {
    V v;
    memcpy(&v, at, sizeof v);
    return v;
}
template <class V> inline void write(void *at, V v) { memcpy(at, &v, sizeof v); }

inline Floats splat(float x) { return x - Floats{}; }  // 0 + x would be added, for -0's sake
inline Floats load(const float *at) { return read<Floats>(at); }
inline Floats load(const bf16 *at) { return (Floats)(__builtin_convertvector(read<Halves>(at), Words) << 16); }
inline Floats load(const int8_t *at) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at)));
#else
    return __builtin_convertvector(__builtin_convertvector(read<Bytes>(at), Ints), Floats);
#endif
}
inline Floats load(const int8_of_bf16 *at) { return load(&at->value); }
#if defined(__AVX512BF16__)
// W pairs, as vdpbf16ps takes them.
inline __m512bh load_pairs(const bf16 *at) { return (__m512bh)_mm512_loadu_si512(at); }
inline __m512bh load_pairs(const int8_of_bf16 *at) {  // an int8 fits into the upper half of a float
    static const struct UpperHalves {
        alignas(64) uint16_t at[2 * W];
        constexpr UpperHalves() : at() {
            for (int i = 0; i < 2 * W; i++) at[i] = (uint16_t)(2 * i + 1);
        }
    } upper;
    return (__m512bh)_mm512_permutex2var_epi16((__m512i)load(at), _mm512_load_si512(upper.at), (__m512i)load(at + W));
}
#endif
inline float widen(float x) { return x; }
inline float widen(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    return read<float>(&bits);
}

// To the nearest bfloat16, ties to even; NaN stays NaN.
inline Halves narrow(Floats x) {
#if defined(__AVX512BF16__)
    return (Halves)_mm512_cvtneps_pbh((__m512)x);
#else
    Words bits = (Words)x;
    Words nan = (Words)(x != x);
    Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector((rounded & ~nan) | (0x7fc0 & nan), Halves);
#endif
}
inline void store(float *at, Floats x) { write(at, x); }
inline void store(bf16 *at, Floats x) { write(at, narrow(x)); }
inline void put(float *at, float x) { *at = x; }
inline void put(bf16 *at, float x) { at->bits = narrow(splat(x))[0]; }

inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}
// Value `part` of each of W units of weights.
template <class T> inline Floats load_part(const T *at, int) { return load(at); }

#if defined(__AVX2__) && !defined(__AVX512F__)
// In assembler: all 16 registers are taken, and the compiler, left to itself, moves some of them about in every k-step.
#define INLINE inline __attribute__((always_inline))
INLINE Floats load_part(const bf16 *at, int part) {
    alignas(32) static const Words upper = Words{} + 0xffff0000u;
    const __m256i_u &pairs = *(const __m256i_u *)at;
    Floats x;
    if (part)
        asm volatile("vmovdqu %1, %0\n vpand %2, %0, %0" : "=x"(x) : "m"(pairs), "m"(upper));
    else
        asm volatile("vmovdqu %1, %0\n vpslld $16, %0, %0" : "=x"(x) : "m"(pairs));
    return x;
}
INLINE void accumulate(Floats (&to)[3], const float *x, const Floats (&b)[3]) {
    Floats a;
    asm volatile("vbroadcastss %4, %3\n vfmadd231ps %5, %3, %0\n vfmadd231ps %6, %3, %1\n vfmadd231ps %7, %3, %2"
                 : "+x"(to[0]), "+x"(to[1]), "+x"(to[2]), "=&x"(a)
                 : "m"(*x), "x"(b[0]), "x"(b[1]), "x"(b[2]));
}
INLINE void accumulate(Floats (&to)[2], const float *x, const Floats (&b)[2]) {
    Floats a;
    asm volatile("vbroadcastss %3, %2\n vfmadd231ps %4, %2, %0\n vfmadd231ps %5, %2, %1"
                 : "+x"(to[0]), "+x"(to[1]), "=&x"(a)
                 : "m"(*x), "x"(b[0]), "x"(b[1]));
}
#undef INLINE
#else
// to += *x times b
template <int S> inline void accumulate(Floats (&to)[S], const float *x, const Floats (&b)[S]) {
    const Floats a = splat(*x);
    for (int s = 0; s < S; s++) to[s] = fma(a, b[s], to[s]);
}
#endif
inline Floats pick(Ints which, Floats a, Floats b) { return (Floats)(((Ints)a & which) | ((Ints)b & ~which)); }
// A bit for each element that is set, the first one's lowest.
inline unsigned bits(Ints which) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)which);
#elif defined(__AVX2__)
    return (unsigned)_mm256_movemask_ps((__m256)which);
#elif defined(__x86_64__)
    return (unsigned)_mm_movemask_ps((__m128)which);
#else
    unsigned found = 0;
    for (int i = 0; i < W; i++) found |= (unsigned)(which[i] & 1) << i;
    return found;
#endif
}
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return pick(a > b, a, b);
#endif
}
inline float sum(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float total = 0;
    for (int i = 0; i < W; i++) total += x[i];
    return total;
#endif
}
inline float largest(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#elif defined(__AVX2__)
    __m128 half = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
#else
    float best = x[0];
    for (int i = 1; i < W; i++) best = x[i] > best ? x[i] : best;
    return best;
#endif
}
inline Floats counting() {
    Floats x;
    for (int i = 0; i < W; i++) x[i] = (float)i;
    return x;
}

// 2 to the power of x, relative error below 1e-7; 0 far below 0, and very large far above. exp2(0) is exactly 1.
inline Floats exp2(Floats x) {
#if defined(__AVX512F__)
    x = (Floats)_mm512_max_ps(_mm512_set1_ps(-200), (__m512)x);
    const Floats whole = (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT), part = x - whole;
#else
    const Ints above = x > -126.0f;
    x = pick(x < 127.0f, x, splat(127.0f));
    const Floats magic = splat(12582912.0f);  // adding it leaves a whole number in the low bits
    const Floats shifted = x + magic, part = x - (shifted - magic);
#endif
    Floats p = splat(1.535336188319500e-4f);
    p = fma(p, part, splat(1.339887440266574e-3f));
    p = fma(p, part, splat(9.618437357674640e-3f));
    p = fma(p, part, splat(5.550332471162809e-2f));
    p = fma(p, part, splat(2.402264791363012e-1f));
    p = fma(p, part, splat(6.931472028550421e-1f));
    p = fma(p, part, splat(1.0f));
#if defined(__AVX512F__)
    return (Floats)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
    return (Floats)((Ints)((Words)p + ((Words)shifted << 23)) & above);
#endif
}

}  // namespace
