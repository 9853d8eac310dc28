// One tile of a packed weight times up to R rows of activations, written once over a few vector words that each path
// defines before including this file:
//   I8   a vector of 64 bytes (16 rows x 4 columns), I32 16 integers, F 16 floats
// so that every path performs the same arithmetic in the same order (see packed.h).

namespace {

constexpr size_t AHEAD = 2560;  // bytes; weights stream through once, and the processor's own look-ahead is too short

template <int R>
inline void dots(I32* acc, I8 weights, const Piece* rows, int column) {
    for (int r = 0; r < R; ++r) acc[r] = dot4(acc[r], weights, rows[r].quants + column);
}

template <int KIND, int R>
inline void quantised_tile(const uint8_t* p, int64_t columns, const Panel& panel, int first, float (*out)[LANES]) {
    constexpr bool with_min = KIND == W4 || KIND == W5 || KIND == K4 || KIND == K5;
    constexpr bool super = KIND == K4 || KIND == K5 || KIND == K6;
    const int64_t blocks = columns / BLOCK, step = panel.height;
    const Piece* rows = panel.pieces + first;
    F acc[R];
    for (int r = 0; r < R; ++r) acc[r] = zero_f();
    F d = zero_f(), m = zero_f();
    for (int64_t b = 0; b < blocks; ++b, rows += step) {
        for (size_t k = 0; k < block_bytes(KIND); k += 64) __builtin_prefetch(p + AHEAD + k);
        if (super && b % SUPER == 0) {
            d = halves_f(p);
            if (KIND != K6) m = halves_f(p + 32);
            p += KIND == K6 ? 32 : 64;
        }
        F scale, minimum = zero_f();
        I32 low_scale, high_scale;
        if (KIND == W4 || KIND == W5) { scale = halves_f(p); minimum = halves_f(p + 32); p += 64; }
        if (KIND == W8) { scale = halves_f(p); p += 32; }
        if (KIND == K4 || KIND == K5) {
            scale = mul_f(d, bytes_f(p));
            minimum = neg_f(mul_f(m, bytes_f(p + 16)));
            p += 32;
        }
        if (KIND == K6) { low_scale = signed_i(p); high_scale = signed_i(p + 16); scale = d; p += 32; }

        I32 sum[R], upper[R];
        for (int r = 0; r < R; ++r) { sum[r] = zero_i(); if (KIND == K6) upper[r] = zero_i(); }
        if (KIND == W8) {
            for (int g = 0; g < 8; ++g) {
                const I8 w = load_8(p + 64 * g);
                for (int r = 0; r < R; ++r) sum[r] = dot4_biased(sum[r], w, rows[r].quants + 4 * g);
            }
            for (int r = 0; r < R; ++r) sum[r] = unbias(sum[r], rows[r].halves[0] + rows[r].halves[1]);
            p += 512;
        } else {
            const uint8_t* extra = p + 256;
            I8 fifth, pairs0, pairs1;
            if (KIND == W5 || KIND == K5) fifth = load_8(extra);
            if (KIND == K6) { pairs0 = load_8(extra); pairs1 = load_8(extra + 64); }
            // The shifts must be constants. path_amx.cpp unpacks and scales in the same way.
#define PACELINE_GROUP(G)                                                                                             \
    {                                                                                                                 \
        const I8 both = load_8(p + 64 * G);                                                                           \
        I8 lo = low_nibble(both), hi = high_nibble(both);                                                             \
        if (KIND == W5 || KIND == K5) { lo = or_8(lo, bit_to_16<G>(fifth)); hi = or_8(hi, bit_to_16<G + 4>(fifth)); } \
        if (KIND == K6) { lo = or_8(lo, pair_to_16<G>(pairs0)); hi = or_8(hi, pair_to_16<G>(pairs1)); }               \
        dots<R>(sum, lo, rows, 4 * G);                                                                                \
        if (KIND == K6) dots<R>(upper, hi, rows, 16 + 4 * G);                                                         \
        else dots<R>(sum, hi, rows, 16 + 4 * G);                                                                      \
    }
            PACELINE_GROUP(0) PACELINE_GROUP(1) PACELINE_GROUP(2) PACELINE_GROUP(3)
#undef PACELINE_GROUP
            p += block_bytes(KIND) - (KIND == W4 || KIND == W5 ? 64 : 32);
        }
        for (int r = 0; r < R; ++r) {
            if (KIND == K6) {
                const int32_t* half = rows[r].halves;
                sum[r] = add_i(mul_i(sub_i(sum[r], 32 * half[0]), low_scale), mul_i(sub_i(upper[r], 32 * half[1]), high_scale));
            }
            acc[r] = fma_f(to_f(sum[r]), mul_f(scale, all_f(rows[r].scale)), acc[r]);
            if (with_min) acc[r] = fma_f(minimum, all_f(rows[r].sum), acc[r]);
        }
    }
    for (int r = 0; r < R; ++r) store_f(out[r], acc[r]);
}

template <int KIND>
inline F dense_f(const uint8_t* p) {
    if constexpr (KIND == F32) return load_f(reinterpret_cast<const float*>(p));
    else if constexpr (KIND == BF16) return bf16_f(p);
    else return halves_f(p);
}

template <int KIND, int R>
inline void dense_tile(const uint8_t* p, int64_t columns, const Panel& panel, int first, float (*out)[LANES]) {
    constexpr size_t step = block_bytes(KIND) / BLOCK;
    const float* const* values = panel.values + first;
    F acc[R];
    for (int r = 0; r < R; ++r) acc[r] = zero_f();
    for (int64_t c = 0; c < columns; ++c, p += step) {
        if (R > 1 && (step == 64 || c % 2 == 0)) __builtin_prefetch(p + AHEAD);  // a line; one row is fast enough without
        const F w = dense_f<KIND>(p);
        for (int r = 0; r < R; ++r) acc[r] = fma_f(w, all_f(values[r][c]), acc[r]);
    }
    for (int r = 0; r < R; ++r) store_f(out[r], acc[r]);
}

template <int KIND, int R>
inline void tile_of(const uint8_t* p, int64_t columns, const Panel& panel, int first, float (*out)[LANES]) {
    if constexpr (KIND == F32 || KIND == BF16 || KIND == F16) dense_tile<KIND, R>(p, columns, panel, first, out);
    else quantised_tile<KIND, R>(p, columns, panel, first, out);
}

template <int KIND>
void tile(const uint8_t* p, int64_t columns, const Panel& panel, int first, int num_rows, float (*out)[LANES]) {
    switch (num_rows) {
        case 1: return tile_of<KIND, 1>(p, columns, panel, first, out);
        case 2: return tile_of<KIND, 2>(p, columns, panel, first, out);
        case 3: return tile_of<KIND, 3>(p, columns, panel, first, out);
        case 4: return tile_of<KIND, 4>(p, columns, panel, first, out);
#if PACELINE_ROWS >= 8
        case 5: return tile_of<KIND, 5>(p, columns, panel, first, out);
        case 6: return tile_of<KIND, 6>(p, columns, panel, first, out);
        case 7: return tile_of<KIND, 7>(p, columns, panel, first, out);
        default: return tile_of<KIND, 8>(p, columns, panel, first, out);
#endif
    }
}

}  // namespace
