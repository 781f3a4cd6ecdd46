// The fused matmul for CPUs: rows times matrices whose columns lie one after the other, [F, D].
//
// An item of the pool is COLUMNS columns (where gated: as many gates, and what they gate). It takes ROWS rows at a time against four
// columns at a time. Each element is one sum along D, lane by lane, whatever the tile, so that a row's bits depend on it alone.
// A matrix that lies [D, F] is turned around item by item, in scratch memory of the thread. Values are rounded where models round
// them that have these steps one by one.

#include "kernels/cpu/calls.h"
#include "kernels/cpu/dot.h"
#include "kernels/cpu/pool.h"
#include "kernels/cpu/simd.h"

namespace jaxserve {
namespace JAXSERVE_ISA {
namespace {

constexpr int COLUMNS = 32;

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

// Products of n <= ROWS rows with the columns of a block: sums[r * COLUMNS + c]. The block's count columns lie at w, D apart.
template <typename T>
void block_sums(const T* x, int n, int64_t D, const T* w, int count, const T* next, float* sums) {
  for (int c = 0; c < count; c += 4) {
    const T* column[4];
    for (int i = 0; i < 4; i++) column[i] = w + (c + i < count ? c + i : count - 1) * D;  // the last one again: its sums are not read
    dot_rows(x, D, n, column, D, sums + c, COLUMNS, next == nullptr ? nullptr : next + c * D);
  }
}

template <typename T, typename Out>
struct Product {
  const Matmul& m;
  const T* x;  // the rows, normed

  int64_t width() const { return m.gated ? m.F / 2 : m.F; }  // columns of the result

  // The columns first, ..., first + count - 1 of the matrix as they lie, or turned around in scratch.
  const T* columns(int64_t first, int count, T* scratch) const {
    const T* w = static_cast<const T*>(m.w);
    if (m.transposed) return w + first * m.D;
    turn(w + first, m.F, m.D, count, scratch);
    return scratch;
  }

  Vec finished(const float* sums, int64_t column, int n) const {
    Vec y = rounded(load_n(sums, n), static_cast<const T*>(nullptr));
    if (m.bias == nullptr) return y;
    return rounded(add(y, load_n(static_cast<const T*>(m.bias) + column, n)), static_cast<const T*>(nullptr));
  }

  void finish(const float* sums, const float* up_sums, int64_t row, int64_t first, int count) const {
    Out* out = static_cast<Out*>(m.out) + row * width() + first;
    for_lanes(count, [&](int64_t i, int n) {
      if (m.float32_out) return store_n(out + i, load_n(sums + i, n), n);
      Vec y = finished(sums + i, first + i, n);
      if (m.residual != nullptr) y = add(y, load_n(static_cast<const T*>(m.residual) + row * m.F + first + i, n));
      if (m.gated) {
        Vec sigmoid = div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), y))));
        y = mul(mul(y, sigmoid), finished(up_sums + i, width() + first + i, n));
      }
      store_n(out + i, y, n);
    });
  }

  void operator()(int64_t item) const {
    const int64_t first = item * COLUMNS;
    const int count = static_cast<int>(width() - first < COLUMNS ? width() - first : COLUMNS);
    Scratch<T> scratch(m.transposed ? 0 : (m.gated ? 2 : 1) * COLUMNS * m.D);
    const T* w = columns(first, count, scratch.values);
    const T* up = m.gated ? columns(width() + first, count, scratch.values + COLUMNS * m.D) : nullptr;
    const bool more = m.transposed && first + 2 * COLUMNS <= width();
    float sums[ROWS * COLUMNS], up_sums[ROWS * COLUMNS];
    for (int64_t row = 0; row < m.T; row += ROWS) {
      const int n = static_cast<int>(m.T - row < ROWS ? m.T - row : ROWS);
      const bool prefetch = more && row == 0;
      block_sums(x + row * m.D, n, m.D, w, count, prefetch ? w + COLUMNS * m.D : nullptr, sums);
      if (m.gated) block_sums(x + row * m.D, n, m.D, up, count, prefetch ? up + COLUMNS * m.D : nullptr, up_sums);
      for (int r = 0; r < n; r++) finish(sums + r * COLUMNS, up_sums + r * COLUMNS, row + r, first, count);
    }
  }
};

template <typename T, typename Out>
void run(const Matmul& m) {
  Product<T, Out> product{m, static_cast<const T*>(m.x)};
  if (m.scale != nullptr) {
    auto norm = [&](int64_t row) {
      const T* x = static_cast<const T*>(m.x) + row * m.D;
      norm_row(x, static_cast<const T*>(m.scale), static_cast<T*>(m.normed) + row * m.D, m.D, m.eps);
    };
    if (m.T * m.D < 16384) {  // a few microseconds
      for (int64_t row = 0; row < m.T; row++) norm(row);
    } else {
      for_each(m.T, norm);
    }
    product.x = static_cast<const T*>(m.normed);
  }
  for_each((product.width() + COLUMNS - 1) / COLUMNS, product);
}

}  // namespace

void matmul(const Matmul& m) {
  if (m.dtype == Dtype::kFloat32) return run<float, float>(m);
  if (m.float32_out) return run<bf16, float>(m);
  run<bf16, bf16>(m);
}

}  // namespace JAXSERVE_ISA
}  // namespace jaxserve
