// The library's entry points and the loop that runs a program. Every operation computes each row by itself, in an order
// that depends on that row alone, so neighbours, chunks, threads and draft branches cannot reach a result.
#include "pack.h"
#include "pool.h"
#include "program.h"
#include <algorithm>
#include <cstring>
#include <new>
#include <unistd.h>

namespace paceline {
namespace {

bool cpu_has(const char* name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!strcmp(name, "amx")) return cpu_has("avx512");  // the path itself asks for the rest
    if (!strcmp(name, "avx512"))
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
    if (!strcmp(name, "avx2")) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
    return !strcmp(name, "portable");
}

const Path* find_path(const char* name) {
    struct { const char* name; const Path* (*path)(); } const all[] = {
        {"amx", amx_path}, {"avx512", avx512_path}, {"avx2", avx2_path}, {"portable", portable_path}};
    for (const auto& one : all)
        if ((!name || !strcmp(name, one.name)) && cpu_has(one.name))  // before anything of that path runs
            if (const Path* path = one.path()) return path;
    return nullptr;
}

const Path* chosen = find_path(nullptr);  // when the library is opened, before there are threads
const Path& path() { return *chosen; }

// ---- what a run shares between threads

// Vectors of 64 bytes are loaded from these: in one access where they begin at a multiple of that.
template <class T> struct Aligned {
    using value_type = T;
    Aligned() = default;
    template <class U> Aligned(const Aligned<U>&) {}
    T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64))); }
    void deallocate(T* at, size_t) { ::operator delete(at, std::align_val_t(64)); }
    bool operator==(const Aligned&) const { return true; }
};
using Floats = std::vector<float, Aligned<float>>;

struct Scratch {  // quantised activations of one linear's input, in panels
    std::vector<Piece> pieces;
    std::vector<const float*> values;
    void size(int64_t rows, int64_t columns) {
        pieces.resize(std::max<size_t>(pieces.size(), size_t(rows * (columns / BLOCK))));
        values.resize(std::max<size_t>(values.size(), size_t(rows)));
    }
    Panel panel(int64_t number, int64_t rows, int64_t columns) const {
        const int64_t first = number * PANEL;
        return {pieces.data() + first * (columns / BLOCK), height(first, rows), values.data() + first};
    }
    Piece* row(int64_t r, int64_t columns) { return pieces.data() + r / PANEL * PANEL * (columns / BLOCK) + r % PANEL; }
    static int64_t height(int64_t first, int64_t rows) { return std::min<int64_t>(PANEL, rows - first); }
};

struct Attention;
struct Run {
    Pool& pool;
    Scratch& scratch;
    Floats& local;  // this thread's own
    Attention& attention;

    // Share out `units` of work in chunks, work(begin, end); every thread calls it with the same arguments.
    template <class Work> void share(std::atomic<int64_t>& counter, int64_t units, int64_t chunk, Work&& work) {
        for (;;) {
            const int64_t begin = counter.fetch_add(chunk, std::memory_order_relaxed);
            if (begin >= units) break;
            work(begin, std::min(units, begin + chunk));
        }
    }
    template <class Work> void each(std::atomic<int64_t>& counter, int64_t units, Work&& work) {
        share(counter, units, 1, [&](int64_t unit, int64_t) { work(unit); });
    }
};

bool needs_quants(const Weight& w) {
    for (int64_t s = 0; s < w.num_segments; ++s)
        if (!is_dense(w.segments[s].kind)) return true;
    return false;
}

// Row r of `rows`.
void quantise(Scratch& s, const Weight& w, const float* x, int64_t r, int64_t rows) {
    s.values[r] = x;
    if (!needs_quants(w)) return;
    path().quantise(x, w.columns, s.row(r, w.columns), Scratch::height(r / PANEL * PANEL, rows));
}

int64_t tiles_of(const Segment& segment) { return (segment.rows + LANES - 1) / LANES; }

// One tile, or a few neighbours, of one segment for some rows.
struct Tiles {
    const Segment* segment;
    int64_t tile, first;  // in the segment; among the weight's rows
    const uint8_t* data;

