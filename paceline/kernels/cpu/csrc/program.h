// A model's forward as a flat list of operations, and everything one run of it needs. Mirrored in library.py.
#pragma once
#include "packed.h"

namespace paceline {

struct Segment { int32_t kind; int32_t pad; const uint8_t* data; int64_t rows; };
struct Weight { const Segment* segments; int64_t num_segments, rows, columns; };

enum OpCode : int32_t {
    EMBED, POSITIONS, QUANTISE, LINEAR, RMS_NORM, LAYER_NORM, ACTIVATION, GATED, ADD, HEAD_NORM, ROPE, STORE, ATTENTION, TAP
};

// Values are buffers, by number; a, b are inputs, out the result. n0..n3 and f mean what the operation says.
struct Op {
    int32_t code, a, b, out;
    int64_t n0, n1, n2, n3;
    float f, pad;
    const void* w0;
    const void* w1;
};

struct Buffer { int64_t offset, width; };  // floats a row

struct Program {
    const Op* ops; int64_t num_ops;
    const Buffer* buffers; int64_t num_buffers;
    int64_t row_floats;  // of all buffers together
    int64_t kv_heads() const {
        for (int64_t i = 0; i < num_ops; ++i) if (ops[i].code == ATTENTION) return ops[i].n1;
        return 1;
    }
};

struct Batch {
    int64_t rows;
    const int64_t *ids, *slots, *positions, *tree_base, *path, *first, *write, *page_table;
    int64_t path_width, table_width, block_size;
    float* const* keys;    // by layer; a head's rows begin at head * head_stride, and lie as packed.h says
    float* const* values;
    int64_t head_stride;
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

}  // namespace paceline
