// The vector words of AVX-512 with VNNI (see tiles.inl): one register is one word.
#pragma once
#include "packed.h"
#include <bit>
#include <cstring>
#include <immintrin.h>

namespace paceline {
namespace {
using I8 = __m512i; using I32 = __m512i; using F = __m512;
inline F zero_f() { return _mm512_setzero_ps(); }
inline I32 zero_i() { return _mm512_setzero_si512(); }
inline F all_f(float x) { return _mm512_set1_ps(x); }
inline F add_f(F a, F b) { return _mm512_add_ps(a, b); }
inline F mul_f(F a, F b) { return _mm512_mul_ps(a, b); }
inline F fma_f(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F neg_f(F a) { return _mm512_sub_ps(_mm512_set1_ps(-0.0f), a); }
inline F div_f(F a, F b) { return _mm512_div_ps(a, b); }
inline F max_f(F a, F b) { return _mm512_max_ps(a, b); }  // a > b ? a : b
inline F clamp_f(F a, float low, float high) {  // NaN stays NaN: the second operand is the one kept
    return _mm512_min_ps(_mm512_set1_ps(high), _mm512_max_ps(_mm512_set1_ps(low), a));
}
inline F power_of_two(F k) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(k), _mm512_set1_epi32(127)), 23)); }
inline F to_f(I32 a) { return _mm512_cvtepi32_ps(a); }
inline F load_f(const float* p) { return _mm512_loadu_ps(p); }
inline void store_f(float* p, F a) { _mm512_storeu_ps(p, a); }
inline void in_register(F& a) { asm("" : "+v"(a)); }  // or the compiler loads it again for every use
inline F halves_f(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline F bf16_f(const uint8_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
inline F bytes_f(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))); }
inline I32 signed_i(const uint8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline I8 load_8(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline I8 low_nibble(I8 v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline I8 high_nibble(I8 v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
inline I8 or_8(I8 a, I8 b) { return _mm512_or_si512(a, b); }
template <int G> inline I8 bit_to_16(I8 v) {
    const I8 moved = G < 4 ? _mm512_slli_epi16(v, G < 4 ? 4 - G : 0) : _mm512_srli_epi16(v, G < 4 ? 0 : G - 4);
    return _mm512_and_si512(moved, _mm512_set1_epi8(16));
}
template <int G> inline I8 pair_to_16(I8 v) {
    const I8 moved = G < 2 ? _mm512_slli_epi16(v, G < 2 ? 4 - 2 * G : 0) : _mm512_srli_epi16(v, G < 2 ? 0 : 2 * G - 4);
    return _mm512_and_si512(moved, _mm512_set1_epi8(48));
}
inline I32 dot4(I32 acc, I8 w, const int8_t* a) {
    int32_t four;
    memcpy(&four, a, 4);
    return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(four));
}
inline I32 dot4_biased(I32 acc, I8 w, const int8_t* a) { return dot4(acc, w, a); }
inline I32 unbias(I32 sum, int32_t quants) { return _mm512_sub_epi32(sum, _mm512_set1_epi32(128 * quants)); }
inline I32 add_i(I32 a, I32 b) { return _mm512_add_epi32(a, b); }
inline I32 sub_i(I32 a, int32_t b) { return _mm512_sub_epi32(a, _mm512_set1_epi32(b)); }
inline I32 mul_i(I32 a, I32 b) { return _mm512_mullo_epi32(a, b); }
#define PACELINE_OWN_QUANTISE
inline float largest_of(const float* x) {
    const __m512i low = _mm512_castps_si512(_mm512_abs_ps(load_f(x))), high = _mm512_castps_si512(_mm512_abs_ps(load_f(x + 16)));
    return std::bit_cast<float>(_mm512_reduce_max_epi32(_mm512_max_epi32(low, high)));  // by bits: a NaN is the largest
}
inline int32_t round_16(const float* x, float inverse, int8_t* quants) {
    const __m512i q = _mm512_cvtps_epi32(mul_f(load_f(x), all_f(inverse)));  // to nearest, ties to even
    _mm_storeu_si128(reinterpret_cast<__m128i*>(quants), _mm512_cvtepi32_epi8(q));
    return _mm512_reduce_add_epi32(q);
}
}  // namespace
}  // namespace paceline