    Tiles(const Weight& w, int64_t number) : segment(w.segments), tile(number), first(0) {
        while (tile >= tiles_of(*segment)) { tile -= tiles_of(*segment); first += segment->rows; ++segment; }
        first += tile * LANES;
        data = segment->data + tile * tile_bytes(segment->kind, w.columns);
    }
    int64_t lanes(int64_t count = 1) const { return std::min(count * LANES, segment->rows - tile * LANES); }
    void store(const float* result, float* out, const float* bias) const {
        const int64_t count = lanes();
        if (bias) for (int64_t l = 0; l < count; ++l) out[first + l] = result[l] + bias[first + l];
        else if (count == LANES) memcpy(out + first, result, LANES * sizeof(float));
        else memcpy(out + first, result, count * sizeof(float));
    }
};

constexpr int64_t LEAST_MANY = 64;  // rows; for fewer, unpacking the weights first is not worth it

// All tiles of a weight for rows that are quantised already. Whole panels go to the path's function for many rows.
void linear(Run& run, std::atomic<int64_t>& counter, const Weight& w, int64_t rows, float* out, const float* bias) {
    int64_t tiles = 0;
    for (int64_t i = 0; i < w.num_segments; ++i) tiles += tiles_of(w.segments[i]);
    const Scratch& scratch = run.scratch;
    const int64_t whole = path().many && rows >= LEAST_MANY ? rows / PANEL : 0, panels = (rows + PANEL - 1) / PANEL;
    const int64_t least = whole && tiles >= 4 * MANY * run.pool.size() ? MANY : 1, chunk = std::max<int64_t>(1, tiles / (run.pool.size() * 8 * least)) * least;
    const int most = path().max_rows;
    run.share(counter, tiles, chunk, [&](int64_t begin, int64_t end) {
        if (whole) run.local.resize(std::max<size_t>(run.local.size(), size_t(whole * PANEL * MANY * LANES)));
        for (int64_t unit = begin; unit < end;) {
            const Tiles here(w, unit);
            const int64_t some = std::min<int64_t>({MANY, end - unit, tiles_of(*here.segment) - here.tile});
            const bool many = whole && !is_dense(here.segment->kind);
            if (many)
                path().many(here.segment->kind, {here.data, int(some), w.columns, w.columns / BLOCK, scratch.pieces.data(), whole, run.local.data(),
                                                 out + here.first, w.rows, here.lanes(some), bias ? bias + here.first : nullptr});
            for (int64_t t = unit; t < unit + some; ++t) {
                const Tiles one(w, t);
                float result[8][LANES];
                for (int64_t p = many ? whole : 0; p < panels; ++p) {
                    const Panel panel = scratch.panel(p, rows, w.columns);
                    for (int r = 0; r < panel.height; r += most) {
                        const int count = int(std::min<int64_t>(most, panel.height - r));
                        path().tile[one.segment->kind](one.data, w.columns, panel, r, count, result);
                        for (int i = 0; i < count; ++i) one.store(result[i], out + (p * PANEL + r + i) * w.rows, bias);
                    }
                }
            }
            unit += some;
        }
    });
}

void read_rows(const Weight& w, int64_t id, float* out) {
    const Segment* segment = w.segments;
    const Segment* last = w.segments + w.num_segments - 1;
    while (segment < last && id >= segment->rows) { id -= segment->rows; ++segment; }
    if (id < 0 || id >= segment->rows) { memset(out, 0, w.columns * sizeof(float)); return; }  // no such row: no values
    read_row(segment->kind, segment->data + id / LANES * tile_bytes(segment->kind, w.columns), int(id % LANES), w.columns, out);
}

// For every row the cache rows of the positions it may see, by position; made once a run for all layers.
struct Lines {
    std::vector<int32_t> rows;
    std::vector<uint8_t> runs;    // how many from here on follow one another in one group of sixteen
    std::vector<int64_t> starts;  // [rows + 1]

