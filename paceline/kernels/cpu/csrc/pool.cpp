#include "pool.h"
#include <csignal>
#include <pthread.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline {
namespace {
constexpr int SPINS = 300;     // some ten microseconds: most meetings
constexpr int YIELDS = 300;    // then let others run, if there are others
inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}
// Wait until `value` is no longer `old`: spin briefly, offer the core to whoever wants it, then sleep in the kernel.
inline void wait_change(std::atomic<uint32_t>& value, uint32_t old) {
    for (int i = 0; i < SPINS; ++i) {
        if (value.load(std::memory_order_acquire) != old) return;
        relax();
    }
    for (int i = 0; i < YIELDS; ++i) {
        if (value.load(std::memory_order_acquire) != old) return;
        std::this_thread::yield();
    }
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}
int wanted = 0;
Pool* current = nullptr;
std::mutex* lock_ = new std::mutex;
void after_fork() {  // the child has none of the parent's threads: forget the pool, leak what it held
    current = nullptr;
    lock_ = new std::mutex;
}
const int registered = pthread_atfork(nullptr, nullptr, after_fork);
}  // namespace

Pool::Pool(int threads) : size_(threads) {
    for (int t = 1; t < threads; ++t) std::thread(&Pool::work, this, t).detach();
}

void Pool::work(int thread) {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);  // signals are for the program's own threads
    uint32_t seen = 0;
    for (;;) {
        wait_change(round_, seen);
        seen = round_.load(std::memory_order_acquire);
        if (job_ == nullptr) return;  // retired
        (*job_)(thread);
        done_.fetch_add(1, std::memory_order_release);
        done_.notify_one();
    }
}

void Pool::run(const std::function<void(int)>& job) {
    if (size_ == 1) return job(0);
    job_ = &job;
    done_.store(0, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
    job(0);
    for (uint32_t done = done_.load(std::memory_order_acquire); done != uint32_t(size_ - 1);
         done = done_.load(std::memory_order_acquire))
        wait_change(done_, done);
}

void Pool::meet() {
    if (size_ == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == uint32_t(size_)) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.fetch_add(1, std::memory_order_release);
        phase_.notify_all();
    } else {
        wait_change(phase_, phase);
    }
}

void Pool::retire() {
    job_ = nullptr;
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
}

std::mutex& pool_lock() { return *lock_; }

Pool& pool() {
    const int threads = wanted > 0 ? wanted : int(std::max(1u, std::thread::hardware_concurrency()));
    if (current == nullptr) current = new Pool(threads);
    return *current;
}

void set_threads(int threads) {
    std::lock_guard<std::mutex> guard(pool_lock());
    if (threads == wanted) return;
    wanted = threads;
    if (current != nullptr) current->retire();
    current = nullptr;
}

}  // namespace paceline
