// A chain of drafts: each is picked by a head, mapped to the target's ids and fed back as a row behind the one before.

// The rows of a chain as a batch: where each draft is fed, step by step, and who goes on.
struct ChainRows {
    const Batch& given;
    const Chain& chain;
    int64_t *ids, *slots, *positions, *first, *write, *rows;
    std::vector<double> chances;  // of each row's chain

    ChainRows(std::vector<int64_t>& places, const Batch& batch, const Chain& chain) : given(batch), chain(chain), chances(batch.rows, 1.0) {
        places.assign(size_t(6 * batch.rows), 0);
        int64_t* at = places.data();
        for (int64_t** part : {&ids, &slots, &positions, &first, &write, &rows}) { *part = at; at += batch.rows; }
        for (int64_t r = 0; r < batch.rows; ++r) { ids[r] = chain.newest ? chain.newest[r] : 0; rows[r] = r; chain.counts[r] = 0; }
        std::fill_n(chain.tokens, batch.rows * chain.steps, 0);
    }
    void lend(Batch& batch) const {
        batch.ids = ids; batch.slots = slots; batch.positions = positions; batch.first = first; batch.write = write;
        batch.head_rows = rows; batch.num_head_rows = batch.rows;
    }
    // Note what was picked for a step, by number in `ids`, and where to feed it. Whether anyone goes on.
    bool take(int64_t step, const float* logits, Floats& space) {
        const int64_t vocabulary = chain.links[step].head->rows;
        bool any = false;
        for (int64_t r = 0; r < given.rows; ++r) {
            const int64_t picked = std::max<int64_t>(0, ids[r]);
            if (chain.least > 0) chances[r] *= chance(logits + r * vocabulary, vocabulary, picked, chain.picking ? chain.picking->divisor(r) : 1, space.data());
            const bool drafted = chain.counts[r] == step && step < chain.most[r] && !(chances[r] < chain.least);
            chain.counts[r] += drafted;
            ids[r] = chain.ids ? chain.ids[picked] : picked;
            chain.tokens[r * chain.steps + step] = ids[r];
            const bool on = drafted && step + 1 < chain.most[r];
            slots[r] = on ? given.slots[r] : chain.null_slot;
            positions[r] = on ? given.positions[r] + step : 0;
            first[r] = on && given.first ? given.first[slots[r]] : 0;
            const int64_t size = given.block_size, page = given.page_table[slots[r] * given.table_width + positions[r] / size];
            write[r] = page * size + positions[r] % size;
            any = any || on;
        }
        return any;
    }
    // The softmax's value at one place.
    static double chance(const float* x, int64_t size, int64_t picked, float temperature, float* space) {
        for (int64_t i = 0; i < size; ++i) space[i] = (x[i] - x[picked]) / temperature;
        path().exponentials(space, size, space);
        double sum = 0;
        for (int64_t i = 0; i < size; ++i) sum += space[i];
        return 1 / sum;
    }
};
