// Products of quantised rows with packed weights, shared out by tiles; and the embedding, a row of one.

struct Scratch {  // quantised activations of one linear's input, in panels
    std::vector<Piece> pieces;
    std::vector<const float*> values;
    void size(int64_t rows, int64_t columns) {
        pieces.resize(std::max<size_t>(pieces.size(), size_t(rows * (columns / BLOCK))));
        values.resize(std::max<size_t>(values.size(), size_t(rows)));
    }
    Piece* row(int64_t r, int64_t columns) { return pieces.data() + r / PANEL * PANEL * (columns / BLOCK) + r % PANEL; }
    static int64_t whole(int64_t rows) { return (rows + PANEL - 1) / PANEL * PANEL; }
    static int64_t height(int64_t first, int64_t rows) { return std::min<int64_t>(PANEL, rows - first); }
};

bool needs_quants(const Weight& w) {
    for (int64_t s = 0; s < w.num_segments; ++s)
        if (!is_dense(w.segments[s].kind)) return true;
    return false;
}

// Row r of `rows`.
void quantise(Scratch& s, const Weight& w, const float* x, int64_t r, int64_t rows, int64_t base = 0) {
    s.values[base + r] = x;
    if (!needs_quants(w)) return;
    path().quantise(x, w.columns, s.row(base + r, w.columns), Scratch::height(r / PANEL * PANEL, rows));
}

// One tile, or a few neighbours, of one segment for some rows.
struct Tiles {
    const Segment* segment;
    int64_t tile, first;  // in the segment; among the weight's rows
    const uint8_t* data;

    Tiles(const Weight& w, int64_t number) : segment(w.segments), tile(number), first(0) {
        while (tile >= tiles_of(segment->rows)) { tile -= tiles_of(segment->rows); first += segment->rows; ++segment; }
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

struct Rows {  // some that are quantised already, in panels one behind the other, and where their results go
    const Piece* pieces;
    const float* const* values;
    int64_t count;
    float* out;      // a row's results one behind the other
    int64_t stride;  // from a row's to the next one's: as many as the weight has rows, or a part of wider rows
    int64_t panels() const { return (count + PANEL - 1) / PANEL; }
    int64_t whole() const { return path().many && count >= LEAST_MANY ? count / PANEL : 0; }  // for the function for many rows
    Panel panel(int64_t number, int64_t columns) const {
        const int64_t first = number * PANEL;
        return {pieces + first * (columns / BLOCK), Scratch::height(first, count), values + first};
    }
};

int64_t all_tiles(const Weight& w) {
    int64_t tiles = 0;
    for (int64_t i = 0; i < w.num_segments; ++i) tiles += tiles_of(w.segments[i].rows);
    return tiles;
}

// The tiles begin … end - 1 of a weight for some rows.
void multiply(Floats& local, const Weight& w, int64_t begin, int64_t end, const Rows& rows, const float* bias) {
    const int64_t whole = rows.whole();
    const int most = path().max_rows;
    if (whole) local.resize(std::max<size_t>(local.size(), size_t(whole * PANEL * MANY * LANES)));
    for (int64_t unit = begin; unit < end;) {
        const Tiles here(w, unit);
        const int64_t some = std::min<int64_t>({MANY, end - unit, tiles_of(here.segment->rows) - here.tile});
        const bool many = whole && !is_dense(here.segment->kind);
        if (many)
            path().many(here.segment->kind, {here.data, int(some), w.columns, w.columns / BLOCK, rows.pieces, whole, local.data(),
                                             rows.out + here.first, rows.stride, here.lanes(some), bias ? bias + here.first : nullptr});
        for (int64_t t = unit; t < unit + some; ++t) {
            const Tiles one(w, t);
            float result[8][LANES];
            for (int64_t p = many ? whole : 0; p < rows.panels(); ++p) {
                const Panel panel = rows.panel(p, w.columns);
                for (int r = 0; r < panel.height; r += most) {
                    const int count = int(std::min<int64_t>(most, panel.height - r));
                    path().tile[one.segment->kind](one.data, w.columns, panel, r, count, result);
                    for (int i = 0; i < count; ++i) one.store(result[i], rows.out + (p * PANEL + r + i) * rows.stride, bias);
                }
            }
        }
        unit += some;
    }
}

// How many tiles a thread takes at a time; neighbours where the function for many rows wants them.
int64_t chunk_of(const Run& run, int64_t tiles, bool many) {
    const int64_t threads = run.pool.size(), least = many && tiles >= 4 * MANY * threads ? MANY : 1;
    return std::max<int64_t>(1, tiles / (threads * 8 * least)) * least;
}

// All tiles of a weight for rows that are quantised already.
void linear(Run& run, std::atomic<int64_t>& counter, const Weight& w, int64_t count, float* out, const float* bias) {
    const Rows rows{run.scratch.pieces.data(), run.scratch.values.data(), count, out, w.rows};
    const int64_t tiles = all_tiles(w);
    run.share(counter, tiles, chunk_of(run, tiles, rows.whole()), [&](int64_t begin, int64_t end) {
        multiply(run.local, w, begin, end, rows, bias);
    });
}

void read_rows(const Weight& w, int64_t id, float* out) {
    const Segment* segment = w.segments;
    const Segment* last = w.segments + w.num_segments - 1;
    while (segment < last && id >= segment->rows) { id -= segment->rows; ++segment; }
    if (id < 0 || id >= segment->rows) { memset(out, 0, w.columns * sizeof(float)); return; }  // no such row: no values
    read_row(segment->kind, segment->data + id / LANES * tile_bytes(segment->kind, w.columns), int(id % LANES), w.columns, out);
}
