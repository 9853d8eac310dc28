// Packed weights: how sixteen rows of a matrix lie together, and what every dispatch path computes from them.
//
// A weight is cut into tiles of 16 output rows. Inside a tile the columns come in blocks of 32, and a block holds, for all
// 16 rows together, the scales and then the quants in the order a multiply-add wants them: group g (0..7) is columns
// 4g .. 4g+3, one 64-byte vector of 16 rows x 4 columns. Nibbles of groups g and g+4 share a byte (low, high).
//
//   kind    per super-block (8 blocks)   per block
//   W4      -                            d f16x16, m f16x16, nibbles 256
//   W5      -                            d f16x16, m f16x16, nibbles 256, fifth bits 64 (bit g of a byte: group g)
//   W8      -                            d f16x16, bytes 512 (value + 128)
//   K4, K5  d f16x16, dmin f16x16        scale u8x16, min u8x16, nibbles 256 (, fifth bits 64)
//   K6      d f16x16                     scales s8x16 (columns 0-15), s8x16 (16-31), nibbles 256, two-bit pairs 128
//   F32     -                            32 x 16 floats
//   BF16    -                            32 x 16 halves
//
// A value is d*q + m (W4, W5), d*(q-128) (W8), (d*scale)*q - dmin*min (K4, K5), d*scale*(q-32) (K6).
//
// The result for one row of activations, blocks b in ascending order, nothing fused, float32 throughout:
//   acc = acc + float(integer dot product of the block) * (weight scale * activation scale)
//   acc = acc + weight minimum * activation sum                                     (kinds with a minimum)
// Dot products are exact, so every path, tile shape and thread count gives the same bits.
#pragma once
#include <cstddef>
#include <cstdint>

namespace paceline {

constexpr int LANES = 16;   // output rows in a tile
constexpr int BLOCK = 32;   // columns in a block
constexpr int SUPER = 8;    // blocks in a super-block

enum Kind : int32_t { W4, W5, W8, K4, K5, K6, F32, BF16, KINDS };

inline bool is_super(int kind) { return kind == K4 || kind == K5 || kind == K6; }
inline bool is_dense(int kind) { return kind == F32 || kind == BF16; }

inline size_t super_bytes(int kind) { return kind == K6 ? 32 : is_super(kind) ? 64 : 0; }

inline size_t block_bytes(int kind) {
    switch (kind) {
        case W4: return 64 + 256;
        case W5: return 64 + 256 + 64;
        case W8: return 32 + 512;
        case K4: return 32 + 256;
        case K5: return 32 + 256 + 64;
        case K6: return 32 + 256 + 128;
        case F32: return 2048;
        default: return 1024;
    }
}

inline size_t tile_bytes(int kind, int64_t columns) {
    const int64_t blocks = (columns + BLOCK - 1) / BLOCK;
    return blocks * block_bytes(kind) + (is_super(kind) ? (blocks + SUPER - 1) / SUPER * super_bytes(kind) : 0);
}

// One row of activations, quantised by blocks of 32 to signed bytes.
struct Activation {
    const int8_t* quants;   // [columns]
    const float* scales;    // [blocks]
    const float* sums;      // [blocks] scale * sum of quants
    const int32_t* halves;  // [blocks][2] sums of quants over columns 0-15 and 16-31
    const float* values;    // [columns] as they were, for dense kinds
};

// The sixteen results of one tile for `rows` rows; out[r] receives 16 floats.
using TileFn = void (*)(const uint8_t* tile, int64_t columns, const Activation* rows, int num_rows, float (*out)[LANES]);

enum Act : int64_t { SILU, GELU_NEW, GELU, RELU };

// One row's look at one kv head: the positions it may see, in ascending order.
struct Look {
    const float *query, *keys, *values;  // [group, width], [cache rows, kv heads, width] twice
    const int32_t* lines;                // [count] rows of the cache
    int64_t count, group, kv_heads, kv;
};

// One instruction set's functions. All compute the same bits.
struct Path {
    const char* name;
    TileFn tile[KINDS];
    int max_rows;  // of one call of tile
    void (*quantise)(const float* x, int64_t columns, int8_t* quants, float* scales, float* sums, int32_t* halves);
    void (*rms_norm)(const float* x, const float* w, float eps, int64_t n, float* out);
    void (*layer_norm)(const float* x, const float* w, const float* b, float eps, int64_t n, float* out);
    void (*add)(const float* x, const float* y, int64_t n, float* out);
    void (*activate)(const float* x, int64_t n, int64_t kind, float* out);
    void (*gated)(const float* x, int64_t n, int64_t kind, float* out);  // x [2n]
    void (*rope)(float* row, int64_t heads, int64_t width, const float* cos, const float* sin);
    void (*attend)(const Look& look, int64_t width, float* scores, float* out);
    void (*exponentials)(const float* x, int64_t n, float* out);
    void (*gumbel)(uint32_t first, uint32_t second, int64_t begin, int64_t end, const double* inverse, const double* logarithm, float* out);
};

const Path* portable_path();
const Path* avx2_path();    // nullptr where it was not built
const Path* avx512_path();

inline float half_to_float(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
    union { uint32_t u; float f; } out;
    if (exponent == 31) out.u = sign | 0x7F800000 | (mantissa << 13);
    else if (exponent) out.u = sign | ((exponent + 112) << 23) | (mantissa << 13);
    else { out.f = float(mantissa) * 5.9604644775390625e-8f; out.u |= sign; }
    return out.f;
}

}  // namespace paceline
