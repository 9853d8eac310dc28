// A model's forward as a flat list of operations, and everything one run of it needs. Mirrored in library.py.
#pragma once
#include "packed.h"

namespace paceline {

struct Segment { int32_t kind; int32_t pad; const uint8_t* data; int64_t rows; };
struct Weight { const Segment* segments; int64_t num_segments, rows, columns; };

#define PACELINE_OPERATIONS(X)                                                                                              \
    X(EMBED) X(INPUT) X(POSITIONS) X(QUANTISE) X(LINEAR) X(RMS_NORM) X(LAYER_NORM) X(ACTIVATION) X(GATED) X(ADD) X(MULTIPLY) \
    X(SCALE) X(CONCAT) X(COLUMNS) X(HEAD_NORM) X(ROPE) X(STORE) X(ATTENTION) X(TAP)                                          \
    X(PER_HEAD) X(ROUTE) X(SORT) X(SPREAD) X(EXPERTS) X(EXPERT_GATED) X(COMBINE)
enum OpCode : int32_t { PACELINE_OPERATIONS(PACELINE_NUMBER) };

// Values are buffers, by number; a, b are inputs, out the result. The rest means what the operation says:
//   heads (HEAD_NORM, ROPE, STORE, ATTENTION)  n0 query heads, n1 kv heads, n2 their width
//   ROPE                                       n3 columns of the tables: twice as many values of a head turn
//   STORE, ATTENTION                           n3 cache layer; n4 window or 0; values may have a width of their own, to be
//                                              seen from the buffers
//   ATTENTION                                  n5 which lines: 0 the layout's, else a bound's, from 1 on;
//                                              f scale or 0 (the usual), g softcap or 0 (none)
//                                              b the rows of a latent layer, or nothing: all heads look at them, n0 / n1 at a time
//   QUANTISE, PER_HEAD                         n0 heads that each have a matrix, or 0; n1 values of a head that are kept
//   ROUTE … COMBINE                            n0 chosen of a row; w0 a stack of the experts' matrices, one under another
//   ROUTE                                      n1 1: sigmoid, 0: softmax; n2 1: weights are normalised; n3 groups, n4 of
//                                              them kept; f factor; w0 bias or nullptr; out: see experts.inl
//   SORT … EXPERT_GATED                        n1 how many experts there are
//   EXPERT_GATED                               n2 activation
struct Op {
    int32_t code, a, b, out;
    int64_t n0, n1, n2, n3, n4, n5;
    float f, g;
    const void* w0;
    const void* w1;
};

struct Buffer { int64_t offset, width; };  // floats a row

// A cache layer: a head's keys begin at head * rows * width, its values alike; both lie as packed.h says. A latent layer
// has no values: its rows, of which there is one for all heads, are both and lie row by row.
struct Layer {
    float *keys, *values;
    int64_t rows, heads, width, value_width;
    float* keys_of(int64_t head) const { return keys + head * rows * width; }
    float* values_of(int64_t head) const { return values + head * rows * value_width; }
};

struct Program {
    const Op* ops; int64_t num_ops;
    const Buffer* buffers; int64_t num_buffers;
    int64_t row_floats;  // of all buffers together
    int64_t num_bounds;
    int64_t value_width(const Op& op) const { return buffers[op.out].width / op.n0; }  // of an ATTENTION
    int64_t kv_heads() const {  // the most of a layer; 0: nothing is looked at
        int64_t most = 0;
        for (int64_t i = 0; i < num_ops; ++i) if (ops[i].code == ATTENTION && ops[i].n1 > most) most = ops[i].n1;
        return most;
    }
    int64_t window() const {  // the widest; 0: none
        int64_t most = 0;
        for (int64_t i = 0; i < num_ops; ++i) if (ops[i].code == ATTENTION && ops[i].n4 > most) most = ops[i].n4;
        return most;
    }
};

struct Batch {
    int64_t rows;
    const int64_t *ids, *slots, *positions, *tree_base, *path, *first, *write, *page_table;
    const int64_t* until;  // [rows] a row sees the positions below; nullptr: up to its own
    const int64_t *windowed_write, *windowed_table;  // of layers with a window; nullptr: as the others'
    int64_t path_width, table_width, block_size;
    const Layer* layers;
    const float* const* named;    // inputs by number, [rows, width] each
    const int64_t* const* bounds; // [rows] each: a row sees the positions below
    int64_t final_buffer;
    float* final_out;           // [rows, H]
    const int64_t* taps;        // boundaries wanted
    const int64_t* tap_offsets; // where each begins in a row of tapped_out
    int64_t num_taps, tap_width;
    float* tapped_out;          // [rows, tap_width]
    const Weight* head;         // of the vocabulary, or nullptr
    const int64_t* head_rows;   // rows whose logits are wanted
    int64_t num_head_rows;
    float* logits_out;          // [head rows, vocabulary]
    int64_t* best_out;          // [head rows] the lowest id of the largest logit; -1: none above -inf, or one is no number
};

// What the noise of each row is made from, as sampling/noise.py says. Columns hold a value for each slot.
struct Keys {
    const int64_t* slots;               // [rows] where in the columns each looks; nullptr: at its own number
    const int64_t *seeds, *samples;     // columns
    const int64_t *positions, *extra;   // [rows]; extra may be nullptr
    const double *inverse, *logarithm;  // tables
    int64_t stream;

    int64_t place(int64_t row) const { return slots ? slots[row] : row; }
    Noise noise(int64_t row, int64_t step) const {  // so many positions further
        const int64_t seed = seeds[place(row)];
        const int64_t parts[] = {seed, seed >> 32, samples[place(row)], positions[row] + step, stream, extra ? extra[row] : 0};
        uint32_t words[] = {0x9E3779B9u, 0x3C6EF372u};
        for (uint32_t& word : words)
            for (uint32_t i = 0; i < (extra ? 6u : 5u); ++i) word = mixed((word ^ uint32_t(parts[i])) + (i + 1) * 0x85EBCA6Bu);
        return {words[0], words[1], inverse, logarithm};
    }
};

// How a token is picked from a row of logits: divided by its temperature, noise added where it has any, the likeliest.
struct Picking {
    const float* temperature;  // a column; nullptr: they have been divided
    const int64_t* greedy;     // a column; not 0: without noise
    Keys keys;                 // of a chain: those of the first draft
    float weight;              // of the noise

    float divisor(int64_t row) const { return temperature ? temperature[keys.place(row)] : 1; }
    bool noisy(int64_t row) const { return !greedy[keys.place(row)]; }
};

// How one draft of a chain comes about: a network run over the token before it (or none: what is picked from is there
// already), and the head that picks.
struct Link {
    const Program* program;
    int64_t final_buffer;
    const Weight* head;
    const float* bias;  // of the logits, or nullptr
};

// Drafts drawn one behind the other. Each is fed to the next link's network, beside what its row's last run tapped. The
// batch says where each row's first draft is fed, and by slot what a row sees first; what is tapped goes where the states
// are read from.
struct Chain {
    const Link* links;
    int64_t steps, null_slot;
    const int64_t* newest;   // [rows] what the first network is fed
    const int64_t* most;     // [rows] how many drafts each may have; the last is fed to nobody
    const int64_t* ids;      // [head rows] the token each logit stands for; nullptr: its own number
    const float* finals;     // [rows, H] what the first is picked from, if it has no network
    const Picking* picking;  // nullptr: the likeliest of all
    double least;            // a row ends before the draft with which its chain's chance, as the network sees it, falls below
    int64_t* tokens;         // [rows, steps]
    int64_t* counts;         // [rows] how many of them there are
};

}  // namespace paceline
