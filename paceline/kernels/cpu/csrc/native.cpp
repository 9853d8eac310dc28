// The library's entry points and the loop that runs a program. Every operation computes each row by itself, in an order
// that depends on that row alone, so neighbours, chunks, threads and draft branches cannot reach a result.
#include "pack.h"
#include "pool.h"
#include "program.h"
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <string>
#include <unistd.h>

namespace paceline {
namespace {

#include "dispatch.inl"
#include "sharing.inl"
#include "linear.inl"
#include "attention.inl"
#include "heads.inl"
#include "experts.inl"
#include "picking.inl"
#include "chain.inl"

bool by_row(int32_t code) { return code != LINEAR && code != ATTENTION && code != PER_HEAD && code != SORT && code != EXPERTS; }

// What the pairs at the places of row r want done, whosever they are.
void pair_op(const Run& run, const Frame& frame, const Op& op, int64_t r) {
    Pairs& pairs = run.pairs;
    for (int64_t p = r * op.n0; p < (r + 1) * op.n0; ++p) {
        if (op.code == SPREAD) {
            quantise_pair(run.scratch, pairs, op, frame.at(op.a, pairs.rows[p]), p);
        } else {
            const int64_t width = static_cast<const Weight*>(op.w0)->columns;
            float* narrow = pairs.narrow.data() + p * width;
            path().gated(pairs.products.data() + p * 2 * width, width, op.n2, narrow);
            quantise_pair(run.scratch, pairs, op, narrow, p);
        }
    }
}

void row_op(const Run& run, const Frame& frame, const Op& op, int64_t r) {
    const Batch& batch = frame.batch;
    const int64_t n = op.a >= 0 ? frame.width(op.a) : 0;
    const float* x = op.a >= 0 ? frame.at(op.a, r) : nullptr;
    float* out = op.out >= 0 ? frame.at(op.out, r) : nullptr;
    const float* w0 = static_cast<const float*>(op.w0);
    const float* w1 = static_cast<const float*>(op.w1);
    switch (op.code) {
        case EMBED: read_rows(*static_cast<const Weight*>(op.w0), batch.ids[r], out); break;
        case POSITIONS: path().add(x, w0 + (batch.positions[r] + op.n0) * n, n, out); break;
        case QUANTISE:
            if (op.n0) quantise_heads(run.scratch, op, x, r, batch.rows);
            else quantise(run.scratch, *static_cast<const Weight*>(op.w0), x, r, batch.rows);
            break;
        case RMS_NORM:
            path().rms_norm(x, w0, op.f, n, out);
            if (w1) path().add(out, w1, n, out);
            break;
        case LAYER_NORM: path().layer_norm(x, w0, w1, op.f, n, out); break;
        case ACTIVATION: path().activate(x, n, op.n0, out); break;
        case GATED: path().gated(x, n / 2, op.n0, out); break;
        case ADD: path().add(x, frame.at(op.b, r), n, out); break;
        case MULTIPLY: path().multiply(x, frame.at(op.b, r), n, out); break;
        case SCALE: path().scale(x, op.f, n, out); break;
        case INPUT: memcpy(out, batch.named[op.n0] + r * frame.width(op.out), frame.width(op.out) * sizeof(float)); break;
        case COLUMNS: memcpy(out, x + op.n0, frame.width(op.out) * sizeof(float)); break;
        case CONCAT:
            memcpy(out, x, n * sizeof(float));
            memcpy(out + n, frame.at(op.b, r), frame.width(op.b) * sizeof(float));
            break;
        case HEAD_NORM:
            memcpy(out, x, n * sizeof(float));
            for (int64_t h = 0; h < op.n0 + op.n1; ++h)
                path().rms_norm(x + h * op.n2, h < op.n0 ? w0 : w1, op.f, op.n2, out + h * op.n2);
            break;
        case ROPE:
            memcpy(out, x, n * sizeof(float));
            path().rope(out, op.n0 + op.n1, op.n2, op.n3, w0 + batch.positions[r] * op.n3, w1 + batch.positions[r] * op.n3);
            break;
        case STORE: {
            const Layer& layer = batch.layers[op.n3];
            const int64_t line = (batch.windowed_table && op.n4 > 0 ? batch.windowed_write : batch.write)[r];
            const int64_t width = op.n2, other = layer.value_width;
            const float *key = x + op.n0 * width, *value = key + op.n1 * width;
            if (!layer.values) { memcpy(layer.keys + line * width, key, width * sizeof(float)); break; }
            for (int64_t h = 0; h < op.n1; ++h, key += width, value += other) {
                float* keys = layer.keys_of(h) + key_offset(line, width);
                for (int64_t d = 0; d < width; ++d) keys[d * LANES] = key[d];
                memcpy(layer.values_of(h) + line * other, value, other * sizeof(float));
            }
            break;
        }
        case ROUTE: route(op, x, n, out); break;
        case SPREAD: case EXPERT_GATED: pair_op(run, frame, op, r); break;
        case COMBINE: combine(run.pairs, op, x, r, frame.width(op.out), out); break;
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
                    for (int64_t k = i; k < end; ++k) row_op(run, frame, program.ops[k], r);
            });
        } else if (op.code == LINEAR) {
            linear(run, counters[i], *static_cast<const Weight*>(op.w0), rows, frame.at(op.out), static_cast<const float*>(op.w1));
        } else if (op.code == PER_HEAD) {
            per_head(run, counters[i], frame, op);
        } else if (op.code == SORT) {
            run.each(counters[i], 1, [&](int64_t) { sort_pairs(frame, run.pairs, op); });
        } else if (op.code == EXPERTS) {
            expert_linear(run, counters[i], op);
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

struct Space {  // grown as needed, used by one call at a time
    Floats floats;
    std::vector<Floats> local;
    Scratch scratch;
    std::vector<Lines> lines;
    std::vector<Group> groups;
    Attention attention;
    Pairs pairs;
    std::vector<std::atomic<int64_t>> counters;
    std::vector<int64_t> places;  // of a chain's rows
    Floats logits, disturbed;
    void threads(int count) { local.resize(std::max<size_t>(local.size(), size_t(count))); }
};
Space& space() {  // a child of fork starts with its own: the parent's may have been caught growing
    static Space* one = nullptr;
    static pid_t owner = 0;
    if (owner != getpid()) { one = new Space; owner = getpid(); }
    return *one;
}

// Memory for a run, and who looks at what in it.
Frame prepare(Space& s, const Program& program, const Batch& batch, int threads) {
    s.floats.resize(std::max<size_t>(s.floats.size(), size_t(program.row_floats * batch.rows)));
    s.threads(threads);
    for (int64_t i = 0; i < program.num_ops; ++i) {
        const Op& op = program.ops[i];
        const Weight* w = static_cast<const Weight*>(op.w0);
        if (op.code == LINEAR) s.scratch.size(batch.rows, w->columns);
        if (op.code == PER_HEAD) s.scratch.size(op.n0 * Scratch::whole(batch.rows), w->columns);
        if (op.code == EXPERTS) s.scratch.size(batch.rows * op.n0, w->columns);
        if (op.code == SORT) s.pairs.size(batch.rows * op.n0, op.n1, *w, *static_cast<const Weight*>(op.w1));
    }
    if (batch.head) s.scratch.size(batch.num_head_rows, batch.head->columns);
    const size_t counters = size_t(program.num_ops + HEAD_COUNTERS);
    if (s.counters.size() < counters) s.counters = std::vector<std::atomic<int64_t>>(counters);
    for (auto& counter : s.counters) counter.store(0, std::memory_order_relaxed);
    if (program.kv_heads()) {  // else there may be no layout
        s.lines.resize(std::max<size_t>(s.lines.size(), size_t(2 + program.num_bounds)));
        for (int64_t which = 0; which <= program.num_bounds; ++which)
            s.lines[which].fill(batch, batch.page_table, which ? batch.bounds[which - 1] : nullptr, 0);
        if (batch.windowed_table) s.lines[1 + program.num_bounds].fill(batch, batch.windowed_table, nullptr, program.window());
        group_rows(batch, s.lines[0], program.kv_heads(), threads, s.groups);
        s.attention.prepare(program, s.lines, batch.rows, int64_t(s.groups.size()), threads);
    }
    return {program, batch, s.lines, s.groups, s.floats.data()};
}

}  // namespace
}  // namespace paceline

