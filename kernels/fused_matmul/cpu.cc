// The fused matmul for CPUs: rows times matrices whose columns lie one after the other, [F, D].
//
// An item of the pool is COLUMNS columns (where gated: as many gates, and what they gate). It takes ROWS rows at a time against four
// columns at a time. Each element is one sum along D, lane by lane, whatever the tile, so that a row's bits depend on it alone.
// Where the CPU multiplies tiles (AMX) those are the sums of 32 rows and columns: `tile_rows.h`.
// A matrix that lies [D, F] is turned around item by item, in scratch memory of the thread. Values are rounded where models round
// them that have these steps one by one.

#include "kernels/cpu/pool.h"
#include "kernels/fused_matmul/product.h"
#include "kernels/fused_matmul/tile_rows.h"

namespace jaxserve {
namespace JAXSERVE_ISA {
namespace {

constexpr int64_t FEW = 16384;  // values of rows: a few microseconds for one thread

template <typename T>
void norm_row(const T* x, const T* scale, T* out, int64_t D, float eps) {
  Vec squares = zero();
  for_lanes(D, [&](int64_t i, int n) {
    Vec v = load_n(x + i, n);
    squares = fma(v, v, squares);
  });
  const Vec factor = set1(1.0f / sqrtf(sum(squares) / static_cast<float>(D) + eps));
  for_lanes(D, [&](int64_t i, int n) {
    store_n(out + i, mul(rounded(mul(load_n(x + i, n), factor), out), load_n(scale + i, n)), n);
  });
}

template <typename T, typename Out, typename Rows = PlainRows<T>>
void run(const Matmul& m) {
  const T* x = static_cast<const T*>(m.x);
  if (m.scale != nullptr) {
    T* normed = static_cast<T*>(m.normed);
    auto norm = [&](int64_t row) {
      norm_row(x + row * m.D, static_cast<const T*>(m.scale), normed + row * m.D, m.D, m.eps);
    };
    if (m.T * m.D < FEW) {
      for (int64_t row = 0; row < m.T; row++) norm(row);
    } else {
      for_each(m.T, norm);
    }
    x = normed;
  }
  const Rows rows(x, m.T, m.D);
  Product<T, Out, Rows> product{m, rows};
  for_each(product.num_items(), product);
}

}  // namespace

void matmul(const Matmul& m) {
  if (m.dtype == Dtype::kFloat32) return run<float, float>(m);
#ifdef __AMX_BF16__
  if (m.float32_out) return run<bf16, float, TileRows>(m);
  run<bf16, bf16, TileRows>(m);
#else
  if (m.float32_out) return run<bf16, float>(m);
  run<bf16, bf16>(m);
#endif
}

}  // namespace JAXSERVE_ISA
}  // namespace jaxserve
