// Suffix trees behind the library's boundary: drafters/suffix_tree.py, number for number, at a fraction of the time.
// Probabilities are doubles, multiplied and added in the reference's order; the build lets no compiler fuse them.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <new>
#include <queue>
#include <vector>

namespace paceline {
namespace {

#include "suffix_node.inl"
#include "suffix_tree.inl"

// What is asked of the trees for a batch, and what they answer. Mirrored in kernels/cpu/suffix.py.
struct Asked {
    int64_t batch, width;                      // sequences; the most nodes of each
    const int64_t* table;                      // [slots, row] committed tokens
    int64_t row;
    const int64_t *slots, *lengths, *budgets;  // [batch]
    Tree* const* own;                          // [batch]
    Tree* others;                              // of all responses; nullptr: there is none
    double factor, floor;                      // a match of p tokens is worth factor · p nodes; the least probability
    int64_t branching;
    int64_t* out;                              // sizes [batch], then tokens and parents, [batch, nodes] each
    double* scores;                            // [batch]
    int64_t* matches;                          // [batch] how many tokens of the text were found
    int64_t nodes, deepest, chain;             // of the largest; of the deepest; whether all are chains
};

struct Draft {
    std::vector<int64_t> tokens, parents;
    double score = 0;
    int64_t match = 0;

    int64_t size() const { return int64_t(tokens.size()); }
    void start(int64_t found) {
        tokens.clear();
        parents.clear();
        score = 0;
        match = found;
    }
    void add(int64_t token, int64_t parent, double probability) {
        tokens.push_back(token);
        parents.push_back(parent);
        score += probability;
    }
};

struct Candidate {
    double path;
    int64_t order, depth, parent;
    Child child;
    bool operator<(const Candidate& other) const { return path < other.path || (path == other.path && order > other.order); }
};

// Drafts from one tree after another, in memory that is used again.
class Speculation {
public:
    explicit Speculation(const Asked& asked) : asked_(asked) {}

    // The best draft over all lengths of suffix of the text that are found; of equals, the longest match's.
    void speculate(Tree& tree, const std::vector<int32_t>& text, int64_t most, Draft& best) {
        best.start(0);
        find_places(tree, text);
        for (int64_t match = int64_t(places_.size()); match > 0; --match) {
            const double worth = asked_.factor * double(match);
            const int64_t budget = worth < double(most) ? int64_t(worth) : most;
            if (double(budget) <= best.score) break;
            if (!asked_.branching && double(tree.max_depth - match) <= best.score) continue;
            draft_.start(match);
            if (asked_.branching) grow(tree, places_[size_t(match - 1)], budget);
            else follow(tree, places_[size_t(match - 1)], budget);
            if (draft_.score > best.score) std::swap(best, draft_);
        }
    }

private:
    const Asked& asked_;
    Draft draft_;
    std::vector<Child> places_, children_;

