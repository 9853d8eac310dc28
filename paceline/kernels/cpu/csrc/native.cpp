// The library's entry points and the loop that runs a program. Every operation computes each row by itself, in an order
// that depends on that row alone, so neighbours, chunks, threads and draft branches cannot reach a result.
#include "pack.h"
#include "pool.h"
#include "program.h"
#include <algorithm>
#include <cmath>
#include <cstring>

namespace paceline {
namespace {

const Path* chosen = nullptr;

bool cpu_has(const char* name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!strcmp(name, "avx512"))
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
    if (!strcmp(name, "avx2")) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#endif
    return !strcmp(name, "portable");
}

const Path* find_path(const char* name) {
    const Path* all[] = {avx512_path(), avx2_path(), portable_path()};
    for (const Path* path : all)
        if (path && cpu_has(path->name) && (!name || !strcmp(name, path->name))) return path;
    return nullptr;
}

const Path& path() { if (!chosen) chosen = find_path(nullptr); return *chosen; }

// ---- sums over sixteen lanes, folded in one order

inline float fold(const float* lane) {
    float a[8], b[4];
    for (int i = 0; i < 8; ++i) a[i] = lane[i] + lane[i + 8];
    for (int i = 0; i < 4; ++i) b[i] = a[i] + a[i + 4];
    return (b[0] + b[2]) + (b[1] + b[3]);
}

inline float dot(const float* x, const float* y, int64_t n) {
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

// e^x by splitting off a power of two and a polynomial of degree 6; about one unit in the last place.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    const float k = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    const float r = (x - k * 0.693145752f) - k * 1.42860677e-6f;
    float p = 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    union { int32_t i; float f; } power;
    power.i = (int32_t(k) + 127) << 23;
    return p * power.f;
}

inline float act(float x, int64_t kind) {
    switch (kind) {
        case SILU: return x / (1.0f + exponential(-x));
        case RELU: return x > 0 ? x : 0.0f;
        case GELU: return 0.5f * x * (1.0f + std::erf(x * 0.70710678f));
        default: return 0.5f * x * (1.0f + std::tanh(0.79788456f * (x + 0.044715f * x * x * x)));
    }
}

// ---- what a run shares between threads

struct Scratch {  // quantised activations of one linear's input
    std::vector<int8_t> quants;
    std::vector<float> scales, sums;
    std::vector<int32_t> halves;
    std::vector<Activation> rows;
    void size(int64_t count, int64_t columns) {
        const int64_t blocks = columns / BLOCK + 1;
        quants.resize(std::max<size_t>(quants.size(), count * columns + 64));
        scales.resize(std::max<size_t>(scales.size(), count * blocks));
        sums.resize(std::max<size_t>(sums.size(), count * blocks));
        halves.resize(std::max<size_t>(halves.size(), 2 * count * blocks));
        rows.resize(std::max<size_t>(rows.size(), count));
    }
};

struct Run {
    Pool& pool;
    std::atomic<int64_t>* next;  // per operation and stage: the next unit of work
    Scratch& scratch;
    std::vector<std::vector<float>>& local;  // per thread
    int64_t stage = 0;

