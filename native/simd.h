// Vectors of W floats in compiler vector extensions, and the three element types a cache may hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace kvs {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
constexpr int kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
constexpr int kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kWidth = 4;
constexpr int kRegisters = 32;
#else
constexpr int kWidth = 4;
constexpr int kRegisters = 16;
#endif

#define KVS_INLINE inline __attribute__((always_inline))

template <int W>
struct Lanes {
    typedef float F __attribute__((vector_size(W * 4)));
    typedef int32_t I __attribute__((vector_size(W * 4)));
    typedef uint32_t U __attribute__((vector_size(W * 4)));
    typedef uint16_t H __attribute__((vector_size(W * 2)));
};
template <int W> using F = typename Lanes<W>::F;
template <int W> using I = typename Lanes<W>::I;
template <int W> using U = typename Lanes<W>::U;
template <int W> using H = typename Lanes<W>::H;

template <int W> KVS_INLINE F<W> load(const float *p) { F<W> x; std::memcpy(&x, p, sizeof x); return x; }
template <int W> KVS_INLINE void store(float *p, F<W> x) { std::memcpy(p, &x, sizeof x); }
template <int W> KVS_INLINE F<W> broadcast(float x) { return x - F<W>{}; }

// Bits of x where the mask lane is all ones, bits of y elsewhere.
template <int W> KVS_INLINE F<W> select(I<W> mask, F<W> x, F<W> y) {
    return (F<W>)(((I<W>)x & mask) | ((I<W>)y & ~mask));
}
// A NaN lane of x is passed over; callers see it again when they use x itself.
template <int W> KVS_INLINE F<W> maximum(F<W> x, F<W> y) { return select<W>(x > y, x, y); }

struct Float32 {
    using Stored = float;
    template <int W> static KVS_INLINE F<W> load(const Stored *p) { return kvs::load<W>(p); }
    static KVS_INLINE Stored narrow(float x) { return x; }
};

struct Bfloat16 {
    using Stored = uint16_t;
    template <int W> static KVS_INLINE F<W> load(const Stored *p) {
        // GCC widens a vector in two halves; the instruction does it in one.
#if defined(__AVX512F__)
        if constexpr (W == 16) return (F<W>)((U<W>)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)) << 16);
#endif
#if defined(__AVX2__)
        if constexpr (W == 8) return (F<W>)((U<W>)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)) << 16);
#endif
        H<W> x;
        std::memcpy(&x, p, sizeof x);
        return (F<W>)(__builtin_convertvector(x, U<W>) << 16);
    }
    // Round to nearest even; a NaN stays a NaN.
    static KVS_INLINE Stored narrow(float x) {
        uint32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        if (x != x) return uint16_t((bits >> 16) | 0x40);
        return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
};