    void fill(const Batch& batch) {
        starts.resize(batch.rows + 1);
        int64_t total = 0;
        for (int64_t r = 0; r < batch.rows; ++r) {
            starts[r] = total;
            total += std::max<int64_t>(0, batch.positions[r] + 1 - (batch.first ? batch.first[r] : 0));
        }
        starts[batch.rows] = total;
        rows.resize(std::max<size_t>(rows.size(), size_t(total)));
        runs.resize(std::max<size_t>(runs.size(), size_t(total)));
        for (int64_t r = 0; r < batch.rows; ++r) {
            fill_row(batch, r, rows.data() + starts[r]);
            const int32_t* line = rows.data() + starts[r];
            uint8_t* run = runs.data() + starts[r];
            for (int64_t last = starts[r + 1] - starts[r] - 1, i = last; i >= 0; --i)
                run[i] = i < last && line[i + 1] == line[i] + 1 && line[i + 1] % LANES ? run[i + 1] + 1 : 1;
        }
    }

    static void fill_row(const Batch& batch, int64_t r, int32_t* to) {
        const int64_t* pages = batch.page_table + batch.slots[r] * batch.table_width;
        const int64_t size = batch.block_size, last = batch.positions[r], base = batch.path ? batch.tree_base[r] : last + 1;
        int64_t position = batch.first ? batch.first[r] : 0;
        while (position <= last && position < base) {  // page by page
            const int64_t page = position / size, end = std::min({(page + 1) * size, base, last + 1});
            const int64_t shift = pages[page] * size - page * size;
            for (; position < end; ++position) *to++ = int32_t(position + shift);
        }
        for (; position <= last; ++position) {  // its ancestors among the undecided nodes
            const int64_t line = base + batch.path[r * batch.path_width + position - base];
            *to++ = int32_t(pages[line / size] * size + line % size);
        }
    }
};

// Rows that follow one another and belong to one sequence, a few at a time, as shares of work for attention.
struct Group { int64_t first; int count; };

void group_rows(const Batch& batch, const Lines& lines, int64_t kv_heads, int threads, std::vector<Group>& groups) {
    groups.clear();
    for (int64_t r = 0; r < batch.rows;) {
        int64_t end = r + 1;
        while (end < batch.rows && batch.slots[end] == batch.slots[r]) ++end;
        int64_t parts = (end - r + LOOKS - 1) / LOOKS;
        const int64_t stretches = (lines.starts[end] - lines.starts[end - 1] + STRETCH - 1) / STRETCH;
        if (kv_heads % threads && parts * stretches < threads)  // something for everybody
            parts = std::max<int64_t>(parts, std::min<int64_t>(end - r, threads));
        for (int64_t p = 0; p < parts; ++p) {
            const int64_t from = r + (end - r) * p / parts, to = r + (end - r) * (p + 1) / parts;
            groups.push_back({from, int(to - from)});
        }
        r = end;
    }
}

bool by_row(int32_t code) { return code != LINEAR && code != ATTENTION; }

struct Frame {  // one run's tensors
    const Program& program;
    const Batch& batch;
    const Lines& lines;
    const std::vector<Group>& groups;
    float* floats;
    float* at(int32_t number, int64_t row = 0) const {
        const Buffer& buffer = program.buffers[number];
        return floats + buffer.offset * batch.rows + row * buffer.width;
    }
    int64_t width(int32_t number) const { return program.buffers[number].width; }
};

// One group's look at one kv head: partial results of stretches, merged in ascending order.
struct Attending {
    const Frame& frame;
    const Op& op;
    const Group& group;
    Look look;
    int64_t kv, step, stretches = 0;

