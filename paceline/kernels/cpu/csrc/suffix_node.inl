// What a suffix tree is made of: texts, leaves and nodes, as drafters/suffix_node.py has them, and what they take.

// Counts what is allocated as allocators round it: to sixteen bytes, eight of them their own.
class Memory {
public:
    int64_t bytes = 0;
    void* try_take(size_t size) {  // nullptr: there is none left
        void* piece = std::malloc(size);
        if (piece) bytes += whole(size);
        return piece;
    }
    void* take(size_t size) {
        void* piece = try_take(size);
        if (!piece) throw std::bad_alloc();
        return piece;
    }
    void give(void* piece, size_t size) {
        if (piece) bytes -= whole(size);
        std::free(piece);
    }

private:
    static int64_t whole(size_t size) { return int64_t((size + 8 + 15) / 16 * 16); }
};

struct Node;
struct Text;

// Where a token leads: to a node or into a leaf. A leaf is no object: its text, and where in it its suffix starts.
struct Child {
    static constexpr int32_t NODE = -1;
    int32_t token = -1;
    int32_t start = NODE;
    void* at = nullptr;  // nullptr: nowhere
    bool is_leaf() const { return start != NODE; }
    Node* node() const { return static_cast<Node*>(at); }
    Text* text() const { return static_cast<Text*>(at); }
    int32_t count() const;
    // The more frequent child; ties go to the lowest token.
    bool before(const Child& other) const {
        const int32_t own = count(), others = other.count();
        return own > others || (own == others && token < other.token);
    }
};

// A hash table by token: a power of two of places, at most three quarters of them taken; who finds a place taken looks
// at the next. The places lie right behind it in memory.
struct Table {
    uint32_t count, shift;  // 2 ** (32 - shift) places

    static size_t size(uint32_t shift) { return sizeof(Table) + (size_t(1) << (32 - shift)) * sizeof(Child); }
    static Table* set_up(void* piece, uint32_t shift) {
        if (!piece) return nullptr;
        Table* table = new (piece) Table{0, shift};
        for (Child& place : *table) new (&place) Child;
        return table;
    }
    uint32_t mask() const { return uint32_t((uint64_t(1) << (32 - shift)) - 1); }
    uint32_t home(int32_t token) const { return uint32_t(token) * 0x9E3779B1u >> shift; }
    Child* begin() { return reinterpret_cast<Child*>(this + 1); }
    Child* end() { return begin() + mask() + 1; }
    bool is_full() const { return uint64_t(count + 1) * 4 > (uint64_t(mask()) + 1) * 3; }
    bool is_sparse() const { return mask() > 1 && uint64_t(count) * 16 < (uint64_t(mask()) + 1) * 3; }

    Child* find(int32_t token) {
        for (uint32_t i = home(token);; i = (i + 1) & mask()) {
            Child& place = begin()[i];
            if (!place.at) return nullptr;
            if (place.token == token) return &place;
        }
    }
    void put(const Child& child) {  // there is room for it
        uint32_t i = home(child.token);
        while (begin()[i].at) i = (i + 1) & mask();
        begin()[i] = child;
        ++count;
    }
    void erase(Child* found) {  // what had to go on looking because of it moves up
        uint32_t hole = uint32_t(found - begin());
        for (uint32_t i = (hole + 1) & mask(); begin()[i].at; i = (i + 1) & mask()) {
            if (((i - home(begin()[i].token)) & mask()) < ((i - hole) & mask())) continue;
            begin()[hole] = begin()[i];
            hole = i;
        }
        begin()[hole] = Child{};
        --count;
    }
};

// The end of a path. Its most frequent child has a place of its own: most nodes have one child and no table.
struct Node {
    Child best;
    Table* others = nullptr;
    int32_t count;
    bool stale = false;  // a count went down: the best may not be the best

    explicit Node(int32_t count) : count(count) {}
    Child* find(int32_t token) {
        if (token == best.token) return best.at ? &best : nullptr;
        return others ? others->find(token) : nullptr;
    }
    void add(Memory& memory, Child child) {
        if (!best.at) { best = child; return; }
        if (!others) others = Table::set_up(memory.take(Table::size(31)), 31);
        else if (others->is_full()) resize(memory, memory.take(Table::size(others->shift - 1)), others->shift - 1);
        if (child.before(best)) std::swap(child, best);
        others->put(child);
    }
    // Put one of the others whose count went up first, if that is where it belongs now.
    void promote(Child* child) {
        if (!child->before(best)) return;
        const Child last = best;
        best = *child;
        others->erase(child);
        others->put(last);
    }
    void drop(Memory& memory, int32_t token) {
        if (!others) { best = Child{}; return; }
        Child* found = others->find(token);
        if (!found) {  // it is the best: any other takes its place for now
            for (found = others->begin(); !found->at;) ++found;
            best = *found;
            stale = true;
        }
        others->erase(found);
        if (others->count == 0) give_others(memory);
        else if (others->is_sparse()) resize(memory, memory.try_take(Table::size(others->shift + 1)), others->shift + 1);
    }
    const Child& most_frequent() {  // nowhere, if it has no children
        if (!stale) return best;
        stale = false;
        Child* first = &best;
        if (others) for (Child& child : *others) if (child.at && child.before(*first)) first = &child;
        if (first != &best) promote(first);
        return best;
    }
    void give_others(Memory& memory) {
        if (others) memory.give(others, Table::size(others->shift));
        others = nullptr;
    }

private:
    void resize(Memory& memory, void* piece, uint32_t shift) {
        Table* table = Table::set_up(piece, shift);
        if (!table) return;  // a table that is too large will do
        for (const Child& child : *others) if (child.at) table->put(child);
        give_others(memory);
        others = table;
    }
};

// One sequence of tokens in a tree.
struct Text {
    int32_t* tokens = nullptr;
    int32_t length = 0, room = 0;
    // Where each of the last `live` suffixes ends; nullptr: in its leaf. That from `start` on is in place start % places.
    Node** points = nullptr;
    int32_t live = 0, places = 0;
    bool alone = false;  // it is none of the tree's texts: one leaf has it
    bool ended = false;

    Node*& point(int32_t start) { return points[start % places]; }
    void append(Memory& memory, int32_t token, int32_t max_depth) {
        if (length == room) {
            const int32_t more = room + room / 2 + 8;
            tokens = larger(memory, tokens, room, more);
            room = more;
        }
        if (live == places && places < max_depth) widen(memory, std::min(max_depth, 2 * places + 8));
        tokens[length++] = token;
        live = std::min(live + 1, max_depth);
    }
    void end(Memory& memory) {
        memory.give(points, size_t(places) * sizeof(Node*));
        points = nullptr;
        live = places = 0;
        ended = true;
    }
    void give(Memory& memory) {
        end(memory);
        memory.give(tokens, size_t(room) * sizeof(int32_t));
        memory.give(this, sizeof(Text));
    }

private:
    static int32_t* larger(Memory& memory, int32_t* old, int32_t room, int32_t more) {
        int32_t* space = static_cast<int32_t*>(memory.take(size_t(more) * sizeof(int32_t)));
        std::copy_n(old, room, space);
        memory.give(old, size_t(room) * sizeof(int32_t));
        return space;
    }
    void widen(Memory& memory, int32_t more) {
        Node** space = static_cast<Node**>(memory.take(size_t(more) * sizeof(Node*)));
        for (int32_t start = length - live; start < length; ++start) space[start % more] = point(start);
        memory.give(points, size_t(places) * sizeof(Node*));
        points = space;
        places = more;
    }
};

inline int32_t Child::count() const { return is_leaf() ? 1 : node()->count; }
