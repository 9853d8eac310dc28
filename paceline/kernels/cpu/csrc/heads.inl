// Each head of a row through a matrix of its own: the weight has a segment for each, and what is quantised is cut by head.

void quantise_heads(Scratch& s, const Op& op, const float* x, int64_t r, int64_t rows) {
    const Weight& w = *static_cast<const Weight*>(op.w0);
    for (int64_t h = 0; h < op.n0; ++h, x += w.columns) quantise(s, w, x += op.n1, r, rows, h * Scratch::whole(rows));
}

// What a head has before its matrix's values is kept.
void per_head(Run& run, std::atomic<int64_t>& counter, const Frame& frame, const Op& op) {
    const Weight& w = *static_cast<const Weight*>(op.w0);
    const int64_t rows = frame.batch.rows, panels = (rows + PANEL - 1) / PANEL, kept = op.n1;
    const int64_t each = w.segments->rows, tiles = tiles_of(each), width = frame.width(op.out);
    const int most = path().max_rows;
    const int64_t chunk = std::max<int64_t>(1, op.n0 * tiles / (run.pool.size() * 8));
    run.share(counter, op.n0 * tiles, chunk, [&](int64_t begin, int64_t end) {
        for (int64_t unit = begin; unit < end; ++unit) {
            const int64_t head = unit / tiles, tile = unit % tiles, lanes = std::min<int64_t>(LANES, each - tile * LANES);
            const Segment& segment = w.segments[head];
            const uint8_t* data = segment.data + tile * tile_bytes(segment.kind, w.columns);
            float* out = frame.at(op.out) + head * (kept + each);
            for (int64_t r = 0; r < rows && tile == 0; ++r)
                memcpy(out + r * width, frame.at(op.a, r) + head * (kept + w.columns), kept * sizeof(float));
            float result[8][LANES];
            for (int64_t p = 0; p < panels; ++p) {
                const Panel panel = run.scratch.panel(p, rows, w.columns, head * Scratch::whole(rows));
                for (int r = 0; r < panel.height; r += most) {
                    const int count = int(std::min<int64_t>(most, panel.height - r));
                    path().tile[segment.kind](data, w.columns, panel, r, count, result);
                    for (int i = 0; i < count; ++i)
                        memcpy(out + (p * PANEL + r + i) * width + kept + tile * LANES, result[i], lanes * sizeof(float));
                }
            }
        }
    });
}
