// Experts: a row's choice among them, and the products of each expert with the rows that chose it.
//
// A pair is a row with one of its K experts. Pairs lie sorted by expert, those of one expert by row, so that an expert is
// a linear over neighbours; one that no row chose is not touched. A row's results are then summed over its experts in
// ascending order. What a pair computes depends on its row and its expert alone, wherever it lies.

struct Pairs {  // of the layer that is being computed
    std::vector<int64_t> rows, owners;   // [pairs] whose it is, and which of `chosen` it belongs to
    std::vector<int64_t> places;         // [rows, K] where a row's pairs lie, by ascending expert
    std::vector<int64_t> chosen, starts; // experts that were chosen, ascending; where their pairs begin, and the end
    std::vector<int64_t> counts;         // [E]
    Floats products, narrow;             // [pairs, 2I] and later, in the same memory, [pairs, H]; [pairs, I]

    void size(int64_t pairs, int64_t experts, const Weight& gate_up, const Weight& down) {
        for (auto* each : {&rows, &owners, &places}) each->resize(std::max<size_t>(each->size(), size_t(pairs)));
        counts.resize(std::max<size_t>(counts.size(), size_t(experts)));
        products.resize(std::max<size_t>(products.size(), size_t(pairs * (std::max(gate_up.rows, down.rows) / experts))));
        narrow.resize(std::max<size_t>(narrow.size(), size_t(pairs * down.columns)));
    }
    int64_t count() const { return starts.back(); }
    int64_t count(int64_t which) const { return starts[which + 1] - starts[which]; }
};

// One expert's matrix of a stack.
Weight expert_of(const Weight& stack, int64_t expert, int64_t experts) {
    const int64_t each = stack.num_segments / experts;
    return {stack.segments + expert * each, each, stack.rows / experts, stack.columns};
}

// A choice among E: values that are no number are out of it. Answers the best, the first of equals, and takes it out.
int64_t take_best(float* x, int64_t n) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; ++i)
        if (x[i] == x[i] && (best < 0 || x[i] > x[best])) best = i;
    best = std::max<int64_t>(best, 0);
    x[best] = NAN;
    return best;
}

// Takes the experts of all but the best groups out of the choice. `worth` has room for a value each.
void keep_groups(const Op& op, float* judged, int64_t experts, float* worth) {
    const int64_t groups = op.n3, size = experts / groups;
    for (int64_t g = 0; g < groups; ++g) {
        float first = -INFINITY, second = -INFINITY;
        for (int64_t i = g * size; i < (g + 1) * size; ++i) {
            const float x = judged[i];
            if (x > first) { second = first; first = x; }
            else if (x > second) second = x;
        }
        worth[g] = size > 1 ? first + second : first;
    }
    for (int64_t k = 0; k < op.n4; ++k) take_best(worth, groups);
    for (int64_t i = 0; i < experts; ++i)
        if (worth[i / size] == worth[i / size]) judged[i] = NAN;
}

// A row's experts from its scores x: out is K numbers of experts, ascending, K weights, and room for 3 E.
void route(const Op& op, const float* x, int64_t experts, float* out) {
    const int64_t per_row = op.n0;
    float *ids = out, *weights = ids + per_row, *own = weights + per_row, *judged = own + experts, *worth = judged + experts;
    const float* bias = static_cast<const float*>(op.w0);
    if (!op.n1) {
        float most = x[0], sum = 0;
        for (int64_t i = 1; i < experts; ++i) most = x[i] > most ? x[i] : most;
        for (int64_t i = 0; i < experts; ++i) own[i] = x[i] - most;
        path().exponentials(own, experts, own);
        for (int64_t i = 0; i < experts; ++i) sum += own[i];
        for (int64_t i = 0; i < experts; ++i) own[i] /= sum;
    } else {
        path().activate(x, experts, SIGMOID, own);
    }
    for (int64_t i = 0; i < experts; ++i) {
        judged[i] = bias ? own[i] + bias[i] : own[i];
        if (judged[i] != judged[i]) judged[i] = -INFINITY;
    }
    if (op.n4 < op.n3) keep_groups(op, judged, experts, worth);
    for (int64_t k = 0; k < per_row; ++k) {
        const float best = float(take_best(judged, experts));
        int64_t at = k;
        for (; at > 0 && ids[at - 1] > best; --at) ids[at] = ids[at - 1];
        ids[at] = best;
    }
    float sum = 0;
    for (int64_t k = 0; k < per_row; ++k) { weights[k] = own[int64_t(ids[k])]; sum += weights[k]; }
    for (int64_t k = 0; k < per_row; ++k) weights[k] = (op.n2 ? weights[k] / (sum + 1e-20f) : weights[k]) * op.f;
}

