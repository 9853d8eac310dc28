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
//   BF16    -                            32 x 16 upper halves of floats
//   F16     -                            32 x 16 halves
//
// A value is d*q + m (W4, W5), d*(q-128) (W8), (d*scale)*q - dmin*min (K4, K5), d*scale*(q-32) (K6).
//
// The result for one row of activations, blocks b in ascending order, float32, products fused into sums (fma) as written:
//   acc = fma(float(integer dot product of the block), weight scale * activation scale, acc)
//   acc = fma(weight minimum, activation sum, acc)                                  (kinds with a minimum)
// and for the three dense kinds, whose values become floats first, columns c in ascending order:
//   acc = fma(value, activation, acc)
// Dot products are exact and values become floats exactly, so every path, tile shape and thread count gives the same
// bits, and so do 16-bit values and the same values stored as floats.
#pragma once
#include <cstddef>
#include <cstdint>

namespace paceline {

constexpr int LANES = 16;   // output rows in a tile
constexpr int BLOCK = 32;   // columns in a block
constexpr int SUPER = 8;    // blocks in a super-block

// Names are listed once: as numbers here, and as words that library.py compares its own with.
#define PACELINE_NUMBER(name) name,
#define PACELINE_KINDS(X) X(W4) X(W5) X(W8) X(K4) X(K5) X(K6) X(F32) X(BF16) X(F16)
enum Kind : int32_t { PACELINE_KINDS(PACELINE_NUMBER) KINDS };

inline bool is_super(int kind) { return kind == K4 || kind == K5 || kind == K6; }
inline bool is_dense(int kind) { return kind >= F32; }

inline size_t super_bytes(int kind) { return kind == K6 ? 32 : is_super(kind) ? 64 : 0; }

constexpr size_t block_bytes(int kind) {
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

inline int64_t tiles_of(int64_t rows) { return (rows + LANES - 1) / LANES; }

inline size_t tile_bytes(int kind, int64_t columns) {
    const int64_t blocks = (columns + BLOCK - 1) / BLOCK;
    return blocks * block_bytes(kind) + (is_super(kind) ? (blocks + SUPER - 1) / SUPER * super_bytes(kind) : 0);
}

// Thirty-two activations of one row, quantised to signed bytes: a cache line of their own, so that threads that quantise
// neighbouring rows never write to the same one.
struct alignas(64) Piece {
    int8_t quants[BLOCK];
    float scale, sum;    // sum: scale * sum of quants
    int32_t halves[2];   // sums of quants over columns 0-15 and 16-31
};

// Up to PANEL rows of activations, block after block, the rows of a block side by side.
constexpr int PANEL = 16;
struct Panel {
    const Piece* pieces;         // [blocks][height]
    int64_t height;              // rows
    const float* const* values;  // [height] the rows as they were, for dense kinds
};

// The sixteen results of one tile for rows first … first + num_rows - 1 of a panel; out[r] receives 16 floats.
using TileFn = void (*)(const uint8_t* tile, int64_t columns, const Panel& panel, int first, int num_rows, float (*out)[LANES]);

// The same for up to MANY neighbouring tiles of a quantised kind and whole panels, one behind the other.
constexpr int MANY = 2;
struct Many {
    const uint8_t* tiles;
    int num_tiles;
    int64_t columns, blocks;
    const Piece* pieces;
    int64_t panels;
    float* sums;        // [panels, MANY, PANEL, LANES] to work with
    float* out;         // where the first row's results go; the next row's `stride` further
    int64_t stride;
    int64_t lanes;      // results of a row, at most num_tiles * LANES
    const float* bias;  // or nullptr
};
using ManyFn = void (*)(int kind, const Many& many);

#define PACELINE_ACTIVATIONS(X) X(SILU) X(GELU_NEW) X(GELU) X(RELU) X(SIGMOID)
enum Activation : int64_t { PACELINE_ACTIVATIONS(PACELINE_NUMBER) };

// Attention over STRETCH positions at a time, counted from the first a row may see. Each stretch gives a partial result
// per head: the largest score, the sum of e^(score - largest), and the values weighted by it. Stretches are merged in
// ascending order, by whichever thread, so a row's result depends on its own positions alone.
//
// A head's values lie row by row. Its keys lie sixteen rows together, [width][16], so that one vector holds a column of
// sixteen keys and a score is a sum over columns in ascending order, sixteen scores at once. The rows of a latent layer lie
// row by row, since they are values too; there sixteen heads have their scores at once, by the same sums.
constexpr int64_t STRETCH = 128;
constexpr int LOOKS = 8;
inline int64_t key_offset(int64_t line, int64_t width) { return line / LANES * LANES * width + line % LANES; }  // then LANES a column
// A few rows' look at one kv head, each at its own positions in ascending order. Rows of one sequence see nearly the
// same keys; they are taken together so that a piece of the cache is fetched once for all.
struct Seen {
    const float* query;    // [group, width]
    const int32_t* lines;  // [count] rows of the cache
    const uint8_t* runs;   // [count] how many rows from here on follow one another in one group of sixteen
    int64_t count;
};
struct Look {
    const float *keys, *values;  // of one kv head
    int64_t group, width, value_width;
    int64_t stride;        // from one row's values to the next one's
    bool latent;           // keys lie row by row, and the values are the last of them
    float scale, softcap;  // a score is scale * (q . k); with a softcap c above 0 then c * tanh(score / c)
    int num_rows;
    Seen rows[LOOKS];
};
// A partial result: `width` sums, then the largest score and the sum of weights.
inline int64_t partial_floats(int64_t width) { return (width + LANES - 1) / LANES * LANES + LANES; }

struct Noise {  // a row's key, and the tables its logarithms are taken from
    uint32_t first, second;
    const double *inverse, *logarithm;
};
static inline uint32_t mixed(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

// One instruction set's functions. All compute the same bits.
struct Path {
    const char* name;
    TileFn tile[KINDS];
    int max_rows;  // of one call of tile
    ManyFn many;   // nullptr: this path has none
    void (*quantise)(const float* x, int64_t columns, Piece* to, int64_t step);  // a row's pieces are `step` apart
    void (*rms_norm)(const float* x, const float* w, float eps, int64_t n, float* out);
    void (*layer_norm)(const float* x, const float* w, const float* b, float eps, int64_t n, float* out);
    void (*add)(const float* x, const float* y, int64_t n, float* out);
    void (*multiply)(const float* x, const float* y, int64_t n, float* out);
    void (*scale)(const float* x, float factor, int64_t n, float* out);
    void (*activate)(const float* x, int64_t n, int64_t kind, float* out);
    void (*gated)(const float* x, int64_t n, int64_t kind, float* out);  // x [2n]
    void (*rope)(float* row, int64_t heads, int64_t width, int64_t half, const float* cos, const float* sin);  // 2 * half values turn
    // Partial results [rows, group] of the positions begin … begin + STRETCH - 1; rows that end before it are left out.
    void (*attend)(const Look& look, int64_t begin, float* partials);
    void (*merge)(float* into, const float* next, int64_t width);  // partial results of neighbouring stretches
    void (*finish)(const float* whole, int64_t width, float* out);
    int64_t (*largest)(const float* x, int64_t n);  // where; the first of equals; -1 if nothing is above -inf or one is NaN
    void (*exponentials)(const float* x, int64_t n, float* out);
    void (*gumbel)(const Noise& noise, int64_t begin, int64_t end, float* out);  // of tokens begin … end - 1
    // Temperature and noise, which counts as much as weight says, for some of x, as far as they may be larger than x[top]
    // will be; ids: the tokens x stands for.
    void (*disturb)(const float* x, float temperature, const Noise& noise, float weight, const int64_t* ids, int64_t top, int64_t begin, int64_t end, float* out);
};

const Path* portable_path();
const Path* avx2_path();    // nullptr where it was not built
const Path* avx512_path();
const Path* amx_path();

inline float half_to_float(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
    union { uint32_t u; float f; } out;
    if (exponent == 31) out.u = sign | 0x7F800000 | (mantissa << 13);
    else if (exponent) out.u = sign | ((exponent + 112) << 23) | (mantissa << 13);
    else { out.f = float(mantissa) * 5.9604644775390625e-8f; out.u |= sign; }
    return out.f;
}

}  // namespace paceline
