// From finals to tokens: the vocabulary head, and the token of each row of logits, with noise where a row has it.

constexpr int64_t HEAD_COUNTERS = 5;  // of run_head, then of a Picker

// The vocabulary's logits for rows of finals, which lie one behind the other. Takes two counters.
void run_head(Run& run, const Batch& batch, const float* finals, std::atomic<int64_t>* counters, const float* bias = nullptr) {
    const Weight& head = *batch.head;
    run.each(counters[0], batch.num_head_rows, [&](int64_t r) {
        quantise(run.scratch, head, finals + batch.head_rows[r] * head.columns, r, batch.num_head_rows);
    });
    run.pool.meet();
    linear(run, counters[1], head, batch.num_head_rows, batch.logits_out, bias);
    run.pool.meet();
}

// Tokens for `rows` rows of logits, by number: -1 where none is above -inf, or one is no number. `space` holds as many
// floats as the logits. Takes three counters.
struct Picker {
    const float* logits;
    int64_t rows, size;
    const int64_t* ids;
    const Picking* picking;
    int64_t step;
    float* space;
    int64_t* out;

    void operator()(Run& run, std::atomic<int64_t>* counters) const {
        constexpr int64_t PIECE = 4096;
        run.each(counters[0], rows, [&](int64_t r) { out[r] = path().largest(logits + r * size, size); });
        run.pool.meet();
        if (!picking) return;
        const int64_t pieces = (size + PIECE - 1) / PIECE;
        run.each(counters[1], rows * pieces, [&](int64_t unit) {
            const int64_t begin = unit % pieces * PIECE;
            if (noisy(unit / pieces)) disturb(unit / pieces, begin, std::min(size, begin + PIECE));
        });
        run.pool.meet();
        run.each(counters[2], rows, [&](int64_t r) { if (noisy(r)) out[r] = path().largest(space + r * size, size); });
        run.pool.meet();
    }
    bool noisy(int64_t r) const { return picking->noisy(r) && out[r] >= 0; }
    void disturb(int64_t r, int64_t begin, int64_t end) const {
        path().disturb(logits + r * size, picking->divisor(r), picking->keys.noise(r, step), picking->weight, ids, out[r], begin, end, space + r * size);
    }
};