    Attending(const Frame& f, const Op& o, const Group& g, int64_t head) : frame(f), op(o), group(g), kv(head), step(partial_floats(o.n2)) {
        const int64_t layer = op.n3 & 0xFFFF, window = op.n3 >> 16, start = kv * frame.batch.head_stride;
        look = {frame.batch.keys[layer] + start, frame.batch.values[layer] + start, op.n0 / op.n1, op.n2, group.count, {}};
        for (int i = 0; i < group.count; ++i) {
            const int64_t r = group.first + i, end = frame.lines.starts[r + 1];
            int64_t count = end - frame.lines.starts[r];
            if (window > 0) count = std::min(count, window);
            look.rows[i] = {frame.at(op.a, r) + kv * look.group * op.n2, frame.lines.rows.data() + end - count, frame.lines.runs.data() + end - count, count};
            stretches = std::max(stretches, (count + STRETCH - 1) / STRETCH);
        }
    }
    static int64_t floats(const Op& op) { return LOOKS * (op.n0 / op.n1) * (partial_floats(op.n2) + STRETCH); }  // of one call
    void partial(int64_t stretch, float* to) const { path().attend(look, stretch * STRETCH, to); }
    void merge(int64_t stretch, float* into, const float* next) const {
        for (int i = 0; i < group.count; ++i)
            for (int64_t g = 0; g < look.group && look.rows[i].count > stretch * STRETCH; ++g)
                path().merge(into + (i * look.group + g) * step, next + (i * look.group + g) * step, op.n2);
    }
    void finish(const float* whole) const {
        for (int i = 0; i < group.count; ++i)
            for (int64_t g = 0; g < look.group; ++g) {
                float* out = frame.at(op.out, group.first + i) + (kv * look.group + g) * op.n2;
                if (look.rows[i].count > 0) path().finish(whole + (i * look.group + g) * step, op.n2, out);
                else memset(out, 0, op.n2 * sizeof(float));  // a row that may see nothing
            }
    }
};

// Where there is little else to share out, threads take stretches and the last to end merges; else whole groups.
struct Attention {
    static constexpr int64_t MOST_FLOATS = int64_t(16) << 20;  // of partial results kept at a time
    bool split = false;
    int64_t stretches = 0;           // of the longest row
    Floats partials;                 // [groups x kv heads, stretches, floats of one call]
    std::vector<std::atomic<int64_t>> left;  // [groups x kv heads] stretches not done yet

    void prepare(const Program& program, const Lines& lines, int64_t rows, int64_t groups, int threads) {
        stretches = 0;
        for (int64_t r = 0; r < rows; ++r) stretches = std::max(stretches, (lines.starts[r + 1] - lines.starts[r] + STRETCH - 1) / STRETCH);
        const int64_t units = groups * program.kv_heads();
        int64_t most = 0;
        for (int64_t i = 0; i < program.num_ops; ++i)
            if (program.ops[i].code == ATTENTION) most = std::max(most, Attending::floats(program.ops[i]));
        split = threads > 1 && stretches > 1 && units < 4 * threads && units * stretches * most <= MOST_FLOATS;
        if (!split) return;
        if (int64_t(left.size()) < units) left = std::vector<std::atomic<int64_t>>(units);
        for (auto& count : left) count.store(stretches, std::memory_order_relaxed);
        partials.resize(std::max<size_t>(partials.size(), size_t(units * stretches * most)));
    }

