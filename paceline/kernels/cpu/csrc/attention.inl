// Who attends to what, and which thread does it: a row's positions, rows in groups, stretches merged in order.

// For every row the cache rows of the positions it may see, by position; made once a run for all layers.
struct Lines {
    std::vector<int32_t> rows;
    std::vector<uint8_t> runs;    // how many from here on follow one another in one group of sixteen
    std::vector<int64_t> starts;  // [rows + 1]

    // below: where each row's look ends, never behind its own position, all of it at its own place; nullptr: as the layout says.
    // table: whose pages; width: how many positions a row sees at most, 0: all.
    void fill(const Batch& batch, const int64_t* table, const int64_t* below, int64_t width) {
        starts.resize(batch.rows + 1);
        int64_t total = 0;
        for (int64_t r = 0; r < batch.rows; ++r) {
            starts[r] = total;
            total += std::max<int64_t>(0, below ? end_of(batch, below, r) : last_of(batch, r) + 1 - first_of(batch, r, width));
        }
        starts[batch.rows] = total;
        rows.resize(std::max<size_t>(rows.size(), size_t(total)));
        runs.resize(std::max<size_t>(runs.size(), size_t(total)));
        for (int64_t r = 0; r < batch.rows; ++r) {
            const int64_t* pages = table + batch.slots[r] * batch.table_width;
            if (below) fill_line(pages, batch.block_size, 0, end_of(batch, below, r), rows.data() + starts[r]);
            else fill_row(batch, pages, r, width, rows.data() + starts[r]);
            const int32_t* line = rows.data() + starts[r];
            uint8_t* run = runs.data() + starts[r];
            for (int64_t last = starts[r + 1] - starts[r] - 1, i = last; i >= 0; --i)
                run[i] = i < last && line[i + 1] == line[i] + 1 && line[i + 1] % LANES ? run[i + 1] + 1 : 1;
        }
    }

    static int64_t last_of(const Batch& batch, int64_t r) { return batch.until ? batch.until[r] - 1 : batch.positions[r]; }
    static int64_t first_of(const Batch& batch, int64_t r, int64_t width) {
        const int64_t first = batch.first ? batch.first[r] : 0;
        return width > 0 ? std::max(first, last_of(batch, r) + 1 - width) : first;
    }
    static int64_t end_of(const Batch& batch, const int64_t* below, int64_t r) { return std::min(below[r], batch.positions[r] + 1); }

    // Positions that lie at their own place, page by page; answers where it stopped.
    static int32_t* fill_line(const int64_t* pages, int64_t size, int64_t position, int64_t below, int32_t* to) {
        while (position < below) {
            const int64_t page = position / size, end = std::min((page + 1) * size, below);
            const int64_t shift = pages[page] * size - page * size;
            for (; position < end; ++position) *to++ = int32_t(position + shift);
        }
        return to;
    }

    static void fill_row(const Batch& batch, const int64_t* pages, int64_t r, int64_t width, int32_t* to) {
        const int64_t size = batch.block_size, last = last_of(batch, r), base = batch.path ? batch.tree_base[r] : last + 1;
        const int64_t first = first_of(batch, r, width);
        to = fill_line(pages, size, first, std::min(base, last + 1), to);
        for (int64_t position = std::max(first, base); position <= last; ++position) {  // its ancestors among the undecided nodes
            const int64_t line = base + batch.path[r * batch.path_width + position - base];
            *to++ = int32_t(pages[line / size] * size + line % size);
        }
    }
};

// Rows that follow one another and belong to one sequence, a few at a time, as shares of work for attention.
struct Group { int64_t first; int count; };

void group_rows(const Batch& batch, const Lines& lines, int64_t kv_heads, int threads, std::vector<Group>& groups) {
    groups.clear();
    for (int64_t r = 0; r < batch.rows;) {
        int64_t end = r + 1;
        while (end < batch.rows && batch.slots[end] == batch.slots[r]) ++end;
        int64_t parts = (end - r + LOOKS - 1) / LOOKS;
        const int64_t stretches = (lines.starts[end] - lines.starts[end - 1] + STRETCH - 1) / STRETCH;
        if (kv_heads % threads && parts * stretches < threads)  // something for everybody
            parts = std::max<int64_t>(parts, std::min<int64_t>(end - r, threads));
        for (int64_t p = 0; p < parts; ++p) {
            const int64_t from = r + (end - r) * p / parts, to = r + (end - r) * (p + 1) / parts;
            groups.push_back({from, int(to - from)});
        }
        r = end;
    }
}

struct Frame {  // one run's tensors
    const Program& program;
    const Batch& batch;
    const std::vector<Lines>& lines;  // the layout's, then those of the bounds, then those under a window's own pages
    const std::vector<Group>& groups;
    float* floats;
    float* at(int32_t number, int64_t row = 0) const {
        const Buffer& buffer = program.buffers[number];
        return floats + buffer.offset * batch.rows + row * buffer.width;
    }
    int64_t width(int32_t number) const { return program.buffers[number].width; }
};

// One group's look at one kv head: partial results of stretches, merged in ascending order.
struct Attending {
    const Frame& frame;
    const Op& op;
    const Group& group;
    Look look;
    int64_t kv, width, step, stretches = 0;

