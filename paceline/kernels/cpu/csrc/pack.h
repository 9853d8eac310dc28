// Packing, see packed.h for the layout.
#pragma once
#include "packed.h"

namespace paceline {

#define PACELINE_SOURCES(X) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q4_K) X(Q5_K) X(Q6_K)
enum Source : int32_t { PACELINE_SOURCES(PACELINE_NUMBER) SOURCES };

int kind_of(int source);
size_t row_bytes(int source, int64_t columns);
void pack_rows(int source, const uint8_t* raw, int64_t rows, int64_t columns, uint8_t* out);
void pack_dense(int kind, const uint8_t* values, int64_t rows, int64_t columns, uint8_t* out);
void read_row(int kind, const uint8_t* tile, int lane, int64_t columns, float* out);

}  // namespace paceline