struct Float16 {
    using Stored = uint16_t;
    template <int W> static KVS_INLINE F<W> load(const Stored *p) {
#if defined(__AVX512F__)
        if constexpr (W == 16) return (F<W>)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#endif
#if defined(__F16C__)
        if constexpr (W == 8) return (F<W>)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#endif
        // Exponent and mantissa moved into place are the value times 2^-112, subnormals included.
        H<W> x;
        std::memcpy(&x, p, sizeof x);
        U<W> bits = __builtin_convertvector(x, U<W>);
        U<W> sign = (bits & 0x8000u) << 16;
        U<W> magnitude = bits & 0x7fffu;
        F<W> value = (F<W>)(magnitude << 13) * 0x1p112f;
        U<W> special = (U<W>)(magnitude >= 0x7c00u) & 0x7f800000u;
        return (F<W>)((U<W>)value | special | sign);
    }
    static KVS_INLINE Stored narrow(float x) {
        uint32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        uint16_t sign = uint16_t((bits >> 16) & 0x8000);
        bits &= 0x7fffffff;
        if (bits > 0x7f800000) return uint16_t(sign | 0x7e00 | ((bits >> 13) & 0x1ff));
        if (bits >= 0x477ff000) return uint16_t(sign | 0x7c00);
        if (bits < 0x38800000) {
            // Adding 0.5 lines the last mantissa bit up with 2^-24, so the adder rounds as fp16 subnormals do.
            float magnitude;
            std::memcpy(&magnitude, &bits, sizeof bits);
            magnitude += 0.5f;
            std::memcpy(&bits, &magnitude, sizeof bits);
            return uint16_t(sign | (bits - 0x3f000000));
        }
        return uint16_t(sign | ((bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13));
    }
};

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define KVS_SHUFFLE 1
#endif
#endif

#if defined(KVS_SHUFFLE)
// Lane i of the result: in each run of four lanes, two of a and two of b.
template <int W, int A0, int A1, int A2, int A3, size_t... L>
KVS_INLINE F<W> shuffle4(F<W> a, F<W> b, std::index_sequence<L...>) {
    constexpr int pick[4] = {A0, A1, A2, A3};
    return __builtin_shufflevector(
        a, b, (int(L) / 4 * 4 + (pick[L % 4] < 4 ? pick[L % 4] : pick[L % 4] - 4 + W))...);
}
template <int W, size_t... L> KVS_INLINE F<W / 2> low(F<W> x, std::index_sequence<L...>) {
    return __builtin_shufflevector(x, x, int(L)...);
}
template <int W, size_t... L> KVS_INLINE F<W / 2> high(F<W> x, std::index_sequence<L...>) {
    return __builtin_shufflevector(x, x, int(W / 2 + L)...);
}
template <int W> KVS_INLINE F<4> fold(F<W> x) {
    if constexpr (W == 4) return x;
    else {
        using Half = std::make_index_sequence<W / 2>;
        return fold<W / 2>(low<W>(x, Half{}) + high<W>(x, Half{}));
    }
}
// The four lane sums of a, b, c and d.
template <int W> KVS_INLINE F<4> sum4(F<W> a, F<W> b, F<W> c, F<W> d) {
    using All = std::make_index_sequence<W>;
    F<W> ab = shuffle4<W, 0, 4, 1, 5>(a, b, All{}) + shuffle4<W, 2, 6, 3, 7>(a, b, All{});
    F<W> cd = shuffle4<W, 0, 4, 1, 5>(c, d, All{}) + shuffle4<W, 2, 6, 3, 7>(c, d, All{});
    return fold<W>(shuffle4<W, 0, 1, 4, 5>(ab, cd, All{}) + shuffle4<W, 2, 3, 6, 7>(ab, cd, All{}));
}
#else
template <int W> KVS_INLINE F<4> sum4(F<W> a, F<W> b, F<W> c, F<W> d) {
    F<4> sum = {};
    for (int i = 0; i < W; i++) sum += F<4>{a[i], b[i], c[i], d[i]};
    return sum;
}
#endif

template <int W> KVS_INLINE float sum(F<W> x) { return sum4<W>(x, x, x, x)[0]; }

template <int W> KVS_INLINE float largest(F<W> x) {
    float top = x[0];
    for (int i = 1; i < W; i++) top = x[i] > top ? x[i] : top;
    return top;
}

// Half as many elements as a vector holds, the upper lanes zero: the last 8 columns of a row in 16-lane code.
template <class E, int W> KVS_INLINE F<W> load_half(const typename E::Stored *p) {
    F<W / 2> half = E::template load<W / 2>(p);
    F<W> x = {};
    std::memcpy(&x, &half, sizeof half);
    return x;
}

// e^x for x <= 0, within about one unit in the last place; zero below -87, where the result would be subnormal.
// x = n ln 2 + r with |r| <= ln(2)/2; e^r by its Taylor series to r^7, whose remainder is under 2^-27.
template <int W> KVS_INLINE F<W> exp_nonpositive(F<W> x) {
    constexpr float kLowest = -87.0f;
    constexpr float kLog2E = 1.44269504088896341f;
    constexpr float kLn2High = 0x1.62e4p-1f;         // 15 bits: n * kLn2High is exact
    constexpr float kLn2Low = 0x1.7f7d1cf79abcap-20;  // ln 2 - kLn2High
    constexpr float kRound = 0x1.8p23f;               // adding it leaves the nearest integer in the low bits
    I<W> vanishes = x < kLowest;
    x = select<W>(vanishes, broadcast<W>(kLowest), x);
    F<W> shifted = x * kLog2E + kRound;
    F<W> n = shifted - kRound;
    F<W> r = x - n * kLn2High - n * kLn2Low;
    F<W> p = r * float(1.0 / 5040) + float(1.0 / 720);
    p = p * r + float(1.0 / 120);
    p = p * r + float(1.0 / 24);
    p = p * r + float(1.0 / 6);
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    F<W> power = (F<W>)(((U<W>)shifted + 127u) << 23);
    return (F<W>)((I<W>)(p * power) & ~vanishes);
}

KVS_INLINE float exp_nonpositive(float x) { return exp_nonpositive<4>(broadcast<4>(x))[0]; }

}  // namespace kvs
