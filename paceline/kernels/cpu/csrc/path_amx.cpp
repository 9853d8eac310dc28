// AMX: sixteen rows of activations times sixteen rows of a weight in one instruction, for prompts and wide batches. The
// rest is AVX-512's. A block's dot products are the same exact integers, and what follows is done in the same order.
#include "packed.h"

#if defined(__AMX_INT8__) && defined(__AVX512VNNI__) && defined(__linux__)
#include "words_avx512.h"
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace paceline {
namespace {

constexpr int GROUPS = BLOCK / 4;

// A super-block of one tile, as bytes: what a matrix instruction takes. It reads and scales as tiles.inl does. K6 scales its halves apart, so it has two
// matrices to a block, each with zeros in the other's place.
template <int KIND> struct Unpacked {
    static constexpr int DOTS = KIND == K6 ? 2 : 1;
    static constexpr bool with_min = KIND == W4 || KIND == W5 || KIND == K4 || KIND == K5;
    alignas(64) uint8_t bytes[SUPER][DOTS][GROUPS * 64];
    alignas(64) F scale[SUPER], minimum[SUPER];
    alignas(64) I32 low_scale[SUPER], high_scale[SUPER];

    template <int G> void group(int b, const uint8_t* p, I8 extra0, I8 extra1) {
        const I8 both = load_8(p + 64 * G);
        I8 low = low_nibble(both), high = high_nibble(both);
        if (KIND == W5 || KIND == K5) { low = or_8(low, bit_to_16<G>(extra0)); high = or_8(high, bit_to_16<G + 4>(extra0)); }
        if (KIND == K6) { low = or_8(low, pair_to_16<G>(extra0)); high = or_8(high, pair_to_16<G>(extra1)); }
        _mm512_store_si512(bytes[b][0] + 64 * G, low);
        _mm512_store_si512(bytes[b][DOTS - 1] + 64 * (G + 4), high);
        if (KIND == K6) {
            _mm512_store_si512(bytes[b][0] + 64 * (G + 4), zero_i());
            _mm512_store_si512(bytes[b][DOTS - 1] + 64 * G, zero_i());
        }
    }

    const uint8_t* read(const uint8_t* p, int blocks) {  // answers where the next super-block begins
        F d = zero_f(), m = zero_f();
        if (is_super(KIND)) {
            d = halves_f(p);
            if (KIND != K6) m = halves_f(p + 32);
            p += super_bytes(KIND);
        }
        for (int b = 0; b < blocks; ++b) {
            const uint8_t* next = p + block_bytes(KIND);
            if (KIND == W4 || KIND == W5) { scale[b] = halves_f(p); minimum[b] = halves_f(p + 32); p += 64; }
            if (KIND == W8) { scale[b] = halves_f(p); p += 32; }
            if (KIND == K4 || KIND == K5) {
                scale[b] = mul_f(d, bytes_f(p));
                minimum[b] = neg_f(mul_f(m, bytes_f(p + 16)));
                p += 32;
            }
            if (KIND == K6) { low_scale[b] = signed_i(p); high_scale[b] = signed_i(p + 16); scale[b] = d; p += 32; }
            if (KIND == W8) {
                memcpy(bytes[b][0], p, 512);
            } else {
                const I8 extra0 = KIND == W4 || KIND == K4 ? zero_i() : load_8(p + 256);
                const I8 extra1 = KIND == K6 ? load_8(p + 320) : zero_i();
                group<0>(b, p, extra0, extra1);
                group<1>(b, p, extra0, extra1);
                group<2>(b, p, extra0, extra1);
                group<3>(b, p, extra0, extra1);
            }
            p = next;
        }
        return p;
    }
};

constexpr int LEAD = 2, RING = 4;  // blocks whose dot products are under way while an earlier one's are used

template <int KIND> struct Product {
    using Weights = Unpacked<KIND>;
    static constexpr int DOTS = Weights::DOTS;
    const Many& many;
    Weights weights[MANY];
    alignas(64) int32_t dots[RING][DOTS][PANEL][LANES];

    explicit Product(const Many& all) : many(all) {}  // the rest is written before it is read

    __attribute__((always_inline)) void multiply(const Piece* rows, const Weights& w, int b, int to) {
        _tile_loadd(2, rows->quants, sizeof(Piece));
        _tile_loadd(3, w.bytes[b][0], 64);
        _tile_zero(0);
        _tile_dpbsud(0, 2, 3);
        _tile_stored(0, dots[to][0], LANES * 4);
        if constexpr (DOTS == 2) {
            _tile_loadd(4, w.bytes[b][1], 64);
            _tile_zero(1);
            _tile_dpbsud(1, 2, 4);
            _tile_stored(1, dots[to][1], LANES * 4);
        }
    }

    // One block's dot products, scaled, added to what sixteen rows have.
    __attribute__((always_inline)) void scale(const Piece* rows, const Weights& w, int b, int from, F* acc) {
        const F factor = w.scale[b], minimum = Weights::with_min ? w.minimum[b] : zero_f();
#pragma GCC unroll 16
        for (int r = 0; r < PANEL; ++r) {
            I32 sum = _mm512_load_si512(dots[from][0][r]);
            if (KIND == W8) sum = unbias(sum, rows[r].halves[0] + rows[r].halves[1]);
            if (KIND == K6)
                sum = add_i(mul_i(sub_i(sum, 32 * rows[r].halves[0]), w.low_scale[b]),
                            mul_i(sub_i(_mm512_load_si512(dots[from][DOTS - 1][r]), 32 * rows[r].halves[1]), w.high_scale[b]));
            acc[r] = fma_f(to_f(sum), mul_f(factor, all_f(rows[r].scale)), acc[r]);
            if (Weights::with_min) acc[r] = fma_f(minimum, all_f(rows[r].sum), acc[r]);
        }
    }

    void store(int64_t panel, int t, const F* acc) {
        const int64_t left = many.lanes - t * LANES;
        const __mmask16 mask = left >= LANES ? 0xFFFF : (1 << left) - 1;
        const F bias = many.bias ? _mm512_maskz_loadu_ps(mask, many.bias + t * LANES) : zero_f();
        for (int r = 0; r < PANEL; ++r)
            _mm512_mask_storeu_ps(many.out + (panel * PANEL + r) * many.stride + t * LANES, mask, many.bias ? add_f(acc[r], bias) : acc[r]);
    }

    // A super-block of all tiles and panels; the multiplications run LEAD blocks in front of the scaling.
    void part(int64_t begin, int count) {
        const auto rows_at = [&](int64_t panel) { return many.pieces + (panel * many.blocks + begin) * PANEL; };
        const int64_t units = many.panels * many.num_tiles;
        const int lead = LEAD < count ? LEAD : count;
        for (int b = 0; b < lead; ++b) multiply(rows_at(0) + b * PANEL, weights[0], b, b);
        int slot = 0;
        for (int64_t unit = 0; unit < units; ++unit) {
            const int64_t panel = unit / many.num_tiles, after = unit + 1 < units ? unit + 1 : unit;
            const int t = int(unit % many.num_tiles);
            const Piece *rows = rows_at(panel), *next = rows_at(after / many.num_tiles);
            const Weights &here = weights[t], &there = weights[after % many.num_tiles];
            float* sums = many.sums + unit * PANEL * LANES;
            F acc[PANEL];
            for (int r = 0; r < PANEL; ++r) acc[r] = begin ? load_f(sums + r * LANES) : zero_f();
            for (int b = 0; b < count; ++b) {
                const int ahead = b + lead;
                if (ahead < count) multiply(rows + ahead * PANEL, here, ahead, (slot + lead) % RING);
                else multiply(next + (ahead - count) * PANEL, there, ahead - count, (slot + lead) % RING);
                scale(rows + b * PANEL, here, b, slot, acc);
                slot = (slot + 1) % RING;
            }
            if (begin + count < many.blocks)
                for (int r = 0; r < PANEL; ++r) store_f(sums + r * LANES, acc[r]);
            else
                store(panel, t, acc);
        }
    }

    void run() {
        const uint8_t* p[MANY];
        for (int t = 0; t < many.num_tiles; ++t) p[t] = many.tiles + t * tile_bytes(KIND, many.columns);
        for (int64_t begin = 0; begin < many.blocks; begin += SUPER) {
            const int count = int(many.blocks - begin < SUPER ? many.blocks - begin : SUPER);
            for (int t = 0; t < many.num_tiles; ++t) p[t] = weights[t].read(p[t], count);
            asm volatile("" ::: "memory");  // the compiler does not know that loading a tile reads what was stored
            part(begin, count);
        }
    }
};

struct alignas(64) Shapes {  // of the tile registers, as the instruction reads them
    uint8_t palette = 1, start = 0, reserved[14] = {0};
    uint16_t bytes[16] = {64, 64, BLOCK, 64, 64};  // two of results, one of activations, two of weights
    uint8_t rows[16] = {PANEL, PANEL, PANEL, GROUPS, GROUPS};
};

template <int KIND> void product(const Many& many) {
    Product<KIND>(many).run();
}

void many(int kind, const Many& many) {
    static const Shapes shapes;
    _tile_loadconfig(&shapes);
    switch (kind) {
        case W4: product<W4>(many); break;
        case W5: product<W5>(many); break;
        case W8: product<W8>(many); break;
        case K4: product<K4>(many); break;
        case K5: product<K5>(many); break;
        default: product<K6>(many); break;
    }
    _tile_release();
}

// The processor has it, and the system lets this process use it.
bool granted() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 24 & 1) || !(d >> 25 & 1)) return false;
    constexpr long ASK = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, the tiles' part of the state
    return syscall(SYS_arch_prctl, ASK, TILES) == 0;
}

}  // namespace

const Path* amx_path() {
    static const Path* const found = [] {
        static Path path;
        if (!avx512_path() || !granted()) return static_cast<const Path*>(nullptr);
        path = *avx512_path();
        path.name = "amx";
        path.many = many;
        return static_cast<const Path*>(&path);
    }();
    return found;
}
}  // namespace paceline
#else
namespace paceline { const Path* amx_path() { return nullptr; } }
#endif