using namespace paceline;

extern "C" {

// What both sides must agree on: the names that are numbered, the sizes of what they share, the rows that lie together.
const char* paceline_agreement() {
#define WORD(name) #name " "
    static const std::string told = [] {
        std::string words = PACELINE_OPERATIONS(WORD) PACELINE_KINDS(WORD) PACELINE_SOURCES(WORD) PACELINE_ACTIVATIONS(WORD);
        for (const size_t size : {sizeof(Segment), sizeof(Weight), sizeof(Op), sizeof(Buffer), sizeof(Layer), sizeof(Program), sizeof(Batch), sizeof(Keys), sizeof(Picking), sizeof(Link), sizeof(Chain), size_t(LANES)})
            words += std::to_string(size) + " ";
        return words;
    }();
#undef WORD
    return told.c_str();
}
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
int64_t paceline_weight_bytes(int kind, int64_t rows, int64_t columns) { return tiles_of(rows) * int64_t(tile_bytes(kind, columns)); }
int64_t paceline_row_bytes(int source, int64_t columns) { return int64_t(row_bytes(source, columns)); }
void paceline_pack(int source, const uint8_t* raw, int64_t rows, int64_t columns, uint8_t* out) { pack_rows(source, raw, rows, columns, out); }
void paceline_pack_dense(int kind, const uint8_t* values, int64_t rows, int64_t columns, uint8_t* out) { pack_dense(kind, values, rows, columns, out); }
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
void paceline_gumbel(const Keys* keys, int64_t rows, int64_t vocabulary, float* out) {
    if (rows == 0) return;
    constexpr int64_t PIECE = 4096;
    const int64_t pieces = (vocabulary + PIECE - 1) / PIECE;
    std::lock_guard<std::mutex> guard(pool_lock());
    Space& s = space();
    Pool& threads = pool();
    std::atomic<int64_t> counter{0};
    s.threads(threads.size());
    threads.run([&](int thread) {
        Run run{threads, s.scratch, s.local[thread], s.attention, s.pairs};
        run.each(counter, rows * pieces, [&](int64_t unit) {
            const int64_t r = unit / pieces, begin = unit % pieces * PIECE;
            path().gumbel(keys->noise(r, 0), begin, std::min(vocabulary, begin + PIECE), out + r * vocabulary);
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
        Run run{threads, s.scratch, s.local[thread], s.attention, s.pairs};
        run.each(counters[0], rows, [&](int64_t r) { quantise(s.scratch, *w, x + r * w->columns, r, rows); });
        threads.meet();
        linear(run, counters[1], *w, rows, out, bias);
        threads.meet();
    });
}

// Moves rows of the cache; all are read before any is written.
void paceline_keep(const Layer* layers, int64_t num_layers, const int64_t* source, const int64_t* target, int64_t count) {
    std::vector<float> moved;
    for (const Layer* layer = layers; layer < layers + num_layers; ++layer) {
        const int64_t width = layer->width;
        const auto whole = [&](float* rows, int64_t size) {  // what lies row by row
            moved.resize(std::max<size_t>(moved.size(), size_t(count * size)));
            for (int64_t i = 0; i < count; ++i) memcpy(moved.data() + i * size, rows + source[i] * size, size * sizeof(float));
            for (int64_t i = 0; i < count; ++i) memcpy(rows + target[i] * size, moved.data() + i * size, size * sizeof(float));
        };
        if (!layer->values) whole(layer->keys, width);
        for (int64_t h = 0; h < layer->heads && layer->values; ++h) {
            whole(layer->values_of(h), layer->value_width);
            moved.resize(std::max<size_t>(moved.size(), size_t(count * width)));
            float *key = layer->keys_of(h), *at = moved.data();
            for (int64_t i = 0; i < count; ++i, at += width) {
                const float* column = key + key_offset(source[i], width);
                for (int64_t d = 0; d < width; ++d) at[d] = column[d * LANES];
            }
            at = moved.data();
            for (int64_t i = 0; i < count; ++i, at += width) {
                float* column = key + key_offset(target[i], width);
                for (int64_t d = 0; d < width; ++d) column[d * LANES] = at[d];
            }
        }
    }
}

void paceline_run(const Program* program, const Batch* batch) {
    if (batch->rows == 0) return;
    std::lock_guard<std::mutex> guard(pool_lock());
    Space& s = space();
    Pool& threads = pool();
    const Frame frame = prepare(s, *program, *batch, threads.size());
    const float* finals = frame.at(int32_t(batch->final_buffer));
    std::atomic<int64_t>* counters = s.counters.data() + program->num_ops;
    threads.run([&](int thread) {
        Run run{threads, s.scratch, s.local[thread], s.attention, s.pairs};
        run_program(run, frame, s.counters.data());
        if (!batch->head) return;
        run_head(run, *batch, finals, counters);
        Picker{batch->logits_out, batch->num_head_rows, batch->head->rows, nullptr, nullptr, 0, nullptr, batch->best_out}(run, counters + 2);
    });
    memcpy(batch->final_out, finals, size_t(program->buffers[batch->final_buffer].width * batch->rows) * sizeof(float));
}

// The token of each row of logits [rows, size].
void paceline_pick(const float* logits, int64_t rows, int64_t size, const Picking* picking, int64_t* out) {
    if (rows == 0) return;
    std::lock_guard<std::mutex> guard(pool_lock());
    Space& s = space();
    Pool& threads = pool();
    s.threads(threads.size());
    s.disturbed.resize(std::max<size_t>(s.disturbed.size(), size_t(rows * size)));
    std::atomic<int64_t> counters[3] = {0, 0, 0};
    const Picker picker{logits, rows, size, nullptr, picking, 0, s.disturbed.data(), out};
    threads.run([&](int thread) {
        Run run{threads, s.scratch, s.local[thread], s.attention, s.pairs};
        picker(run, counters);
    });
}

void paceline_chain(const Batch* given, const Chain* chain) {
    if (given->rows == 0) return;
    std::lock_guard<std::mutex> guard(pool_lock());
    Space& s = space();
    Pool& threads = pool();
    ChainRows rows(s.places, *given, *chain);
    Batch batch = *given;
    rows.lend(batch);
    for (int64_t step = 0; step < chain->steps; ++step) {
        const Link& link = chain->links[step];
        const Program program = link.program ? *link.program : Program{};
        const int64_t size = link.head->rows;
        for (Floats* floats : {&s.logits, &s.disturbed}) floats->resize(std::max<size_t>(floats->size(), size_t(batch.rows * size)));
        batch.head = link.head;
        batch.logits_out = s.logits.data();
        const Frame frame = prepare(s, program, batch, threads.size());
        const float* finals = link.program ? frame.at(int32_t(link.final_buffer)) : chain->finals;
        std::atomic<int64_t>* counters = s.counters.data() + program.num_ops;
        threads.run([&](int thread) {
            Run run{threads, s.scratch, s.local[thread], s.attention, s.pairs};
            run_program(run, frame, s.counters.data());
            run_head(run, batch, finals, counters, link.bias);
            Picker{s.logits.data(), batch.rows, size, chain->ids, chain->picking, step, s.disturbed.data(), rows.ids}(run, counters + 2);
        });
        if (!rows.take(step, s.logits.data(), s.disturbed)) break;
    }
}

}
