// What the threads of a run have: memory, and units of work taken by a counter.

// Vectors of 64 bytes are loaded from these: in one access where they begin at a multiple of that.
template <class T> struct Aligned {
    using value_type = T;
    Aligned() = default;
    template <class U> Aligned(const Aligned<U>&) {}
    T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64))); }
    void deallocate(T* at, size_t) { ::operator delete(at, std::align_val_t(64)); }
    bool operator==(const Aligned&) const { return true; }
};
using Floats = std::vector<float, Aligned<float>>;

struct Scratch;
struct Attention;
struct Pairs;
struct Run {  // what one thread works with
    Pool& pool;
    Scratch& scratch;
    Floats& local;  // this thread's own
    Attention& attention;
    Pairs& pairs;

    // Share out `units` of work in chunks, work(begin, end); every thread calls it with the same arguments.
    template <class Work> void share(std::atomic<int64_t>& counter, int64_t units, int64_t chunk, Work&& work) {
        for (;;) {
            const int64_t begin = counter.fetch_add(chunk, std::memory_order_relaxed);
            if (begin >= units) break;
            work(begin, std::min(units, begin + chunk));
        }
    }
    template <class Work> void each(std::atomic<int64_t>& counter, int64_t units, Work&& work) {
        share(counter, units, 1, [&](int64_t unit, int64_t) { work(unit); });
    }
};
