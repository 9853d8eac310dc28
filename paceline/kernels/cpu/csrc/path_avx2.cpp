// AVX2: two registers are one vector word.
#include "packed.h"
#include <bit>
#include <cmath>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#include <cstring>
namespace paceline {
#define PACELINE_PATH "avx2"
#define PACELINE_ROWS 4
#define PACELINE_RUNS 1
namespace {
struct I8 { __m256i a, b; };
struct I32 { __m256i a, b; };
struct F { __m256 a, b; };
inline F zero_f() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline I32 zero_i() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline F all_f(float x) { const __m256 v = _mm256_set1_ps(x); return {v, v}; }
inline F add_f(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F mul_f(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F fma_f(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F neg_f(F x) { const __m256 z = _mm256_set1_ps(-0.0f); return {_mm256_sub_ps(z, x.a), _mm256_sub_ps(z, x.b)}; }
inline F div_f(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F max_f(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }  // x > y ? x : y
inline __m256 clamp_half(__m256 x, float low, float high) {  // NaN stays NaN: the second operand is the one kept
    return _mm256_min_ps(_mm256_set1_ps(high), _mm256_max_ps(_mm256_set1_ps(low), x));
}
inline F clamp_f(F x, float low, float high) { return {clamp_half(x.a, low, high), clamp_half(x.b, low, high)}; }
inline __m256 power_half(__m256 k) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(k), _mm256_set1_epi32(127)), 23)); }
inline F power_of_two(F k) { return {power_half(k.a), power_half(k.b)}; }
inline F to_f(I32 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline F load_f(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store_f(float* p, F x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
inline void in_register(F&) {}
inline __m128i load_16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline F halves_f(const uint8_t* p) { return {_mm256_cvtph_ps(load_16(p)), _mm256_cvtph_ps(load_16(p + 16))}; }
inline __m256 bf16_half(const uint8_t* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16(p)), 16)); }
inline F bf16_f(const uint8_t* p) { return {bf16_half(p), bf16_half(p + 16)}; }
inline __m128i load_low(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
inline F bytes_f(const uint8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_low(p))), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_low(p + 8)))};
}
inline I32 signed_i(const uint8_t* p) { return {_mm256_cvtepi8_epi32(load_low(p)), _mm256_cvtepi8_epi32(load_low(p + 8))}; }
inline __m256i load_32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline I8 load_8(const uint8_t* p) { return {load_32(p), load_32(p + 32)}; }
inline I8 low_nibble(I8 v) { const __m256i m = _mm256_set1_epi8(15); return {_mm256_and_si256(v.a, m), _mm256_and_si256(v.b, m)}; }
inline I8 high_nibble(I8 v) { return low_nibble({_mm256_srli_epi16(v.a, 4), _mm256_srli_epi16(v.b, 4)}); }
inline I8 or_8(I8 x, I8 y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
template <int LEFT> inline __m256i moved(__m256i v) {
    return LEFT >= 0 ? _mm256_slli_epi16(v, LEFT >= 0 ? LEFT : 0) : _mm256_srli_epi16(v, LEFT >= 0 ? 0 : -LEFT);
}
template <int LEFT> inline I8 masked(I8 v, char mask) {
    const __m256i m = _mm256_set1_epi8(mask);
    return {_mm256_and_si256(moved<LEFT>(v.a), m), _mm256_and_si256(moved<LEFT>(v.b), m)};
}
template <int G> inline I8 bit_to_16(I8 v) { return masked<4 - G>(v, 16); }
template <int G> inline I8 pair_to_16(I8 v) { return masked<4 - 2 * G>(v, 48); }
inline __m256i four_of(const int8_t* a) { int32_t four; memcpy(&four, a, 4); return _mm256_set1_epi32(four); }
inline __m256i dot_half(__m256i acc, __m256i w, __m256i a) {  // values of w below 64: no saturation
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, a), _mm256_set1_epi16(1)));
}
inline I32 dot4(I32 acc, I8 w, const int8_t* a) { const __m256i v = four_of(a); return {dot_half(acc.a, w.a, v), dot_half(acc.b, w.b, v)}; }
inline __m256i dot_signed(__m256i acc, __m256i w, __m256i a) {  // |w| x (a with w's sign): at most 128 * 127 * 2
    const __m256i s = _mm256_xor_si256(w, _mm256_set1_epi8(char(0x80)));
    return dot_half(acc, _mm256_abs_epi8(s), _mm256_sign_epi8(a, s));
}
inline I32 dot4_biased(I32 acc, I8 w, const int8_t* a) { const __m256i v = four_of(a); return {dot_signed(acc.a, w.a, v), dot_signed(acc.b, w.b, v)}; }
inline I32 unbias(I32 sum, int32_t) { return sum; }
inline I32 add_i(I32 x, I32 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I32 sub_i(I32 x, int32_t y) { const __m256i v = _mm256_set1_epi32(y); return {_mm256_sub_epi32(x.a, v), _mm256_sub_epi32(x.b, v)}; }
inline I32 mul_i(I32 x, I32 y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
}  // namespace
#include "tiles.inl"
#include "rows.inl"
const Path* avx2_path() { return &path; }
}  // namespace paceline
#else
namespace paceline { const Path* avx2_path() { return nullptr; } }
#endif
