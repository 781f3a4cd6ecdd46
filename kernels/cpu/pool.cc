#include "pool.h"

#include <immintrin.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace jaxserve {
namespace {

constexpr int SPIN_MICROSECONDS = 100;
constexpr int SPINS_BEFORE_YIELD = 500;  // about 10 microseconds
constexpr uint32_t OPEN = 1u << 31;  // a bit of Pool::gate_; the others count the workers inside

class Pool {
 public:
  void for_each(int64_t count, Item item, void* context) {
    std::unique_lock<std::mutex> inside(callers_, std::try_to_lock);
    if (!inside.owns_lock() || count < 2) {
      for (int64_t i = 0; i < count; i++) item(context, i);
      return;
    }
    resize();
    if (workers_.empty()) {
      for (int64_t i = 0; i < count; i++) item(context, i);
      return;
    }
    count_ = count, item_ = item, context_ = context;
    next_.store(0, std::memory_order_relaxed);
    gate_.store(OPEN, std::memory_order_release);
    epoch_.fetch_add(1);  // a worker that parks counts itself first and looks at the epoch then: one of the two is seen
    if (parked_.load() > 0) {
      { std::lock_guard<std::mutex> lock(parking_); }
      wake_.notify_all();
    }
    take_items();
    gate_.fetch_and(~OPEN, std::memory_order_acq_rel);
    for (int spins = 0; gate_.load(std::memory_order_acquire) != 0; spins++) {  // the last item of each worker
      spins < SPINS_BEFORE_YIELD ? _mm_pause() : std::this_thread::yield();     // it may need this thread's CPU to finish it
    }
  }

  std::atomic<int> wanted{1};

  ~Pool() { stop(); }

 private:
  void take_items() {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) item_(context_, i);
  }

  void work(uint64_t seen) {
    while (true) {
      const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(SPIN_MICROSECONDS);
      for (int spins = 1; epoch_.load() == seen; spins++) {
        _mm_pause();
        if (spins % 64 == 0 && std::chrono::steady_clock::now() > until) park(seen);
      }
      seen = epoch_.load();
      if (stopping_.load()) return;
      uint32_t gate = gate_.load(std::memory_order_acquire);
      while ((gate & OPEN) && !gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) {
      }
      if (!(gate & OPEN)) continue;  // late: the others have finished
      take_items();
      gate_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  void park(uint64_t seen) {
    std::unique_lock<std::mutex> lock(parking_);
    parked_.fetch_add(1);
    wake_.wait(lock, [&] { return epoch_.load() != seen; });
    parked_.fetch_sub(1);
  }

  void resize() {  // with callers_ held
    const size_t num_workers = wanted.load() - 1;
    if (workers_.size() == num_workers) return;
    stop();
    stopping_.store(false);
    const uint64_t seen = epoch_.load();
    for (size_t i = 0; i < num_workers; i++) workers_.emplace_back([this, seen] { work(seen); });
  }

  void stop() {
    stopping_.store(true);
    epoch_.fetch_add(1);
    { std::lock_guard<std::mutex> lock(parking_); }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
  }

  std::mutex callers_;
  std::vector<std::thread> workers_;
  // The items of the call. Written while the gate is closed and nobody is inside.
  int64_t count_ = 0;
  Item item_ = nullptr;
  void* context_ = nullptr;
  std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint32_t> gate_{0};
  alignas(64) std::atomic<uint64_t> epoch_{0};  // counts calls
  std::atomic<int> parked_{0};
  std::atomic<bool> stopping_{false};
  std::mutex parking_;
  std::condition_variable wake_;
};

// Never destroyed: a program of XLA's may still run while the process ends.
Pool& pool() {
  static Pool* pool = new Pool;
  return *pool;
}

}  // namespace

void for_each(int64_t count, Item item, void* context) { pool().for_each(count, item, context); }

void set_num_threads(int num_threads) { pool().wanted.store(num_threads < 1 ? 1 : num_threads); }

int num_threads() { return pool().wanted.load(); }

}  // namespace jaxserve
