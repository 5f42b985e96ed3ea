// The threads of one engine. All of them run the same step, each its own part, and meet at barriers.
#pragma once
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace {

class Team {
  public:
    explicit Team(int size) : size(size) {
        for (int part = 1; part < size; part++) threads.emplace_back([this, part] { serve(part); });
    }
    ~Team() {
        start(nullptr, nullptr);
        for (auto &thread : threads) thread.join();
    }
    Team(const Team &) = delete;

    // work(part) in every thread, the caller's included; returns when all are done.
    template <class F> void run(F &work) {
        if (size > 1) start([](void *of, int part) { (*(F *)of)(part); }, &work);
        work(0);
        meet();
    }

    // Waits for all the others. Spins, for a step is short; gives way when it has spun for long.
    void meet() {
        if (size == 1) return;
        const unsigned turn = turns.load();
        if (arrived.fetch_add(1) + 1 == size) {
            arrived.store(0);
            turns.fetch_add(1);
            return;
        }
        for (int spins = 0; turns.load(std::memory_order_acquire) == turn; spins++)
            if (spins > 4000) std::this_thread::yield();
    }

    const int size;

  private:
    using Job = void (*)(void *, int);

    void start(Job next, void *of) {
        {
            std::lock_guard<std::mutex> hold(lock);
            job = next, context = of, jobs++;
        }
        wake.notify_all();
    }
    void serve(int part) {
        for (unsigned done = 0;;) {
            Job mine;
            void *of;
            {
                std::unique_lock<std::mutex> hold(lock);
                wake.wait(hold, [&] { return jobs != done; });
                done = jobs, mine = job, of = context;
            }
            if (!mine) return;
            mine(of, part);
            meet();
        }
    }

    std::mutex lock;
    std::condition_variable wake;
    Job job = nullptr;
    void *context = nullptr;
    unsigned jobs = 0;
    std::atomic<int> arrived{0};
    std::atomic<unsigned> turns{0};
    std::vector<std::thread> threads;
};

}  // namespace