// Lays out the pairs of all rows, as `route` chose.
void sort_pairs(const Frame& frame, Pairs& pairs, const Op& op) {
    const int64_t per_row = op.n0, experts = op.n1, rows = frame.batch.rows;
    std::fill_n(pairs.counts.begin(), experts, 0);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t k = 0; k < per_row; ++k) ++pairs.counts[int64_t(frame.at(op.a, r)[k])];
    pairs.chosen.clear();
    pairs.starts.assign(1, 0);
    for (int64_t e = 0; e < experts; ++e) {
        const int64_t begin = pairs.starts.back(), count = pairs.counts[e];
        pairs.counts[e] = begin;  // from here on: where its next pair goes
        if (!count) continue;
        std::fill_n(pairs.owners.begin() + begin, count, int64_t(pairs.chosen.size()));
        pairs.chosen.push_back(e);
        pairs.starts.push_back(begin + count);
    }
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t k = 0; k < per_row; ++k) {
            const int64_t place = pairs.counts[int64_t(frame.at(op.a, r)[k])]++;
            pairs.places[r * per_row + k] = place;
            pairs.rows[place] = r;
        }
}

// Quantises a pair's input for its expert's matrix, among the other rows of that expert.
void quantise_pair(Scratch& s, const Pairs& pairs, const Op& op, const float* x, int64_t pair) {
    const int64_t owner = pairs.owners[pair], first = pairs.starts[owner];
    const Weight w = expert_of(*static_cast<const Weight*>(op.w0), pairs.chosen[owner], op.n1);
    s.values[pair] = x;
    if (!needs_quants(w)) return;
    const int64_t blocks = w.columns / BLOCK, r = pair - first, panel = r / PANEL * PANEL;
    path().quantise(x, w.columns, s.pieces.data() + (first + panel) * blocks + r % PANEL, Scratch::height(panel, pairs.count(owner)));
}

// All chosen experts' products; units of work are tiles of an expert, so that few experts keep all threads busy.
void expert_linear(Run& run, std::atomic<int64_t>& counter, const Op& op) {
    const Weight& stack = *static_cast<const Weight*>(op.w0);
    Pairs& pairs = run.pairs;
    const int64_t each = stack.rows / op.n1, blocks = stack.columns / BLOCK;
    const int64_t tiles = all_tiles(expert_of(stack, 0, op.n1)), units = tiles * int64_t(pairs.chosen.size());
    const bool many = pairs.count() >= LEAST_MANY * int64_t(pairs.chosen.size());
    run.share(counter, units, chunk_of(run, units, many), [&](int64_t begin, int64_t end) {
        while (begin < end) {
            const int64_t which = begin / tiles, stop = std::min(end, (which + 1) * tiles), first = pairs.starts[which];
            const Rows rows{run.scratch.pieces.data() + first * blocks, run.scratch.values.data() + first, pairs.count(which),
                            pairs.products.data() + first * each, each};
            const Weight w = expert_of(stack, pairs.chosen[which], op.n1);
            multiply(run.local, w, begin - which * tiles, stop - which * tiles, rows, nullptr);
            begin = stop;
        }
    });
}

// A row's results, weighed and summed.
void combine(const Pairs& pairs, const Op& op, const float* routed, int64_t r, int64_t width, float* out) {
    const float* weights = routed + op.n0;
    for (int64_t k = 0; k < op.n0; ++k) {
        const float* x = pairs.products.data() + pairs.places[r * op.n0 + k] * width;
        if (k == 0) for (int64_t i = 0; i < width; ++i) out[i] = x[i] * weights[k];
        else for (int64_t i = 0; i < width; ++i) out[i] += x[i] * weights[k];
    }
}
