// What is done to single rows, in plain C++ that every path compiles for its own vectors. Sums run over sixteen lanes and
// are folded in one order; nothing is fused; so all paths give the same bits.
namespace {

inline float fold(const float* lane) {
    float a[8], b[4];
    for (int i = 0; i < 8; ++i) a[i] = lane[i] + lane[i + 8];
    for (int i = 0; i < 4; ++i) b[i] = a[i] + a[i + 4];
    return (b[0] + b[2]) + (b[1] + b[3]);
}

#ifndef PACELINE_OWN_FOLD
// Sixteen vectors, each folded to its sum.
inline F fold_all(const F* v) {
    float sums[LANES], lane[LANES];
    for (int k = 0; k < LANES; ++k) {
        store_f(lane, v[k]);
        sums[k] = fold(lane);
    }
    return load_f(sums);
}
#endif

inline float dot(const float* __restrict x, const float* __restrict y, int64_t n) {
    float lane[16] = {0};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int l = 0; l < 16; ++l) lane[l] += x[i + l] * y[i + l];
    for (int l = 0; i < n; ++i, ++l) lane[l] += x[i] * y[i];
    return fold(lane);
}

inline float sum(const float* x, int64_t n) {
    float lane[16] = {0};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int l = 0; l < 16; ++l) lane[l] += x[i + l];
    for (int l = 0; i < n; ++i, ++l) lane[l] += x[i];
    return fold(lane);
}

// e^x by splitting off a power of two and a polynomial of degree 7; about one unit in the last place.
inline F exponential(F x) {
    x = clamp_f(x, -87.0f, 88.0f);
    const F magic = all_f(12582912.0f);  // adding and taking it away rounds to a whole number
    const F k = add_f(add_f(mul_f(x, all_f(1.44269504f)), magic), all_f(-12582912.0f));
    const F r = add_f(add_f(x, mul_f(k, all_f(-0.693145752f))), mul_f(k, all_f(-1.42860677e-6f)));
    F p = all_f(1.98412698e-4f);
    const float factors[] = {1.38888889e-3f, 8.33333333e-3f, 4.16666667e-2f, 1.66666667e-1f, 0.5f, 1.0f, 1.0f};
    for (int i = 0; i < 7; ++i) p = add_f(mul_f(p, r), all_f(factors[i]));
    return mul_f(p, power_of_two(k));
}

// Applies f to n values, sixteen at a time; the last few are padded.
template <class Function>
inline void each(const float* x, int64_t n, float* out, Function&& f) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store_f(out + i, f(load_f(x + i)));
    if (i < n) {
        float rest[LANES] = {0};
        for (int64_t k = i; k < n; ++k) rest[k - i] = x[k];
        store_f(rest, f(load_f(rest)));
        for (int64_t k = i; k < n; ++k) out[k] = rest[k - i];
    }
}

// Scores to weights e^(s - largest), in place; answers one over their sum.
inline float soften(float* s, int64_t n) {
    float most[16];
    for (int l = 0; l < 16; ++l) most[l] = s[0];
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int l = 0; l < 16; ++l) most[l] = s[i + l] > most[l] ? s[i + l] : most[l];
    for (int l = 0; i < n; ++i, ++l) most[l] = s[i] > most[l] ? s[i] : most[l];
    float largest = most[0];
    for (int l = 1; l < 16; ++l) largest = most[l] > largest ? most[l] : largest;
    each(s, n, s, [&](F x) { return exponential(add_f(x, all_f(-largest))); });
    return 1.0f / sum(s, n);
}

void exponentials(const float* x, int64_t n, float* out) {
    each(x, n, out, [](F v) { return exponential(v); });
}

#ifndef PACELINE_OWN_QUANTISE
inline float largest_of(const float* x) {  // by their bits, as whole numbers: so a NaN is the largest of all
    int32_t most[16];
    for (int l = 0; l < 16; ++l) {
        const int32_t low = std::bit_cast<int32_t>(x[l]) & 0x7FFFFFFF, high = std::bit_cast<int32_t>(x[l + 16]) & 0x7FFFFFFF;
        most[l] = low > high ? low : high;
    }
    for (int width = 8; width; width /= 2)
        for (int l = 0; l < width; ++l) most[l] = most[l] > most[l + width] ? most[l] : most[l + width];
    return std::bit_cast<float>(most[0]);
}