    Attending(const Frame& f, const Op& o, const Group& g, int64_t head)
        : frame(f), op(o), group(g), kv(head), width(f.program.value_width(o)), step(partial_floats(width)) {
        const Layer& layer = frame.batch.layers[op.n3];
        const Lines& lines = frame.lines[frame.batch.windowed_table && op.n4 > 0 ? 1 + frame.program.num_bounds : op.n5];
        const bool latent = op.b >= 0;
        const float scale = op.f > 0 ? op.f : 1.0f / std::sqrt(float(op.n2));
        const float *keys = latent ? layer.keys : layer.keys_of(kv), *values = latent ? layer.keys + op.n2 - width : layer.values_of(kv);
        look = {keys, values, op.n0 / op.n1, op.n2, width, latent ? op.n2 : width, latent, scale, op.g, group.count, {}};
        for (int i = 0; i < group.count; ++i) {
            const int64_t r = group.first + i, end = lines.starts[r + 1];
            int64_t count = end - lines.starts[r];
            if (op.n4 > 0) count = std::min(count, op.n4);
            look.rows[i] = {frame.at(op.a, r) + kv * look.group * op.n2, lines.rows.data() + end - count, lines.runs.data() + end - count, count};
            stretches = std::max(stretches, (count + STRETCH - 1) / STRETCH);
        }
    }
    static int64_t floats(const Program& program, const Op& op) {  // of one call
        const int64_t turned = op.b >= 0 ? LANES * op.n2 : 0;
        return LOOKS * (op.n0 / op.n1 * (partial_floats(program.value_width(op)) + STRETCH) + turned);
    }
    void partial(int64_t stretch, float* to) const { path().attend(look, stretch * STRETCH, to); }
    void merge(int64_t stretch, float* into, const float* next) const {
        for (int i = 0; i < group.count; ++i)
            for (int64_t g = 0; g < look.group && look.rows[i].count > stretch * STRETCH; ++g)
                path().merge(into + (i * look.group + g) * step, next + (i * look.group + g) * step, width);
    }
    void finish(const float* whole) const {
        for (int i = 0; i < group.count; ++i)
            for (int64_t g = 0; g < look.group; ++g) {
                float* out = frame.at(op.out, group.first + i) + (kv * look.group + g) * width;
                if (look.rows[i].count > 0) path().finish(whole + (i * look.group + g) * step, width, out);
                else memset(out, 0, width * sizeof(float));  // a row that may see nothing
            }
    }
};

// Where there is little else to share out, threads take stretches and the last to end merges; else whole groups.
struct Attention {
    static constexpr int64_t MOST_FLOATS = int64_t(16) << 20;  // of partial results kept at a time
    bool split = false;
    int64_t stretches = 0;           // of the longest row
    Floats partials;                 // [groups x kv heads, stretches, floats of one call]
    std::vector<std::atomic<int64_t>> left;  // [groups x kv heads] stretches not done yet

    void prepare(const Program& program, const std::vector<Lines>& all, int64_t rows, int64_t groups, int threads) {
        stretches = 0;
        for (int64_t which = 0; which <= program.num_bounds; ++which) {
            const std::vector<int64_t>& starts = all[which].starts;
            for (int64_t r = 0; r < rows; ++r) stretches = std::max(stretches, (starts[r + 1] - starts[r] + STRETCH - 1) / STRETCH);
        }
        const int64_t units = groups * program.kv_heads();
        int64_t most = 0;
        for (int64_t i = 0; i < program.num_ops; ++i)
            if (program.ops[i].code == ATTENTION) most = std::max(most, Attending::floats(program, program.ops[i]));
        split = threads > 1 && stretches > 1 && units < 4 * threads && units * stretches * most <= MOST_FLOATS;
        if (!split) return;
        if (int64_t(left.size()) < units) left = std::vector<std::atomic<int64_t>>(units);
        for (auto& count : left) count.store(stretches, std::memory_order_relaxed);
        partials.resize(std::max<size_t>(partials.size(), size_t(units * stretches * most)));
    }

    void part(const Frame& frame, const Op& op, int64_t unit) {
        const int64_t which = unit / stretches, stretch = unit % stretches, size = Attending::floats(frame.program, op);
        const Attending one(frame, op, frame.groups[which / op.n1], which % op.n1);
        float* all = partials.data() + which * stretches * size;
        if (stretch < one.stretches) one.partial(stretch, all + stretch * size);
        if (left[which].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
        left[which].store(stretches, std::memory_order_relaxed);  // for the next layer
        for (int64_t s = 1; s < one.stretches; ++s) one.merge(s, all, all + s * size);
        one.finish(all);
    }

    static void whole(const Frame& frame, const Op& op, int64_t unit, Floats& memory) {
        const Attending one(frame, op, frame.groups[unit / op.n1], unit % op.n1);
        const int64_t size = Attending::floats(frame.program, op);
        memory.resize(std::max<size_t>(memory.size(), size_t(2 * size)));
        one.partial(0, memory.data());
        for (int64_t s = 1; s < one.stretches; ++s) {
            one.partial(s, memory.data() + size);
            one.merge(s, memory.data(), memory.data() + size);
        }
        one.finish(memory.data());
    }
};
