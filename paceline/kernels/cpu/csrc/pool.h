// Threads that work together on one call at a time. Short waits spin a little; longer ones sleep.
#pragma once
#include <atomic>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace paceline {

class Pool {
public:
    explicit Pool(int threads);
    int size() const { return size_; }
    // Runs job(thread) on every thread, the caller being thread 0, and returns when all are done.
    void run(const std::function<void(int)>& job);
    // Inside a job: waits until all threads have come here.
    void meet();
    // Lets the threads end; nothing may be running. (The object stays: they may still be reading it.)
    void retire();

private:
    void work(int thread);
    int size_;
    const std::function<void(int)>* job_ = nullptr;
    std::atomic<uint32_t> round_{0}, arrived_{0}, phase_{0}, done_{0};
};

// The pool of this process; made anew after a fork and when the number of threads changes. Hold the lock while using it.
std::mutex& pool_lock();
Pool& pool();
void set_threads(int threads);

}  // namespace paceline