    void part(const Frame& frame, const Op& op, int64_t unit) {
        const int64_t which = unit / stretches, stretch = unit % stretches, size = Attending::floats(op);
        const Attending one(frame, op, frame.groups[which / op.n1], which % op.n1);
        float* all = partials.data() + which * stretches * size;
        if (stretch < one.stretches) one.partial(stretch, all + stretch * size);
        if (left[which].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
        left[which].store(stretches, std::memory_order_relaxed);  // for the next layer
        for (int64_t s = 1; s < one.stretches; ++s) one.merge(s, all, all + s * size);
        one.finish(all);
    }

    static void whole(const Frame& frame, const Op& op, int64_t unit, Floats& memory) {
        const Attending one(frame, op, frame.groups[unit / op.n1], unit % op.n1);
        const int64_t size = Attending::floats(op);
        memory.resize(std::max<size_t>(memory.size(), size_t(2 * size)));
        one.partial(0, memory.data());
        for (int64_t s = 1; s < one.stretches; ++s) {
            one.partial(s, memory.data() + size);
            one.merge(s, memory.data(), memory.data() + size);
        }
        one.finish(memory.data());
    }
};

void row_op(const Frame& frame, Scratch& scratch, const Op& op, int64_t r) {
    const Batch& batch = frame.batch;
    const int64_t n = op.a >= 0 ? frame.width(op.a) : 0;
    const float* x = op.a >= 0 ? frame.at(op.a, r) : nullptr;
    float* out = op.out >= 0 ? frame.at(op.out, r) : nullptr;
    const float* w0 = static_cast<const float*>(op.w0);
    const float* w1 = static_cast<const float*>(op.w1);
    switch (op.code) {
        case EMBED: read_rows(*static_cast<const Weight*>(op.w0), batch.ids[r], out); break;
        case POSITIONS: path().add(x, w0 + (batch.positions[r] + op.n0) * n, n, out); break;
        case QUANTISE: quantise(scratch, *static_cast<const Weight*>(op.w0), x, r, batch.rows); break;
        case RMS_NORM: path().rms_norm(x, w0, op.f, n, out); break;
        case LAYER_NORM: path().layer_norm(x, w0, w1, op.f, n, out); break;
        case ACTIVATION: path().activate(x, n, op.n0, out); break;
        case GATED: path().gated(x, n / 2, op.n0, out); break;
        case ADD: path().add(x, frame.at(op.b, r), n, out); break;
        case HEAD_NORM:
            memcpy(out, x, n * sizeof(float));
            for (int64_t h = 0; h < op.n0 + op.n1; ++h)
                path().rms_norm(x + h * op.n2, h < op.n0 ? w0 : w1, op.f, op.n2, out + h * op.n2);
            break;
        case ROPE:
            memcpy(out, x, n * sizeof(float));
            path().rope(out, op.n0 + op.n1, op.n2, w0 + batch.positions[r] * (op.n2 / 2), w1 + batch.positions[r] * (op.n2 / 2));
            break;
        case STORE: {
            const int64_t layer = op.n3 & 0xFFFF, line = batch.write[r], width = op.n2;
            const float *key = x + op.n0 * width, *value = key + op.n1 * width;
            for (int64_t h = 0; h < op.n1; ++h, key += width, value += width) {
                float* keys = batch.keys[layer] + h * batch.head_stride + key_offset(line, width);
                for (int64_t d = 0; d < width; ++d) keys[d * LANES] = key[d];
                memcpy(batch.values[layer] + h * batch.head_stride + line * width, value, width * sizeof(float));
            }
            break;
        }
        case TAP:
            for (int64_t t = 0; t < batch.num_taps; ++t)
                if (batch.taps[t] == op.n0) memcpy(batch.tapped_out + r * batch.tap_width + batch.tap_offsets[t], x, n * sizeof(float));
            break;
    }
}

// Operations on single rows that follow one another are done row by row without a meeting in between.
void run_program(Run& run, const Frame& frame, std::atomic<int64_t>* counters) {
    const Program& program = frame.program;
    const int64_t rows = frame.batch.rows;
    for (int64_t i = 0; i < program.num_ops;) {
        const Op& op = program.ops[i];
        int64_t end = i + 1;
        if (by_row(op.code)) {
            while (end < program.num_ops && by_row(program.ops[end].code)) ++end;
            // Neighbouring rows to one thread: their keys share cache lines.
            const int64_t chunk = std::min<int64_t>(LANES, (rows + run.pool.size() - 1) / run.pool.size());
            run.share(counters[i], rows, chunk, [&](int64_t first, int64_t last) {
                for (int64_t r = first; r < last; ++r)
                    for (int64_t k = i; k < end; ++k) row_op(frame, run.scratch, program.ops[k], r);
            });
        } else if (op.code == LINEAR) {
            linear(run, counters[i], *static_cast<const Weight*>(op.w0), rows, frame.at(op.out), static_cast<const float*>(op.w1));
        } else {
            const int64_t units = int64_t(frame.groups.size()) * op.n1;
            if (run.attention.split) {
                const int64_t parts = units * run.attention.stretches, chunk = std::max<int64_t>(1, parts / (3 * run.pool.size()));
                run.share(counters[i], parts, chunk, [&](int64_t first, int64_t last) {  // neighbours, for what comes next is asked for early
                    for (int64_t unit = first; unit < last; ++unit) run.attention.part(frame, op, unit);
                });
            } else run.each(counters[i], units, [&](int64_t unit) { Attention::whole(frame, op, unit, run.local); });
        }
        run.pool.meet();
        i = end;
    }
}

// The vocabulary's logits for the rows that were asked for, and the best of each. Takes three counters.
void run_head(Run& run, const Frame& frame, std::atomic<int64_t>* counters) {
    const Batch& batch = frame.batch;
    const Weight& head = *batch.head;
    run.each(counters[0], batch.num_head_rows, [&](int64_t r) {
        quantise(run.scratch, head, frame.at(int32_t(batch.final_buffer), batch.head_rows[r]), r, batch.num_head_rows);
    });
    run.pool.meet();
    linear(run, counters[1], head, batch.num_head_rows, batch.logits_out, nullptr);
    run.pool.meet();
    run.each(counters[2], batch.num_head_rows, [&](int64_t r) { batch.best_out[r] = path().largest(batch.logits_out + r * head.rows, head.rows); });
    run.pool.meet();
}

struct Space {  // grown as needed, used by one call at a time
    Floats floats;
    std::vector<Floats> local;
    Scratch scratch;
    Lines lines;
    std::vector<Group> groups;
    Attention attention;
    std::vector<std::atomic<int64_t>> counters;
    void threads(int count) { local.resize(std::max<size_t>(local.size(), size_t(count))); }
};
Space& space() {  // a child of fork starts with its own: the parent's may have been caught growing
    static Space* one = nullptr;
    static pid_t owner = 0;
    if (owner != getpid()) { one = new Space; owner = getpid(); }
    return *one;
}

}  // namespace
}  // namespace paceline

