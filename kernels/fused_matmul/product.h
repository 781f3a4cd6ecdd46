// The product of rows with a matrix, block by block of its columns: what the fused matmul and the grouped one share.

#ifndef JAXSERVE_KERNELS_FUSED_MATMUL_PRODUCT_H_
#define JAXSERVE_KERNELS_FUSED_MATMUL_PRODUCT_H_

#include "kernels/cpu/calls.h"
#include "kernels/cpu/dot.h"
#include "kernels/cpu/pool.h"
#include "kernels/cpu/simd.h"

namespace jaxserve {
namespace JAXSERVE_ISA {
namespace {

constexpr int COLUMNS = 32;

// Products of n <= ROWS rows with the columns of a block: sums[r * COLUMNS + c]. The block's count columns lie at w, D apart.
template <typename T>
void block_sums(const T* x, int n, int64_t D, const T* w, int count, const T* next, float* sums) {
  for (int c = 0; c < count; c += 4) {
    const T* column[4];
    for (int i = 0; i < 4; i++) column[i] = w + (c + i < count ? c + i : count - 1) * D;  // the last one again: its sums are not read
    dot_rows(x, D, n, column, D, sums + c, COLUMNS, next == nullptr ? nullptr : next + c * D);
  }
}

// What becomes of sums.
template <typename T, typename Out>
struct Result {
  const Matmul& m;

  int64_t width() const { return m.gated ? m.F / 2 : m.F; }  // columns of the result

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
};

// The rows of a product as they lie, D apart.
template <typename T>
struct PlainRows {
  static constexpr int AT_ONCE = ROWS;
  struct Columns {  // what a thread sets up for a block of columns
    explicit Columns(int) {}
  };
  const T* x;
  int64_t D;
  PlainRows(const T* rows, int64_t, int64_t depth) : x(rows), D(depth) {}
  void sums(int64_t row, int n, const T* w, int count, const T* next, float* out) const {
    block_sums(x + row * D, n, D, w, count, next, out);
  }
};

// Rows: of the rows of x, normed, what sums of AT_ONCE of them with a block of columns. See PlainRows.
template <typename T, typename Out, typename Rows>
struct Product {
  const Matmul& m;
  const Rows& rows;
  const Result<T, Out> result{m};

  int64_t width() const { return result.width(); }
  int64_t num_items() const { return (width() + COLUMNS - 1) / COLUMNS; }

  // The columns first, ..., first + count - 1 of the matrix as they lie, or turned around in scratch.
  const T* columns(int64_t first, int count, T* scratch) const {
    const T* w = static_cast<const T*>(m.w);
    if (m.transposed) return w + first * m.D;
    turn(w + first, m.F, m.D, count, scratch);
    return scratch;
  }

  // One block of columns of the result, or where gated, of gates and of what they gate.
  void operator()(int64_t item) const {
    const int64_t first = item * COLUMNS;
    const int count = static_cast<int>(width() - first < COLUMNS ? width() - first : COLUMNS);
    Scratch<T> scratch(m.transposed ? 0 : (m.gated ? 2 : 1) * COLUMNS * m.D);
    const T* w = columns(first, count, scratch.values);
    const T* up = m.gated ? columns(width() + first, count, scratch.values + COLUMNS * m.D) : nullptr;
    const int64_t ahead = num_threads() * COLUMNS;  // threads take blocks in turn: this one's next, most likely
    const bool more = m.transposed && first + ahead + COLUMNS <= width();
    const typename Rows::Columns set_up(count);
    float sums[Rows::AT_ONCE * COLUMNS], up_sums[Rows::AT_ONCE * COLUMNS];
    for (int64_t row = 0; row < m.T; row += Rows::AT_ONCE) {
      const int n = static_cast<int>(m.T - row < Rows::AT_ONCE ? m.T - row : Rows::AT_ONCE);
      const bool prefetch = more && row == 0;
      rows.sums(row, n, w, count, prefetch ? w + ahead * m.D : nullptr, sums);
      if (m.gated) rows.sums(row, n, up, count, prefetch ? up + ahead * m.D : nullptr, up_sums);
      for (int r = 0; r < n; r++) result.finish(sums + r * COLUMNS, up_sums + r * COLUMNS, row + r, first, count);
    }
  }
};

}  // namespace
}  // namespace JAXSERVE_ISA
}  // namespace jaxserve

#endif
