// AVX-512 with VNNI.
#include "packed.h"
#include <cmath>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#include "words_avx512.h"
namespace paceline {
#define PACELINE_PATH "avx512"
#define PACELINE_ROWS 8
#define PACELINE_RUNS 4
#include "tiles.inl"
#include "rows.inl"
const Path* avx512_path() { return &path; }
}  // namespace paceline
#else
namespace paceline { const Path* avx512_path() { return nullptr; } }
#endif