    // Share out `units` of work in chunks; every thread calls it with the same arguments.
    template <class Work> void share(std::atomic<int64_t>& counter, int64_t units, int64_t chunk, Work&& work) {
        for (;;) {
            const int64_t begin = counter.fetch_add(chunk, std::memory_order_relaxed);
            if (begin >= units) break;
            for (int64_t unit = begin; unit < std::min(units, begin + chunk); ++unit) work(unit);
        }
    }
};

bool needs_quants(const Weight& w) {
    for (int64_t s = 0; s < w.num_segments; ++s)
        if (!is_dense(w.segments[s].kind)) return true;
    return false;
}

void linear(Run& run, std::atomic<int64_t>* counter, const Weight& w, const float* x, int64_t rows, float* out, const float* bias) {
    Scratch& s = run.scratch;
    const int64_t blocks = w.columns / BLOCK;
    const bool quants = needs_quants(w);
    run.share(counter[0], rows, 1, [&](int64_t r) {
        Activation& a = s.rows[r];
        a = {s.quants.data() + r * w.columns, s.scales.data() + r * blocks, s.sums.data() + r * blocks, s.halves.data() + 2 * r * blocks, x + r * w.columns};
        if (quants) quantise_row(x + r * w.columns, w.columns, s.quants.data() + r * w.columns, s.scales.data() + r * blocks, s.sums.data() + r * blocks, s.halves.data() + 2 * r * blocks);
    });
    run.pool.meet();
    int64_t tiles = 0;
    for (int64_t i = 0; i < w.num_segments; ++i) tiles += (w.segments[i].rows + LANES - 1) / LANES;
    const int64_t chunk = std::max<int64_t>(1, tiles / (run.pool.size() * 8));
    const int most = path().max_rows;
    run.share(counter[1], tiles, chunk, [&](int64_t unit) {
        const Segment* segment = w.segments;
        int64_t column = 0, tile = unit;
        while (tile >= (segment->rows + LANES - 1) / LANES) { tile -= (segment->rows + LANES - 1) / LANES; column += segment->rows; ++segment; }
        const uint8_t* data = segment->data + tile * tile_bytes(segment->kind, w.columns);
        const int64_t first = column + tile * LANES;
        const int lanes = int(std::min<int64_t>(LANES, segment->rows - tile * LANES));
        float result[8][LANES];
        for (int64_t r = 0; r < rows; r += most) {
            const int count = int(std::min<int64_t>(most, rows - r));
            path().tile[segment->kind](data, w.columns, s.rows.data() + r, count, result);
            for (int i = 0; i < count; ++i) {
                float* to = out + (r + i) * w.rows + first;
                if (bias) for (int l = 0; l < lanes; ++l) to[l] = result[i][l] + bias[first + l];
                else memcpy(to, result[i], lanes * sizeof(float));
            }
        }
    });
    run.pool.meet();
}

void read_rows(const Weight& w, int64_t id, float* out) {
    const Segment* segment = w.segments;
    while (id >= segment->rows) { id -= segment->rows; ++segment; }
    read_row(segment->kind, segment->data + id / LANES * tile_bytes(segment->kind, w.columns), int(id % LANES), w.columns, out);
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

void rope(float* row, int64_t heads, int64_t width, const float* cos, const float* sin) {
    const int64_t half = width / 2;
    for (int64_t h = 0; h < heads; ++h, row += width)
        for (int64_t i = 0; i < half; ++i) {
            const float first = row[i], second = row[half + i];
            row[i] = first * cos[i] - second * sin[i];
            row[half + i] = second * cos[i] + first * sin[i];
        }
}

// One row's look at one kv head: all positions it may see, in ascending order.
void attend(const Batch& batch, int64_t row, int64_t kv, int64_t kv_heads, int64_t group, int64_t width, int64_t window,
            const float* query, const float* keys, const float* values, float* out, std::vector<float>& memory) {
    const int64_t position = batch.positions[row], base = batch.tree_base[row];
    int64_t first = batch.first ? batch.first[row] : 0;
    if (window > 0) first = std::max(first, position - window + 1);
    const int64_t count = position + 1 - first;
    memory.resize(std::max<size_t>(memory.size(), size_t((group + 2) * count + 64)));
    int64_t* lines = reinterpret_cast<int64_t*>(memory.data());  // two floats each
    float* scores = memory.data() + 2 * count;
    const int64_t* pages = batch.page_table + batch.slots[row] * batch.table_width;
    for (int64_t i = 0; i < count; ++i) {
        int64_t line = first + i;
        if (batch.path && line >= base) line = base + batch.path[row * batch.path_width + line - base];
        lines[i] = (pages[line / batch.block_size] * batch.block_size + line % batch.block_size) * kv_heads + kv;
    }
    const float scale = 1.0f / std::sqrt(float(width));
    for (int64_t i = 0; i < count; ++i) {
        const float* key = keys + lines[i] * width;
        for (int64_t g = 0; g < group; ++g) scores[g * count + i] = dot(query + g * width, key, width) * scale;
    }
    for (int64_t g = 0; g < group; ++g) {
        float* s = scores + g * count;
        float largest = s[0];
        for (int64_t i = 1; i < count; ++i) largest = s[i] > largest ? s[i] : largest;
        for (int64_t i = 0; i < count; ++i) s[i] = exponential(s[i] - largest);
        const float inverse = 1.0f / sum(s, count);
        float* to = out + g * width;
        for (int64_t d = 0; d < width; ++d) to[d] = 0;
        for (int64_t i = 0; i < count; ++i) {
            const float* value = values + lines[i] * width;
            const float p = s[i];
            for (int64_t d = 0; d < width; ++d) to[d] += p * value[d];
        }
        for (int64_t d = 0; d < width; ++d) to[d] *= inverse;
    }
}

void run_op(Run& run, const Program& program, const Op& op, const Batch& batch, float* space, std::atomic<int64_t>* counter, int thread) {
    const int64_t rows = batch.rows;
    auto at = [&](int32_t number) { return space + program.buffers[number].offset * rows; };
    auto width = [&](int32_t number) { return program.buffers[number].width; };
    if (op.code == LINEAR)
        return linear(run, counter, *static_cast<const Weight*>(op.w0), at(op.a), rows, at(op.out), static_cast<const float*>(op.w1));
    const float* w0 = static_cast<const float*>(op.w0);
    const float* w1 = static_cast<const float*>(op.w1);
    if (op.code == ATTENTION) {  // n0 heads, n1 kv heads, n2 width, n3 layer and window
        const int64_t heads = op.n0, kv_heads = op.n1, d = op.n2, layer = op.n3 & 0xFFFF, window = op.n3 >> 16, group = heads / kv_heads;
        run.share(counter[0], rows, 8, [&](int64_t r) {
            const float* kv = at(op.a) + r * width(op.a) + heads * d;
            memcpy(batch.keys[layer] + batch.write[r] * kv_heads * d, kv, kv_heads * d * sizeof(float));
            memcpy(batch.values[layer] + batch.write[r] * kv_heads * d, kv + kv_heads * d, kv_heads * d * sizeof(float));
        });
        run.pool.meet();
        run.share(counter[1], rows * kv_heads, 1, [&](int64_t unit) {
            const int64_t r = unit / kv_heads, kv = unit % kv_heads;
            attend(batch, r, kv, kv_heads, group, d, window, at(op.a) + r * width(op.a) + kv * group * d, batch.keys[layer],
                   batch.values[layer], at(op.out) + r * width(op.out) + kv * group * d, run.local[thread]);
        });
        run.pool.meet();
        return;
    }
    run.share(counter[0], rows, 1, [&](int64_t r) {
        const int64_t n = op.a >= 0 ? width(op.a) : 0, m = op.out >= 0 ? width(op.out) : 0;
        const float* x = op.a >= 0 ? at(op.a) + r * n : nullptr;
        float* out = op.out >= 0 ? at(op.out) + r * m : nullptr;
        switch (op.code) {
            case EMBED: read_rows(*static_cast<const Weight*>(op.w0), batch.ids[r], out); break;
            case POSITIONS: { const float* p = w0 + (batch.positions[r] + op.n0) * n; for (int64_t i = 0; i < n; ++i) out[i] = x[i] + p[i]; break; }
            case RMS_NORM: rms_norm(x, w0, op.f, n, out); break;
            case LAYER_NORM: layer_norm(x, w0, w1, op.f, n, out); break;
            case ACTIVATION: for (int64_t i = 0; i < n; ++i) out[i] = act(x[i], op.n0); break;
            case GATED:
                if (op.n0 == SILU) for (int64_t i = 0; i < m; ++i) out[i] = x[i] / (1.0f + exponential(-x[i])) * x[m + i];
                else for (int64_t i = 0; i < m; ++i) out[i] = act(x[i], op.n0) * x[m + i];
                break;
            case ADD: { const float* y = at(op.b) + r * n; for (int64_t i = 0; i < n; ++i) out[i] = x[i] + y[i]; break; }
            case HEAD_NORM:
                memcpy(out, x, n * sizeof(float));
                for (int64_t h = 0; h < op.n0 + op.n1; ++h) rms_norm(x + h * op.n2, h < op.n0 ? w0 : w1, op.f, op.n2, out + h * op.n2);
                break;
            case ROPE:
                memcpy(out, x, n * sizeof(float));
                rope(out, op.n0 + op.n1, op.n2, w0 + batch.positions[r] * (op.n2 / 2), w1 + batch.positions[r] * (op.n2 / 2));
                break;
            case TAP:
                for (int64_t t = 0; t < batch.num_taps; ++t)
                    if (batch.taps[t] == op.n0) memcpy(batch.tapped_out + (r * batch.num_taps + t) * n, x, n * sizeof(float));
                break;
        }
    });
    run.pool.meet();
}

struct Space {  // grown as needed, used by one call at a time
    std::vector<float> floats;
    std::vector<std::vector<float>> local;
    Scratch scratch;
    std::vector<std::atomic<int64_t>> counters;
};
Space& space() { static Space* one = new Space; return *one; }

}  // namespace
}  // namespace paceline

