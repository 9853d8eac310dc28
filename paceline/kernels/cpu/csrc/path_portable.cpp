// Any processor: plain loops over sixteen lanes.
#include "packed.h"
#include <bit>
#include <cmath>
#include <cstring>

namespace paceline {
#define PACELINE_PATH "portable"
#define PACELINE_ROWS 4
#define PACELINE_RUNS 1
namespace {
struct I8 { uint8_t v[64]; };
struct I32 { int32_t v[LANES]; };
struct F { float v[LANES]; };
#define EACH for (int i = 0; i < LANES; ++i)
inline F zero_f() { F x; EACH x.v[i] = 0; return x; }
inline I32 zero_i() { I32 x; EACH x.v[i] = 0; return x; }
inline F all_f(float y) { F x; EACH x.v[i] = y; return x; }
inline F add_f(const F& a, const F& b) { F x; EACH x.v[i] = a.v[i] + b.v[i]; return x; }
inline F mul_f(const F& a, const F& b) { F x; EACH x.v[i] = a.v[i] * b.v[i]; return x; }
inline F fma_f(const F& a, const F& b, const F& c) { F x; EACH x.v[i] = std::fma(a.v[i], b.v[i], c.v[i]); return x; }
inline F neg_f(const F& a) { F x; EACH x.v[i] = -0.0f - a.v[i]; return x; }
inline F div_f(const F& a, const F& b) { F x; EACH x.v[i] = a.v[i] / b.v[i]; return x; }
inline F max_f(const F& a, const F& b) { F x; EACH x.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return x; }
inline F clamp_f(const F& a, float low, float high) { F x; EACH { const float y = a.v[i] < low ? low : a.v[i]; x.v[i] = y > high ? high : y; } return x; }
inline F power_of_two(const F& k) {
    F x;
    EACH { const int32_t whole = k.v[i] == k.v[i] ? int32_t(k.v[i]) : INT32_MIN; x.v[i] = std::bit_cast<float>((uint32_t(whole) + 127u) << 23); }
    return x;
}
inline F to_f(const I32& a) { F x; EACH x.v[i] = float(a.v[i]); return x; }
inline F load_f(const float* p) { F x; memcpy(x.v, p, sizeof x.v); return x; }
inline void store_f(float* p, const F& a) { memcpy(p, a.v, sizeof a.v); }
inline void in_register(F&) {}
inline uint16_t u16(const uint8_t* p) { uint16_t x; memcpy(&x, p, 2); return x; }
inline F halves_f(const uint8_t* p) { F x; EACH x.v[i] = half_to_float(u16(p + 2 * i)); return x; }
inline F bf16_f(const uint8_t* p) { F x; EACH { uint32_t w = uint32_t(u16(p + 2 * i)) << 16; memcpy(&x.v[i], &w, 4); } return x; }
inline F bytes_f(const uint8_t* p) { F x; EACH x.v[i] = float(p[i]); return x; }
inline I32 signed_i(const uint8_t* p) { I32 x; EACH x.v[i] = int8_t(p[i]); return x; }
inline I8 load_8(const uint8_t* p) { I8 x; memcpy(x.v, p, 64); return x; }
inline I8 low_nibble(const I8& a) { I8 x; for (int i = 0; i < 64; ++i) x.v[i] = a.v[i] & 15; return x; }
inline I8 high_nibble(const I8& a) { I8 x; for (int i = 0; i < 64; ++i) x.v[i] = a.v[i] >> 4; return x; }
inline I8 or_8(const I8& a, const I8& b) { I8 x; for (int i = 0; i < 64; ++i) x.v[i] = a.v[i] | b.v[i]; return x; }
template <int G> inline I8 bit_to_16(const I8& a) { I8 x; for (int i = 0; i < 64; ++i) x.v[i] = ((a.v[i] >> G) & 1) << 4; return x; }
template <int G> inline I8 pair_to_16(const I8& a) { I8 x; for (int i = 0; i < 64; ++i) x.v[i] = ((a.v[i] >> (2 * G)) & 3) << 4; return x; }
inline I32 dot4(I32 acc, const I8& w, const int8_t* a) {
    EACH acc.v[i] += w.v[4 * i] * a[0] + w.v[4 * i + 1] * a[1] + w.v[4 * i + 2] * a[2] + w.v[4 * i + 3] * a[3];
    return acc;
}
inline I32 dot4_biased(I32 acc, const I8& w, const int8_t* a) { return dot4(acc, w, a); }
inline I32 unbias(I32 sum, int32_t quants) { EACH sum.v[i] -= 128 * quants; return sum; }
inline I32 add_i(const I32& a, const I32& b) { I32 x; EACH x.v[i] = a.v[i] + b.v[i]; return x; }
inline I32 sub_i(const I32& a, int32_t b) { I32 x; EACH x.v[i] = a.v[i] - b; return x; }
inline I32 mul_i(const I32& a, const I32& b) { I32 x; EACH x.v[i] = a.v[i] * b.v[i]; return x; }
#undef EACH
}  // namespace
#include "tiles.inl"
#include "rows.inl"
const Path* portable_path() { return &path; }
}  // namespace paceline