    // Where the last 1, 2, … tokens end, as long as anything follows them; never all of the text.
    void find_places(Tree& tree, const std::vector<int32_t>& text) {
        places_.clear();
        const int64_t length = std::min(int64_t(text.size()), tree.max_depth);
        for (int64_t match = 1; match < length; ++match) {
            const Child place = tree.match(text.data() + text.size() - match, match);
            if (!place.at || !tree.next(place, match).at) return;
            places_.push_back(place);
        }
    }
    void follow(const Tree& tree, Child place, int64_t budget) {
        double probability = 1;
        while (draft_.size() < budget) {
            const Child child = tree.next(place, draft_.match + draft_.size());
            if (!child.at) return;
            probability *= double(child.count()) / double(place.count());
            if (probability < asked_.floor) return;
            draft_.add(child.token, draft_.size() - 1, probability);
            place = child;
        }
    }
    // Always the node with the most probable path; of equals, the one met first.
    void grow(const Tree& tree, Child place, int64_t budget) {
        std::priority_queue<Candidate> heap;
        int64_t order = 0, depth = draft_.match, parent = -1;
        double probability = 1;
        while (draft_.size() < budget) {
            find_children(tree, place, depth, budget - draft_.size());
            for (const Child& child : children_) {
                const double path = probability * (double(child.count()) / double(place.count()));
                if (path < asked_.floor) break;
                heap.push({path, order++, depth + 1, parent, child});
            }
            if (heap.empty()) return;
            const Candidate top = heap.top();
            heap.pop();
            probability = top.path;
            depth = top.depth;
            place = top.child;
            parent = draft_.size();
            draft_.add(place.token, top.parent, probability);
        }
    }
    // The `most` most frequent children of a place at `depth`, the most frequent first.
    void find_children(const Tree& tree, const Child& place, int64_t depth, int64_t most) {
        children_.clear();
        if (place.is_leaf() || !place.node()->others) {
            const Child only = tree.next(place, depth);
            if (only.at) children_.push_back(only);
            return;
        }
        children_.push_back(place.node()->best);
        for (const Child& child : *place.node()->others) if (child.at) children_.push_back(child);
        const auto before = [](const Child& a, const Child& b) { return a.before(b); };
        if (int64_t(children_.size()) <= most) return std::sort(children_.begin(), children_.end(), before);
        std::partial_sort(children_.begin(), children_.begin() + most, children_.end(), before);
        children_.resize(size_t(most));
    }
};

int64_t depth_of(const Draft& draft, std::vector<int64_t>& depths) {
    depths.clear();
    int64_t deepest = 0;
    for (const int64_t parent : draft.parents) {
        depths.push_back(parent < 0 ? 1 : depths[size_t(parent)] + 1);
        deepest = std::max(deepest, depths.back());
    }
    return deepest;
}

// Each sequence's better draft: its own tree's, unless that of all responses scores higher.
void answer(Asked& asked) {
    Speculation speculation(asked);
    Draft own, others;
    std::vector<int32_t> text;
    std::vector<int64_t> nodes, parents, depths;  // of all sequences, one behind the other
    asked.nodes = asked.deepest = 0;
    asked.chain = 1;
    for (int64_t b = 0; b < asked.batch; ++b) {
        const int64_t most = std::min(asked.width, asked.budgets[b]), length = asked.lengths[b];
        const int64_t* tokens = asked.table + asked.slots[b] * asked.row;
        own.start(0);
        if (most > 0) {
            text.assign(tokens + std::max<int64_t>(0, length - asked.own[b]->max_depth), tokens + length);
            speculation.speculate(*asked.own[b], text, most, own);
            if (asked.others) speculation.speculate(*asked.others, text, most, others);
            if (asked.others && others.score > own.score) std::swap(own, others);
        }
        const int64_t deepest = depth_of(own, depths);
        asked.nodes = std::max(asked.nodes, own.size());
        asked.deepest = std::max(asked.deepest, deepest);
        asked.chain = asked.chain && deepest == own.size();
        asked.out[b] = own.size();
        asked.scores[b] = own.score;
        asked.matches[b] = own.match;
        nodes.insert(nodes.end(), own.tokens.begin(), own.tokens.end());
        parents.insert(parents.end(), own.parents.begin(), own.parents.end());
    }
    constexpr int64_t PADDING = -2;
    int64_t *tokens = asked.out + asked.batch, *above = tokens + asked.batch * asked.nodes, from = 0;
    for (int64_t b = 0; b < asked.batch; ++b)
        for (int64_t i = 0; i < asked.nodes; ++i) {
            const bool there = i < asked.out[b];
            *tokens++ = there ? nodes[size_t(from)] : 0;
            *above++ = there ? parents[size_t(from++)] : PADDING;
        }
}

// Nothing is thrown across the boundary: without memory, the answer is `failed`.
template <typename Answer, typename Work> Answer guarded(Answer failed, Work&& work) {
    try {
        return work();
    } catch (const std::bad_alloc&) {
        return failed;
    }
}

}  // namespace
}  // namespace paceline

using namespace paceline;

extern "C" {

int64_t paceline_suffix_asked() { return int64_t(sizeof(Asked)); }
void* paceline_suffix_new(int64_t max_depth, int64_t max_texts, int64_t max_bytes) {
    return guarded<void*>(nullptr, [&] { return new Tree(max_depth, max_texts, max_bytes); });
}
void paceline_suffix_free(void* tree) { delete static_cast<Tree*>(tree); }
int64_t paceline_suffix_bytes(void* tree) { return static_cast<Tree*>(tree)->memory.bytes; }
int64_t paceline_suffix_begin(void* tree) {
    return guarded(int64_t(-1), [&] { return static_cast<Tree*>(tree)->begin(); });
}
int64_t paceline_suffix_extend(void* tree, int64_t text, const int64_t* tokens, int64_t count) {
    return guarded(int64_t(-1), [&] { static_cast<Tree*>(tree)->extend(text, tokens, count); return int64_t(0); });
}
void paceline_suffix_end(void* tree, int64_t text) { static_cast<Tree*>(tree)->end(text); }

// How often a run of at most max_depth tokens occurs.
int64_t paceline_suffix_count(void* tree, const int64_t* tokens, int64_t count) {
    return guarded(int64_t(-1), [&] {
        Tree& found = *static_cast<Tree*>(tree);
        if (count > found.max_depth) return int64_t(0);
        const std::vector<int32_t> run(tokens, tokens + count);
        const Child place = found.match(run.data(), count);
        return place.at ? int64_t(place.count()) : int64_t(0);
    });
}
int64_t paceline_suffix_speculate(Asked* asked) {
    return guarded(int64_t(-1), [&] { answer(*asked); return int64_t(0); });
}

}
