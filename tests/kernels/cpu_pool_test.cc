// Drives the pool of the CPU kernels under ThreadSanitizer: every item of every call is computed once.

#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "kernels/cpu/pool.h"

int main() {
  bool right = true;
  for (int num_threads : {1, 4, 2, 3}) {
    jaxserve::set_num_threads(num_threads);
    std::vector<std::thread> callers;
    std::vector<char> good(3, 1);
    for (int caller = 0; caller < 3; caller++) {
      callers.emplace_back([caller, &good] {
        for (int call = 0; call < 300; call++) {
          std::vector<int> counts((call * 7 + caller) % 50);
          auto item = [&](int64_t i) { counts[i]++; };
          jaxserve::for_each(static_cast<int64_t>(counts.size()), item);
          for (int count : counts) good[caller] &= count == 1;
          if (call % 100 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // workers park
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
    for (char g : good) right &= g;
  }
  std::puts(right ? "right" : "wrong");
  return right ? 0 : 1;
}
