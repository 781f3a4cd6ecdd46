// Drives the pool of the CPU kernels, and the kernels on it, under ThreadSanitizer.

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <set>
#include <thread>
#include <vector>

#include "kernels/cpu/calls.h"
#include "kernels/cpu/pool.h"

namespace jaxserve::avx2 {
void matmul(const Matmul&);
void grouped_matmul(const GroupedMatmul&);
void attend(const Attention&);
void rotary_write(const RotaryWrite&);
}  // namespace jaxserve::avx2

namespace {

std::atomic<int> yields{0};

// Every item of every call is computed once, whoever calls.
bool computes_each_item_once() {
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
  return right;
}

// As many threads as were asked for have an item each, and a caller whose workers are not done yet yields its CPU.
bool yields_to_workers() {
  bool right = true;
  for (int num_threads : {2, 4}) {
    jaxserve::set_num_threads(num_threads);
    std::atomic<int> begun{0};
    std::vector<std::thread::id> ids(num_threads);
    const auto caller = std::this_thread::get_id();
    auto item = [&](int64_t i) {
      ids[i] = std::this_thread::get_id();
      for (begun++; begun < num_threads;) std::this_thread::sleep_for(std::chrono::microseconds(100));
      if (ids[i] != caller) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    };
    yields = 0;
    jaxserve::for_each(num_threads, item);
    right &= std::set<std::thread::id>(ids.begin(), ids.end()).size() == ids.size() && yields > 0;
  }
  return right;
}

std::vector<float> values(size_t n, int seed) {
  std::vector<float> x(n);
  for (size_t i = 0; i < n; i++) x[i] = std::sin(0.37f * static_cast<float>(i) + static_cast<float>(seed));
  return x;
}

struct Outputs {
  std::vector<float> matmul, turned, grouped, attended, q, kv_pages;
  bool operator==(const Outputs& o) const {
    return matmul == o.matmul && turned == o.turned && grouped == o.grouped && attended == o.attended && q == o.q && kv_pages == o.kv_pages;
  }
};

// A small step through each kernel, with a given number of threads.
Outputs run_kernels(int num_threads) {
  jaxserve::set_num_threads(num_threads);
  Outputs out;
  {
    const int64_t T = 70, D = 256, F = 200;  // norms are items too
    std::vector<float> x = values(T * D, 1), w = values(F * D, 2), scale = values(D, 3), bias = values(F, 4), normed(T * D);
    for (bool transposed : {true, false}) {
      std::vector<float>& result = transposed ? out.matmul : out.turned;
      result.resize(T * F / 2);
      jaxserve::Matmul m{};
      m.x = x.data(), m.w = w.data(), m.scale = scale.data(), m.bias = bias.data(), m.out = result.data(), m.normed = normed.data();
      m.T = T, m.D = D, m.F = F, m.eps = 1e-6f, m.gated = true, m.transposed = transposed, m.dtype = jaxserve::Dtype::kFloat32;
      jaxserve::avx2::matmul(m);
    }
  }
  {
    const int64_t D = 40, F = 96;
    std::vector<float> x = values(24 * D, 5), w = values(3 * D * F, 6);
    std::vector<int32_t> group{0, 2, 2}, row{0, 8, 16}, rows{5, 8, 3}, num_tiles{3};
    out.grouped.resize(24 * F);
    jaxserve::GroupedMatmul g{};
    g.product.x = x.data(), g.product.w = w.data(), g.product.out = out.grouped.data();
    g.product.D = D, g.product.F = F, g.product.dtype = jaxserve::Dtype::kFloat32;
    g.tile_group = group.data(), g.tile_row = row.data(), g.tile_rows = rows.data(), g.num_tiles = num_tiles.data();
    jaxserve::avx2::grouped_matmul(g);
  }
  const int64_t H = 16, N = 4, K = 2, page_size = 16, num_pages = 96, width = 80;
  std::vector<float> pages = values(num_pages * 2 * K * page_size * H, 7);
  for (bool decode : {false, true}) {  // tiles of a prefill beside a decode; then a decode alone, which is split
    const std::vector<int32_t> starts = decode ? std::vector<int32_t>{0, 1, 1} : std::vector<int32_t>{0, 30, 31};
    const std::vector<int32_t> lens = decode ? std::vector<int32_t>{1200, 0} : std::vector<int32_t>{30, 70};
    const int64_t T = starts.back();
    std::vector<float> q = values(T * N * H, 8), result(T * N * H);
    std::vector<int32_t> table(2 * width);
    for (int64_t i = 0; i < 2 * width; i++) table[i] = static_cast<int32_t>(i % num_pages);
    jaxserve::Attention a{};
    a.q = q.data(), a.kv_pages = pages.data(), a.page_table = table.data(), a.cu_q_lens = starts.data(), a.kv_lens = lens.data();
    a.out = result.data(), a.T = T, a.N = N, a.H = H, a.K = K, a.S = 2, a.table_width = width, a.num_pages = num_pages;
    a.page_size = page_size, a.scale = 0.25f, a.dtype = jaxserve::Dtype::kFloat32;
    jaxserve::avx2::attend(a);
    out.attended.insert(out.attended.end(), result.begin(), result.end());
  }
  {
    const int64_t T = 200;
    std::vector<float> qkv = values(T * (N + 2 * K) * H, 9), cos = values(T * H / 2, 10), sin = values(T * H / 2, 11), scale = values(H, 12);
    std::vector<int32_t> slots(T);
    for (int64_t i = 0; i < T; i++) slots[i] = static_cast<int32_t>(i);
    out.q.resize(T * N * H), out.kv_pages = pages;
    jaxserve::RotaryWrite r{};
    r.qkv = qkv.data(), r.kv_pages = out.kv_pages.data(), r.cos = cos.data(), r.sin = sin.data(), r.slots = slots.data();
    r.q_scale = scale.data(), r.k_scale = scale.data(), r.q = out.q.data(), r.T = T, r.N = N, r.H = H, r.K = K;
    r.num_pages = num_pages, r.page_size = page_size, r.eps = 1e-6f, r.dtype = jaxserve::Dtype::kFloat32;
    jaxserve::avx2::rotary_write(r);
  }
  return out;
}

}  // namespace

// In place of the C library's.
extern "C" int sched_yield() noexcept {
  yields++;
  return 0;
}

int main() {
  const Outputs alone = run_kernels(1);
  bool right = computes_each_item_once() && yields_to_workers();
  for (int run = 0; run < 5; run++) right &= run_kernels(4) == alone;
  std::puts(right ? "right" : "wrong");
  return right ? 0 : 1;
}
