// The suffix tree of drafters/suffix_tree.py, which is the reference: every method here does what its namesake does there.

class Tree {
public:
    Memory memory;
    const int64_t max_depth, max_texts, max_bytes;  // of texts and bytes: below 0, as many as there are
    Node root{0};

    Tree(int64_t max_depth, int64_t max_texts, int64_t max_bytes) : max_depth(max_depth), max_texts(max_texts), max_bytes(max_bytes) {}
    Tree(const Tree&) = delete;
    ~Tree() { clear(); }

    // A text's number. Texts go in the order in which they came: those below `first_` are gone.
    int64_t begin() {
        if (max_texts >= 0 && int64_t(texts_.size()) >= max_texts && !texts_.empty()) remove_oldest();
        texts_.push_back(nullptr);
        try {
            texts_.back() = new (memory.take(sizeof(Text))) Text;
        } catch (...) {
            texts_.pop_back();
            throw;
        }
        return first_ + int64_t(texts_.size()) - 1;
    }
    // Without memory for it the tree forgets everything: half a token must not stay.
    void extend(int64_t number, const int64_t* tokens, int64_t count) {
        try {
            for (int64_t i = 0; i < count && grows(number); ++i) {
                append(*texts_[size_t(number - first_)], int32_t(tokens[i]));
                while (max_bytes >= 0 && memory.bytes > max_bytes && !texts_.empty()) remove_oldest();
            }
        } catch (...) {
            clear();
            throw;
        }
    }
    void end(int64_t number) {
        if (grows(number)) texts_[size_t(number - first_)]->end(memory);
    }
    // Where a path ends, as if it were somebody's child.
    Child match(const int32_t* tokens, int64_t count) {
        Child place = whole();
        for (int64_t depth = 0; depth < count; ++depth) {
            const Child* child = place.node()->find(tokens[depth]);
            if (!child) return {};
            place = *child;
            if (!place.is_leaf()) continue;
            const Text& text = *place.text();
            const bool same = text.length - place.start >= count && std::equal(tokens + depth, tokens + count, text.tokens + place.start + depth);
            return same ? place : Child{};
        }
        return place;
    }
    // The most frequent child of a place at `depth`; nowhere, if nothing follows.
    Child next(const Child& place, int64_t depth) const {
        if (!place.is_leaf()) return place.node()->most_frequent();
        const int64_t below = place.start + depth;
        if (depth >= max_depth || below >= place.text()->length) return {};
        return {place.text()->tokens[below], place.start, place.at};
    }

private:
    std::deque<Text*> texts_;
    int64_t first_ = 0;

    // Whether it is one of the tree's texts, and has not ended.
    bool grows(int64_t number) const {
        return number >= first_ && number - first_ < int64_t(texts_.size()) && !texts_[size_t(number - first_)]->ended;
    }
    Child whole() { return {-1, Child::NODE, &root}; }
    void append(Text& text, int32_t token) {
        text.append(memory, token, int32_t(max_depth));
        text.point(text.length - 1) = &root;
        for (int32_t start = text.length - text.live; start < text.length; ++start)
            if (Node* node = text.point(start)) text.point(start) = step(*node, token, text, start);
        ++root.count;
    }
    Node* step(Node& node, int32_t token, Text& text, int32_t start) {
        Child* child = node.find(token);
        if (!child) {
            node.add(memory, {token, start, &text});
            return nullptr;
        }
        if (child->is_leaf()) spell_out(*child, text.length - start);
        Node* below = child->node();
        ++below->count;
        if (child != &node.best) node.promote(child);
        return below;
    }
    void spell_out(Child& child, int32_t depth) {
        Text& text = *child.text();
        const int32_t start = child.start, below = start + depth;
        Node* node = new (memory.take(sizeof(Node))) Node(1);
        child.start = Child::NODE;
        child.at = node;
        if (depth < max_depth && below < text.length) {
            node->best = {text.tokens[below], start, &text};
            return;
        }
        if (depth < max_depth && start >= text.length - text.live) text.point(start) = node;
        if (text.alone) text.give(memory);
    }
    void remove_oldest() {
        Text* text = texts_.front();
        texts_.pop_front();
        ++first_;
        for (int32_t start = 0; start < text->length; ++start)
            remove_suffix(text->tokens + start, std::min<int64_t>(max_depth, text->length - start));
        root.count -= text->length;
        text->give(memory);
    }
    void remove_suffix(const int32_t* tokens, int64_t count) {
        Node *node = &root, *above = nullptr;  // above: whose child was left alone
        int64_t lonely = 0;
        for (int64_t depth = 1; depth <= count; ++depth) {
            Child* child = node->find(tokens[depth - 1]);
            if (child->count() == 1) {
                const Child gone = *child;
                node->drop(memory, gone.token);
                release(gone);
                break;
            }
            Node* below = child->node();
            --below->count;
            node->stale = node->stale || child == &node->best;
            if (below->count == 1 && !above) {
                above = node;
                lonely = depth;
            }
            node = below;
        }
        if (above) fold(*above->find(tokens[lonely - 1]), tokens, lonely);
    }
    // `child` is where `path` ends. Without memory for a text of its own it stays spelled out, which counts the same.
    void fold(Child& child, const int32_t* path, int64_t depth) {
        Child last = child;
        int64_t length = depth;
        for (; !last.is_leaf() && last.node()->best.at; ++length) last = last.node()->best;
        if (!last.is_leaf()) {
            if (length < max_depth) return;
            Text* text = copy(child, path, depth, length);
            if (!text) return;
            last = {child.token, 0, text};
        }
        for (Child place = child; place.at && !place.is_leaf();) {
            Node* node = place.node();
            place = node->best;
            memory.give(node, sizeof(Node));
        }
        child.start = last.start;
        child.at = last.at;
    }
    // A text for a leaf alone: `path`, which ends at `child`, and what is spelled out below.
    Text* copy(const Child& child, const int32_t* path, int64_t depth, int64_t length) {
        void *piece = memory.try_take(sizeof(Text)), *space = memory.try_take(size_t(length) * sizeof(int32_t));
        if (!piece || !space) {
            memory.give(piece, sizeof(Text));
            memory.give(space, size_t(length) * sizeof(int32_t));
            return nullptr;
        }
        Text* text = new (piece) Text;
        text->alone = true;
        text->tokens = static_cast<int32_t*>(space);
        text->length = text->room = int32_t(length);
        int32_t* end = std::copy_n(path, depth, text->tokens);
        for (Child place = child; (place = place.node()->best).at;) *end++ = place.token;
        return text;
    }
    // Free a place with all below it. Others are at most half as frequent as their node: this does not go deep.
    void release(Child place) {
        while (place.at && !place.is_leaf()) {
            Node* node = place.node();
            place = node->most_frequent();
            if (node->others) for (const Child& child : *node->others) release(child);
            node->give_others(memory);
            memory.give(node, sizeof(Node));
        }
        if (place.at && place.text()->alone) place.text()->give(memory);
    }
    void clear() {
        if (root.others) for (const Child& child : *root.others) release(child);
        release(root.best);
        root.give_others(memory);
        root = Node(0);
        for (Text* text : texts_) text->give(memory);
        first_ += int64_t(texts_.size());
        texts_.clear();
    }
};