using namespace paceline;

extern "C" {

const char* paceline_path() { return path().name; }
int paceline_select(const char* name) { const Path* found = find_path(name); if (found) chosen = found; return found != nullptr; }
void paceline_threads(int count) { set_threads(count); }
int paceline_num_threads() { std::lock_guard<std::mutex> guard(pool_lock()); return pool().size(); }
int paceline_kind(int source) { return kind_of(source); }
int64_t paceline_tile_bytes(int kind, int64_t columns) { return int64_t(tile_bytes(kind, columns)); }
int64_t paceline_row_bytes(int source, int64_t columns) { return int64_t(row_bytes(source, columns)); }
void paceline_pack(int source, const uint8_t* raw, int64_t rows, int64_t columns, uint8_t* out) { pack_rows(source, raw, rows, columns, out); }
void paceline_pack_dense(int kind, const float* values, int64_t rows, int64_t columns, uint8_t* out) { pack_dense(kind, values, rows, columns, out); }
void paceline_quantise(const float* x, int64_t columns, int8_t* quants, float* scales, float* sums, int32_t* halves) { quantise_row(x, columns, quants, scales, sums, halves); }
void paceline_exp(const float* x, int64_t n, float* out) { for (int64_t i = 0; i < n; ++i) out[i] = exponential(x[i]); }

void paceline_embed(const Weight* w, const int64_t* ids, int64_t count, float* out) {
    for (int64_t i = 0; i < count; ++i) read_rows(*w, ids[i], out + i * w->columns);
}

void paceline_linear(const Weight* w, const float* x, int64_t rows, const float* bias, float* out) {
    if (rows == 0) return;
    std::lock_guard<std::mutex> guard(pool_lock());
    Space& s = space();
    s.scratch.size(rows, w->columns);
    std::atomic<int64_t> counters[2] = {0, 0};
    Pool& threads = pool();
    threads.run([&](int) {
        Run run{threads, counters, s.scratch, s.local};
        linear(run, counters, *w, x, rows, out, bias);
    });
}

void paceline_run(const Program* program, const Batch* batch) {
    if (batch->rows == 0) return;
    std::lock_guard<std::mutex> guard(pool_lock());
    Space& s = space();
    Pool& threads = pool();
    s.floats.resize(std::max<size_t>(s.floats.size(), size_t(program->row_floats * batch->rows)));
    s.local.resize(std::max<size_t>(s.local.size(), size_t(threads.size())));
    for (int64_t i = 0; i < program->num_ops; ++i)
        if (program->ops[i].code == LINEAR) s.scratch.size(batch->rows, static_cast<const Weight*>(program->ops[i].w0)->columns);
    if (s.counters.size() < size_t(2 * program->num_ops)) s.counters = std::vector<std::atomic<int64_t>>(2 * program->num_ops);
    for (auto& counter : s.counters) counter.store(0, std::memory_order_relaxed);
    threads.run([&](int thread) {
        Run run{threads, s.counters.data(), s.scratch, s.local};
        for (int64_t i = 0; i < program->num_ops; ++i)
            run_op(run, *program, program->ops[i], *batch, s.floats.data(), s.counters.data() + 2 * i, thread);
    });
    const Buffer& last = program->buffers[batch->final_buffer];
    memcpy(batch->final_out, s.floats.data() + last.offset * batch->rows, size_t(last.width * batch->rows) * sizeof(float));
}

}