inline int32_t round_16(const float* x, float inverse, int8_t* quants) {  // ties to even; answers their sum
    int32_t total = 0;
    for (int i = 0; i < 16; ++i) {
        const int32_t q = int32_t((x[i] * inverse + 12582912.0f) - 12582912.0f);
        quants[i] = int8_t(q);
        total += q;
    }
    return total;
}
#endif

void quantise(const float* x, int64_t columns, int8_t* quants, float* scales, float* sums, int32_t* halves) {
    for (int64_t b = 0; b < columns / BLOCK; ++b, x += BLOCK, quants += BLOCK) {
        const float largest = largest_of(x);
        const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
        halves[2 * b] = round_16(x, inverse, quants);
        halves[2 * b + 1] = round_16(x + 16, inverse, quants + 16);
        scales[b] = largest / 127.0f;
        sums[b] = scales[b] * float(halves[2 * b] + halves[2 * b + 1]);
    }
}

void rms_norm(const float* x, const float* w, float eps, int64_t n, float* out) {
    const float scale = 1.0f / std::sqrt(dot(x, x, n) / float(n) + eps);
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] * scale * w[i];
}

void layer_norm(const float* x, const float* w, const float* b, float eps, int64_t n, float* out) {
    const float mean = sum(x, n) / float(n);
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] - mean;
    const float scale = 1.0f / std::sqrt(dot(out, out, n) / float(n) + eps);
    for (int64_t i = 0; i < n; ++i) out[i] = out[i] * scale * w[i] + b[i];
}

void add(const float* x, const float* y, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] + y[i];
}

inline float activated(float x, int64_t kind) {
    switch (kind) {
        case RELU: return x > 0 ? x : 0.0f;
        case GELU: return 0.5f * x * (1.0f + std::erf(x * 0.70710678f));
        default: return 0.5f * x * (1.0f + std::tanh(0.79788456f * (x + 0.044715f * x * x * x)));
    }
}

void activate(const float* x, int64_t n, int64_t kind, float* out) {
    if (kind == SILU)
        each(x, n, out, [](F v) { return div_f(v, add_f(all_f(1.0f), exponential(mul_f(v, all_f(-1.0f))))); });
    else
        for (int64_t i = 0; i < n; ++i) out[i] = activated(x[i], kind);
}

void gated(const float* __restrict x, int64_t n, int64_t kind, float* __restrict out) {
    activate(x, n, kind, out);
    for (int64_t i = 0; i < n; ++i) out[i] = out[i] * x[n + i];
}

void rope(float* __restrict row, int64_t heads, int64_t width, const float* __restrict cos, const float* __restrict sin) {
    const int64_t half = width / 2;
    for (int64_t h = 0; h < heads; ++h, row += width)
        for (int64_t i = 0; i < half; ++i) {
            const float first = row[i], second = row[half + i];
            row[i] = first * cos[i] - second * sin[i];
            row[half + i] = second * cos[i] + first * sin[i];
        }
}

