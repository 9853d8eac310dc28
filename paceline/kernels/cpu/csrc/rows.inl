// What is done to single rows, in plain C++ that every path compiles for its own vectors. Sums run over sixteen lanes and
// are folded in one order, and products are fused into sums only where fma_f says so; so all paths give the same bits.
namespace {

inline float fold(const float* lane) {
    float a[8], b[4];
    for (int i = 0; i < 8; ++i) a[i] = lane[i] + lane[i + 8];
    for (int i = 0; i < 4; ++i) b[i] = a[i] + a[i + 4];
    return (b[0] + b[2]) + (b[1] + b[3]);
}

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
    for (int i = 0; i < 7; ++i) p = fma_f(p, r, all_f(factors[i]));
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

// Scores to weights e^(s - largest), in place; answers the largest score and the weights' sum. What lies behind the n
// scores up to a whole vector is written over.
inline void soften(float* s, int64_t n, float* answer) {
    const int64_t whole = n / LANES * LANES;
    for (int64_t i = n; i < whole + LANES && n > whole; ++i) s[i] = -INFINITY;
    F most = all_f(s[0]);
    for (int64_t i = 0; i < n; i += LANES) most = max_f(load_f(s + i), most);
    float lane[LANES];
    store_f(lane, most);
    float largest = lane[0];
    for (int l = 1; l < LANES; ++l) largest = lane[l] > largest ? lane[l] : largest;
    const F shift = all_f(-largest);
    F total = zero_f();
    for (int64_t i = 0; i < n; i += LANES) {
        store_f(s + i, exponential(add_f(load_f(s + i), shift)));
        for (int64_t k = n; k < i + LANES; ++k) s[k] = 0;
        total = add_f(total, load_f(s + i));
    }
    store_f(lane, total);
    answer[0] = largest;
    answer[1] = fold(lane);
}

int64_t largest(const float* x, int64_t n) {
    float most[16];
    int32_t where[16], strange[16] = {0};
    for (int l = 0; l < 16; ++l) { most[l] = -INFINITY; where[l] = -1; }
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int l = 0; l < 16; ++l) {
            const float value = x[i + l];
            where[l] = value > most[l] ? int32_t(i) + l : where[l];
            most[l] = value > most[l] ? value : most[l];
            strange[l] |= value != value;
        }
    for (int l = 0; i < n; ++i, ++l) {
        if (x[i] > most[l]) { most[l] = x[i]; where[l] = int32_t(i); }
        strange[l] |= x[i] != x[i];
    }
    int best = 0, odd = strange[0];
    for (int l = 1; l < 16; ++l) {
        odd |= strange[l];
        if (most[l] > most[best] || (most[l] == most[best] && uint32_t(where[l]) < uint32_t(where[best]))) best = l;
    }
    return odd ? -1 : where[best];
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

void quantise(const float* x, int64_t columns, Piece* to, int64_t step) {
    for (int64_t b = 0; b < columns / BLOCK; ++b, x += BLOCK, to += step) {
        const float largest = largest_of(x);
        const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
        to->halves[0] = round_16(x, inverse, to->quants);
        to->halves[1] = round_16(x + 16, inverse, to->quants + 16);
        to->scale = largest / 127.0f;
        to->sum = to->scale * float(to->halves[0] + to->halves[1]);
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

void multiply(const float* x, const float* y, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] * y[i];
}

void scale(const float* x, float factor, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] * factor;
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
    else if (kind == SIGMOID)
        each(x, n, out, [](F v) { return div_f(all_f(1.0f), add_f(all_f(1.0f), exponential(mul_f(v, all_f(-1.0f))))); });
    else
        for (int64_t i = 0; i < n; ++i) out[i] = activated(x[i], kind);
}

void gated(const float* __restrict x, int64_t n, int64_t kind, float* __restrict out) {
    activate(x, n, kind, out);
    for (int64_t i = 0; i < n; ++i) out[i] = out[i] * x[n + i];
}

void rope(float* __restrict row, int64_t heads, int64_t width, int64_t half, const float* __restrict cos, const float* __restrict sin) {
    for (int64_t h = 0; h < heads; ++h, row += width)
        for (int64_t i = 0; i < half; ++i) {
            const float first = row[i], second = row[half + i];
            row[i] = first * cos[i] - second * sin[i];
            row[half + i] = second * cos[i] + first * sin[i];
        }
}

constexpr int64_t NEAR = 64;  // positions of the cache that stay close while all rows and heads use them

struct Runs {  // a few runs of positions, each in one group of sixteen keys
    const float* keys[PACELINE_RUNS];
    int lane[PACELINE_RUNS], count[PACELINE_RUNS], at[PACELINE_RUNS];
};

static_assert(PACELINE_RUNS == 1 || PACELINE_RUNS == 4);

// Scores of H heads at N runs of positions; each head's begin STRETCH behind the last one's.
template <int H, int N>
inline void score(const Runs& runs, const float* query, const Look& l, float* scores) {
    const int64_t width = l.width;
    F acc[H][N];
    for (int h = 0; h < H; ++h)
        for (int n = 0; n < N; ++n) acc[h][n] = zero_f();
    for (int64_t d = 0; d < width; ++d) {
        F key[N];
        for (int n = 0; n < N; ++n) {
            key[n] = load_f(runs.keys[n] + d * LANES);
            in_register(key[n]);
        }
        for (int h = 0; h < H; ++h) {
            const F q = all_f(query[h * width + d]);
            for (int n = 0; n < N; ++n) acc[h][n] = fma_f(q, key[n], acc[h][n]);
        }
    }
    const F scale = all_f(l.scale);
    for (int h = 0; h < H; ++h)
        for (int n = 0; n < N; ++n) {
            float* to = scores + h * STRETCH + runs.at[n];
            if (runs.count[n] == LANES) {
                store_f(to, mul_f(acc[h][n], scale));
            } else {
                float lanes[LANES];
                store_f(lanes, mul_f(acc[h][n], scale));
                for (int i = 0; i < runs.count[n]; ++i) to[i] = lanes[runs.lane[n] + i];
            }
        }
}

template <int H>
inline void score_runs(const Runs& runs, int count, const float* query, const Look& l, float* scores) {
#if PACELINE_RUNS >= 4
    if (count == 4) return score<H, 4>(runs, query, l, scores);
    if (count == 3) return score<H, 3>(runs, query, l, scores);
    if (count == 2) return score<H, 2>(runs, query, l, scores);
#endif
    score<H, 1>(runs, query, l, scores);
}

// Scores of all heads of one row at `count` positions from `first` on, at most NEAR.
inline void score_all(const Look& l, const Seen& row, int64_t first, int64_t count, float* scores) {
    for (int64_t i = 0; i < count;) {
        Runs runs;
        int n = 0;
        for (; n < PACELINE_RUNS && i < count; ++n) {
            const int64_t line = row.lines[first + i], left = count - i;
            runs.lane[n] = int(line % LANES);
            runs.keys[n] = l.keys + key_offset(line - runs.lane[n], l.width);
            runs.count[n] = int(row.runs[first + i] < left ? row.runs[first + i] : left);
            runs.at[n] = int(i);
            i += runs.count[n];
        }
        for (int64_t g = 0; g < l.group;) {
            const float* query = row.query + g * l.width;
            float* to = scores + g * STRETCH;
            switch (l.group - g) {
                case 1: score_runs<1>(runs, n, query, l, to); g += 1; break;
                case 2: score_runs<2>(runs, n, query, l, to); g += 2; break;
                case 3: case 6: score_runs<3>(runs, n, query, l, to); g += 3; break;
                default: score_runs<4>(runs, n, query, l, to); g += 4; break;
            }
        }
    }
}

// The scores of up to sixteen heads at N positions of a latent layer; a head's begin STRETCH behind the last one's.
template <int N>
inline void score_latents(const Look& l, const float* turned, const int32_t* lines, float* scores) {
    F acc[N];
    const float* key[N];
    for (int n = 0; n < N; ++n) { acc[n] = zero_f(); key[n] = l.keys + int64_t(lines[n]) * l.width; }
    for (int64_t d = 0; d < l.width; ++d) {
        const F q = load_f(turned + d * LANES);
        for (int n = 0; n < N; ++n) acc[n] = fma_f(q, all_f(key[n][d]), acc[n]);
    }
    for (int n = 0; n < N; ++n) {
        float lanes[LANES];
        store_f(lanes, mul_f(acc[n], all_f(l.scale)));
        for (int64_t g = 0; g < l.group; ++g) scores[g * STRETCH + n] = lanes[g];
    }
}

// A row's queries column by column, the heads side by side.
inline void turn_query(const Look& l, const Seen& row, float* turned) {
    for (int64_t d = 0; d < l.width; ++d)
        for (int64_t g = 0; g < LANES; ++g) turned[d * LANES + g] = g < l.group ? row.query[g * l.width + d] : 0.0f;
}

inline void score_all_latents(const Look& l, const float* turned, const int32_t* lines, int64_t count, float* scores) {
    constexpr int MOST = PACELINE_RUNS == 1 ? 4 : 8;
    int64_t i = 0;
    for (; i + MOST <= count; i += MOST) score_latents<MOST>(l, turned, lines + i, scores + i);
    for (; i < count; ++i) score_latents<1>(l, turned, lines + i, scores + i);
}

// Adds D of the values at some positions to H heads' sums, weighted by each head's scores there.
template <int D, int H>
inline void gather(const Look& l, const float* values, const int32_t* lines, int64_t count, const float* scores, float* out) {
    constexpr int C = D / LANES;
    const int64_t step = partial_floats(l.value_width);
    F acc[H][C];
    for (int h = 0; h < H; ++h)
        for (int c = 0; c < C; ++c) acc[h][c] = load_f(out + h * step + c * LANES);
    for (int64_t i = 0; i < count; ++i) {
        const float* value = values + int64_t(lines[i]) * l.stride;
        F v[C];
        for (int c = 0; c < C; ++c) v[c] = load_f(value + c * LANES);
        for (int h = 0; h < H; ++h) {
            const F p = all_f(scores[h * STRETCH + i]);
            for (int c = 0; c < C; ++c) acc[h][c] = fma_f(p, v[c], acc[h][c]);
        }
    }
    for (int h = 0; h < H; ++h)
        for (int c = 0; c < C; ++c) store_f(out + h * step + c * LANES, acc[h][c]);
}

// All heads of a group, as many at once as there are registers for; D values from a column on.
template <int D>
inline void gather_all(const Look& l, int64_t column, const int32_t* lines, int64_t count, const float* scores, float* partials) {
    constexpr int MOST = D == 64 ? 3 : 2;
    const int64_t step = partial_floats(l.value_width);
    const float* values = l.values + column;
    float* to = partials + column;
    int64_t g = 0;
    for (; g + MOST <= l.group; g += MOST) gather<D, MOST>(l, values, lines, count, scores + g * STRETCH, to + g * step);
    for (; g < l.group; ++g) gather<D, 1>(l, values, lines, count, scores + g * STRETCH, to + g * step);
}

// The same for any width, one head after the other.
inline void gather_any(const Look& l, const int32_t* lines, int64_t count, const float* scores, float* partials) {
    for (int64_t g = 0; g < l.group; ++g)
        for (int64_t i = 0; i < count; ++i) {
            const float* value = l.values + int64_t(lines[i]) * l.stride;
            float* to = partials + g * partial_floats(l.value_width);
            for (int64_t d = 0; d < l.value_width; ++d) to[d] += scores[g * STRETCH + i] * value[d];
        }
}

// Asks for a share of the keys or values at the positions from `first` on, which come next.
inline void ask_for(const Look& l, bool keys, int64_t first, int part, int parts) {
    const Seen& row = l.rows[l.num_rows - 1];
    const int64_t left = row.count - first, count = left < NEAR ? left : NEAR;
    if (count <= 0) return;
    const int64_t unit = keys ? l.width : (l.value_width + LANES - 1) / LANES;  // cache lines of sixteen keys, or of one value
    const int64_t total = (keys ? (count + LANES - 1) / LANES : count) * unit;
    for (int64_t i = total * part / parts; i < total * (part + 1) / parts; ++i) {
        const int64_t which = i / unit, line = row.lines[first + (keys ? which * LANES : which)];
        __builtin_prefetch((keys ? l.keys + key_offset(line - line % LANES, l.width) : l.values + line * l.stride) + i % unit * LANES);
    }
}

// Calls f(row, first, count) for the positions of every row in a stretch, piece by piece. Meanwhile it asks for what
// comes next: the next piece, after the last piece of keys the first of values, and after that the next stretch's keys.
template <class Function>
inline void each_piece(const Look& l, int64_t begin, bool keys, Function&& f) {
    const int64_t longest = l.rows[l.num_rows - 1].count;  // or nearly, in a tree: it only decides what is asked for
    for (int64_t first = begin; first < begin + STRETCH; first += NEAR)
        for (int r = 0; r < l.num_rows; ++r) {
            const int64_t left = l.rows[r].count - first, next = first + NEAR;
            const bool last = next == begin + STRETCH || next >= longest;
            ask_for(l, keys != last, last && keys ? begin : next, r, l.num_rows);
            if (left > 0) f(r, first, left < NEAR ? left : NEAR);
        }
}

void attend(const Look& l, int64_t begin, float* partials) {
    const int64_t step = partial_floats(l.value_width);
    float* all = partials + l.num_rows * l.group * step;     // room for scores behind them
    float* turned = all + l.num_rows * l.group * STRETCH;    // and for queries of a latent layer
    for (int r = 0; r < l.num_rows && l.latent; ++r)
        if (l.rows[r].count > begin) turn_query(l, l.rows[r], turned + r * l.width * LANES);
    each_piece(l, begin, true, [&](int r, int64_t first, int64_t count) {
        float* scores = all + r * l.group * STRETCH + first - begin;
        if (l.latent) score_all_latents(l, turned + r * l.width * LANES, l.rows[r].lines + first, count, scores);
        else score_all(l, l.rows[r], first, count, scores);
    });
    for (int r = 0; r < l.num_rows; ++r) {
        const int64_t left = l.rows[r].count - begin, count = left < STRETCH ? left : STRETCH;
        for (int64_t g = 0; g < l.group && left > 0; ++g) {
            float *partial = partials + (r * l.group + g) * step, *scores = all + (r * l.group + g) * STRETCH;
            for (int64_t d = 0; d < step; ++d) partial[d] = 0;
            if (l.softcap > 0)
                for (int64_t i = 0; i < count; ++i) scores[i] = l.softcap * std::tanh(scores[i] / l.softcap);
            soften(scores, count, partial + step - LANES);
        }
    }
    each_piece(l, begin, false, [&](int r, int64_t first, int64_t count) {
        const int32_t* lines = l.rows[r].lines + first;
        const float* scores = all + r * l.group * STRETCH + first - begin;
        float* to = partials + r * l.group * step;
        if (l.value_width == 128) gather_all<128>(l, 0, lines, count, scores, to);
        else if (l.value_width % 64 == 0)
            for (int64_t column = 0; column < l.value_width; column += 64) gather_all<64>(l, column, lines, count, scores, to);
        else gather_any(l, lines, count, scores, to);
    });
}

void merge(float* __restrict into, const float* __restrict next, int64_t width) {
    const int64_t end = partial_floats(width) - LANES;
    const float largest = next[end] > into[end] ? next[end] : into[end];
    float pair[LANES] = {into[end] - largest, next[end] - largest};
    store_f(pair, exponential(load_f(pair)));
    for (int64_t i = 0; i < end; i += LANES)
        store_f(into + i, fma_f(load_f(into + i), all_f(pair[0]), mul_f(load_f(next + i), all_f(pair[1]))));
    into[end] = largest;
    into[end + 1] = into[end + 1] * pair[0] + next[end + 1] * pair[1];
}

void finish(const float* __restrict whole, int64_t width, float* __restrict out) {
    const float factor = 1.0f / whole[partial_floats(width) - LANES + 1];
    for (int64_t i = 0; i < width; ++i) out[i] = whole[i] * factor;
}

// Gumbel noise of one key: the arithmetic of sampling/noise.py, operation for operation.
inline double table_log(double x, const double* inverse, const double* logarithm) {
    const int64_t raw = std::bit_cast<int64_t>(x);
    const double exponent = double(int32_t((raw >> 52) - 1023));
    const int32_t index = int32_t((raw >> 40) & 4095);
    const double mantissa = std::bit_cast<double>((raw & ((int64_t(1) << 52) - 1)) | (int64_t(1023) << 52));
    const double rest = mantissa * inverse[index] - 1.0;
    const double series = rest * (1.0 - rest * (0.5 - rest * (1.0 / 3.0)));
    return exponent * 0.69314718055994530942 + (logarithm[index] + series);
}

inline float gumbel_of(uint32_t bits, const Noise& noise) {
    const double unit = (double(bits) + 0.5) * 0x1p-32;
    return float(-table_log(-table_log(unit, noise.inverse, noise.logarithm), noise.inverse, noise.logarithm));
}

void gumbel(const Noise& noise, int64_t begin, int64_t end, float* out) {
    for (int64_t i = begin; i < end; ++i) out[i] = gumbel_of(mixed(mixed(uint32_t(i) ^ noise.first) + noise.second), noise);
}

// out[i] = x[i] / temperature + weight * noise, for the tokens that may be the largest; -inf for those that cannot be, most of
// them: `top`, some token, is larger. With w = 2^32 - 1 - bits a token's noise is at most -log((w + 0.5) / 2^32), so it
// can only reach the top's y if w + 0.5 <= 2^32 exp((x / temperature - y) / weight). Sums round by a share of themselves, so y is
// taken lower by more than two of them, and the bound is widened by more than all other roundings on the way together;
// what is no number passes.
void disturb(const float* x, float temperature, const Noise& noise, float weight, const int64_t* ids, int64_t top, int64_t begin, int64_t end, float* out) {
    const auto bits_of = [&](int64_t i) { return mixed(mixed(uint32_t(ids ? ids[i] : i) ^ noise.first) + noise.second); };
    const float y = x[top] / temperature + weight * gumbel_of(bits_of(top), noise);
    const float low = y - std::fabs(y) * 0x1p-21f;
    const float share = 1 / (weight < 1e-30f ? 1e-30f : weight);  // as if it were larger: more pass than need be
    for (int64_t i = begin; i < end; ++i) out[i] = (x[i] / temperature - low) * share;
    exponentials(out + begin, end - begin, out + begin);
    for (int64_t i = begin; i < end; i += 16) {
        const int count = int(end - i < 16 ? end - i : 16);
        uint32_t bits[16];
        int32_t may[16] = {0}, any = 0;
        for (int l = 0; l < count; ++l) bits[l] = bits_of(i + l);
        for (int l = 0; l < count; ++l) may[l] = !(float(~bits[l]) > out[i + l] * (1.001f * 0x1p32f) + 1.0f);
        for (int l = 0; l < 16; ++l) any |= may[l];
        for (int l = 0; l < count; ++l) out[i + l] = -INFINITY;
        for (int l = 0; any && l < count; ++l)
            if (may[l]) out[i + l] = x[i + l] / temperature + weight * gumbel_of(bits[l], noise);
    }
}

const Path path = {PACELINE_PATH, {tile<W4>, tile<W5>, tile<W8>, tile<K4>, tile<K5>, tile<K6>, tile<F32>, tile<BF16>, tile<F16>}, PACELINE_ROWS, nullptr,
                   quantise, rms_norm, layer_norm, add, multiply, scale, activate, gated, rope, attend, merge, finish, largest, exponentials, gumbel, disturb};

}  // namespace