using namespace paceline;

extern "C" {

const char* paceline_path() { return path().name; }
int paceline_select(const char* name) {
    std::lock_guard<std::mutex> guard(pool_lock());
    const Path* found = find_path(name);
    if (found) chosen = found;
    return found != nullptr;
}
void paceline_threads(int count) { set_threads(count); }
int paceline_num_threads() { std::lock_guard<std::mutex> guard(pool_lock()); return pool().size(); }
int paceline_kind(int source) { return kind_of(source); }
int64_t paceline_tile_bytes(int kind, int64_t columns) { return int64_t(tile_bytes(kind, columns)); }
int64_t paceline_row_bytes(int source, int64_t columns) { return int64_t(row_bytes(source, columns)); }
void paceline_pack(int source, const uint8_t* raw, int64_t rows, int64_t columns, uint8_t* out) { pack_rows(source, raw, rows, columns, out); }
void paceline_pack_dense(int kind, const float* values, int64_t rows, int64_t columns, uint8_t* out) { pack_dense(kind, values, rows, columns, out); }
void paceline_quantise(const float* x, int64_t columns, int8_t* quants, float* scales, float* sums, int32_t* halves) {
    std::vector<Piece> pieces(columns / BLOCK);
    path().quantise(x, columns, pieces.data(), 1);
    for (const Piece& piece : pieces) {
        memcpy(quants, piece.quants, BLOCK);
        *scales++ = piece.scale;
        *sums++ = piece.sum;
        *halves++ = piece.halves[0];
        *halves++ = piece.halves[1];
        quants += BLOCK;
    }
}
void paceline_exp(const float* x, int64_t n, float* out) { path().exponentials(x, n, out); }
int64_t paceline_largest(const float* x, int64_t n) { return path().largest(x, n); }

// Noise for `rows` keys over a vocabulary, shared out in pieces.
void paceline_gumbel(const int64_t* first, const int64_t* second, int64_t rows, int64_t vocabulary, const double* inverse, const double* logarithm, float* out) {
    if (rows == 0) return;
    constexpr int64_t PIECE = 4096;
    const int64_t pieces = (vocabulary + PIECE - 1) / PIECE;
    std::lock_guard<std::mutex> guard(pool_lock());
    Space& s = space();
    Pool& threads = pool();
    std::atomic<int64_t> counter{0};
    s.threads(threads.size());
    threads.run([&](int thread) {
        Run run{threads, s.scratch, s.local[thread], s.attention};
        run.each(counter, rows * pieces, [&](int64_t unit) {
            const int64_t r = unit / pieces, begin = unit % pieces * PIECE;
            path().gumbel(uint32_t(first[r]), uint32_t(second[r]), begin, std::min(vocabulary, begin + PIECE), inverse, logarithm, out + r * vocabulary);
        });
        threads.meet();
    });
}

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
    s.threads(threads.size());
    threads.run([&](int thread) {
        Run run{threads, s.scratch, s.local[thread], s.attention};
        run.each(counters[0], rows, [&](int64_t r) { quantise(s.scratch, *w, x + r * w->columns, r, rows); });
        threads.meet();
        linear(run, counters[1], *w, rows, out, bias);
        threads.meet();
    });
}