template <int D>  // the heads' width, a multiple of 16
void look(const Look& l, float* scores, float* out) {
    constexpr int C = D / LANES;
    constexpr int64_t NEAR = 64;  // positions whose values stay close while all heads of the group use them
    const float scale = 1.0f / std::sqrt(float(D));
    const int64_t stride = (l.count + LANES - 1) / LANES * LANES;  // of one head's scores
    for (int64_t i = 0; i < l.count; i += LANES) {
        const float* keys[LANES];
        for (int k = 0; k < LANES; ++k)
            keys[k] = l.keys + (int64_t(l.lines[i + k < l.count ? i + k : l.count - 1]) * l.kv_heads + l.kv) * D;
        for (int64_t g = 0; g < l.group; ++g) {
            F query[C], partial[LANES];
            for (int c = 0; c < C; ++c) query[c] = load_f(l.query + g * D + c * LANES);
            for (int k = 0; k < LANES; ++k) {
                F acc = zero_f();
                for (int c = 0; c < C; ++c) acc = add_f(acc, mul_f(query[c], load_f(keys[k] + c * LANES)));
                partial[k] = acc;
            }
            store_f(scores + g * stride + i, mul_f(fold_all(partial), all_f(scale)));
        }
    }
    for (int64_t g = 0; g < l.group; ++g) {
        scores[l.group * stride + g] = soften(scores + g * stride, l.count);
        for (int c = 0; c < C; ++c) store_f(out + g * D + c * LANES, zero_f());
    }
    for (int64_t begin = 0; begin < l.count; begin += NEAR)
        for (int64_t g = 0; g < l.group; ++g) {
            const int64_t end = begin + NEAR < l.count ? begin + NEAR : l.count;
            F acc[C];
            for (int c = 0; c < C; ++c) acc[c] = load_f(out + g * D + c * LANES);
            for (int64_t i = begin; i < end; ++i) {
                const float* value = l.values + (int64_t(l.lines[i]) * l.kv_heads + l.kv) * D;
                const F p = all_f(scores[g * stride + i]);
                for (int c = 0; c < C; ++c) acc[c] = add_f(acc[c], mul_f(p, load_f(value + c * LANES)));
            }
            for (int c = 0; c < C; ++c) store_f(out + g * D + c * LANES, acc[c]);
        }
    for (int64_t g = 0; g < l.group; ++g)
        for (int c = 0; c < C; ++c) {
            float* to = out + g * D + c * LANES;
            store_f(to, mul_f(load_f(to), all_f(scores[l.group * stride + g])));
        }
}

void look_any(const Look& l, int64_t width, float* scores, float* out) {
    const float scale = 1.0f / std::sqrt(float(width));
    for (int64_t g = 0; g < l.group; ++g) {
        for (int64_t i = 0; i < l.count; ++i)
            scores[i] = dot(l.query + g * width, l.keys + (int64_t(l.lines[i]) * l.kv_heads + l.kv) * width, width) * scale;
        const float inverse = soften(scores, l.count);
        float* to = out + g * width;
        for (int64_t d = 0; d < width; ++d) to[d] = 0;
        for (int64_t i = 0; i < l.count; ++i) {
            const float* value = l.values + (int64_t(l.lines[i]) * l.kv_heads + l.kv) * width;
            for (int64_t d = 0; d < width; ++d) to[d] += scores[i] * value[d];
        }
        for (int64_t d = 0; d < width; ++d) to[d] *= inverse;
    }
}

void attend(const Look& l, int64_t width, float* scores, float* out) {
    if (width == 64) look<64>(l, scores, out);
    else if (width == 128) look<128>(l, scores, out);
    else look_any(l, width, scores, out);
}

// Gumbel noise for tokens begin … end-1 of one key: the arithmetic of sampling/noise.py, operation for operation.
inline uint32_t mixed(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

inline double table_log(double x, const double* inverse, const double* logarithm) {
    const int64_t raw = std::bit_cast<int64_t>(x);
    const double exponent = double(int32_t((raw >> 52) - 1023));
    const int32_t index = int32_t((raw >> 40) & 4095);
    const double mantissa = std::bit_cast<double>((raw & ((int64_t(1) << 52) - 1)) | (int64_t(1023) << 52));
    const double rest = mantissa * inverse[index] - 1.0;
    const double series = rest * (1.0 - rest * (0.5 - rest * (1.0 / 3.0)));
    return exponent * 0.69314718055994530942 + (logarithm[index] + series);
}

void gumbel(uint32_t first, uint32_t second, int64_t begin, int64_t end, const double* inverse, const double* logarithm, float* out) {
    for (int64_t token = begin; token < end; ++token) {
        const uint32_t bits = mixed(mixed(uint32_t(token) ^ first) + second);
        const double unit = (double(bits) + 0.5) * 0x1p-32;
        out[token] = float(-table_log(-table_log(unit, inverse, logarithm), inverse, logarithm));
    }
}

const Path path = {PACELINE_PATH, {tile<W4>, tile<W5>, tile<W8>, tile<K4>, tile<K5>, tile<K6>, tile<F32>, tile<BF16>}, PACELINE_ROWS,
                   quantise, rms_norm, layer_norm, add, activate, gated, rope, attend, exponentials, gumbel};

}  // namespace
