// Each head of a row through a matrix of its own: the weight has a segment for each, and what is quantised is cut by head.

void quantise_heads(Scratch& s, const Op& op, const float* x, int64_t r, int64_t rows) {
    const Weight& w = *static_cast<const Weight*>(op.w0);
    for (int64_t h = 0; h < op.n0; ++h) {
        x += op.n1;  // what a head has before its matrix's values is not multiplied
        quantise(s, w, x, r, rows, h * Scratch::whole(rows));
        x += w.columns;
    }
}

// What a head has before its matrix's values is kept. Units of work are tiles of a head.
void per_head(Run& run, std::atomic<int64_t>& counter, const Frame& frame, const Op& op) {
    const Weight& w = *static_cast<const Weight*>(op.w0);
    const int64_t rows = frame.batch.rows, kept = op.n1, each = w.segments->rows, tiles = tiles_of(each);
    const int64_t width = frame.width(op.out), units = op.n0 * tiles;
    run.share(counter, units, chunk_of(run, units, rows >= LEAST_MANY), [&](int64_t begin, int64_t end) {
        while (begin < end) {
            const int64_t head = begin / tiles, from = begin - head * tiles, stop = std::min(end, (head + 1) * tiles);
            const int64_t base = head * Scratch::whole(rows);
            float* out = frame.at(op.out) + head * (kept + each);
            for (int64_t r = 0; r < rows && from == 0; ++r)
                memcpy(out + r * width, frame.at(op.a, r) + head * (kept + w.columns), kept * sizeof(float));
            const Rows some{run.scratch.pieces.data() + base * (w.columns / BLOCK), run.scratch.values.data() + base, rows,
                            out + kept, width};
            multiply(run.local, {w.segments + head, 1, each, w.columns}, from, stop - head * tiles, some, nullptr);
            begin = stop;
        }
    });
}