// Moves rows of the cache; all are read before any is written. head_stride: from one head of a layer to the next.
void paceline_keep(float* const* keys, float* const* values, int64_t layers, int64_t heads, int64_t width, int64_t head_stride,
                   const int64_t* source, const int64_t* target, int64_t count) {
    std::vector<float> moved(2 * count * width);
    for (int64_t layer = 0; layer < layers; ++layer)
        for (int64_t h = 0; h < heads; ++h) {
            float *key = keys[layer] + h * head_stride, *value = values[layer] + h * head_stride, *at = moved.data();
            for (int64_t i = 0; i < count; ++i, at += 2 * width) {
                const float* column = key + key_offset(source[i], width);
                for (int64_t d = 0; d < width; ++d) at[d] = column[d * LANES];
                memcpy(at + width, value + source[i] * width, width * sizeof(float));
            }
            at = moved.data();
            for (int64_t i = 0; i < count; ++i, at += 2 * width) {
                float* column = key + key_offset(target[i], width);
                for (int64_t d = 0; d < width; ++d) column[d * LANES] = at[d];
                memcpy(value + target[i] * width, at + width, width * sizeof(float));
            }
        }
}

void paceline_run(const Program* program, const Batch* batch) {
    if (batch->rows == 0) return;
    std::lock_guard<std::mutex> guard(pool_lock());
    Space& s = space();
    Pool& threads = pool();
    s.floats.resize(std::max<size_t>(s.floats.size(), size_t(program->row_floats * batch->rows)));
    s.threads(threads.size());
    for (int64_t i = 0; i < program->num_ops; ++i)
        if (program->ops[i].code == LINEAR) s.scratch.size(batch->rows, static_cast<const Weight*>(program->ops[i].w0)->columns);
    if (batch->head) s.scratch.size(batch->num_head_rows, batch->head->columns);
    if (s.counters.size() < size_t(program->num_ops + 3)) s.counters = std::vector<std::atomic<int64_t>>(program->num_ops + 3);
    for (auto& counter : s.counters) counter.store(0, std::memory_order_relaxed);
    s.lines.fill(*batch);
    group_rows(*batch, s.lines, program->kv_heads(), threads.size(), s.groups);
    s.attention.prepare(*program, s.lines, batch->rows, int64_t(s.groups.size()), threads.size());
    const Frame frame{*program, *batch, s.lines, s.groups, s.floats.data()};
    threads.run([&](int thread) {
        Run run{threads, s.scratch, s.local[thread], s.attention};
        run_program(run, frame, s.counters.data());
        if (batch->head) run_head(run, frame, s.counters.data() + program->num_ops);
    });
    const Buffer& last = program->buffers[batch->final_buffer];
    memcpy(batch->final_out, s.floats.data() + last.offset * batch->rows, size_t(last.width * batch->rows) * sizeof(float));
}

}
