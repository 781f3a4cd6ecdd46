// Rows of a product for CPUs that multiply tiles (AMX): 32 rows and 32 columns are four tiles of sums.
//
// The columns of a matrix [F, D] are the rows of one operand as they lie. So it is the rows of x that are packed as the other's
// columns, once a call, and the sums come out turned around.

#ifndef JAXSERVE_KERNELS_FUSED_MATMUL_TILE_ROWS_H_
#define JAXSERVE_KERNELS_FUSED_MATMUL_TILE_ROWS_H_

#ifdef __AMX_BF16__

#include "kernels/cpu/dot.h"
#include "kernels/cpu/pool.h"
#include "kernels/cpu/tiles.h"
#include "kernels/fused_matmul/product.h"

namespace jaxserve {
namespace JAXSERVE_ISA {
namespace {

// W pairs of terms, of which n terms are there; the others are zero.
INLINE Vec load_pairs(const bf16* x, int64_t n) {
  if (n >= 2 * W) return load(reinterpret_cast<const float*>(x));  // moved, never computed with
  bf16 terms[2 * W] = {};
  if (n > 0) memcpy(terms, x, n * sizeof(bf16));
  return load(reinterpret_cast<const float*>(terms));
}

// A tile of which each row is a pair of terms and each column one of num_rows rows of x, D apart; num_terms of their terms are there.
INLINE void pack_tile(const bf16* x, int64_t D, int64_t num_rows, int64_t num_terms, bf16* tile) {
  float* pairs = reinterpret_cast<float*>(tile);
  for (int row = 0; row < TILE_ROWS; row += W) {
    for (int pair = 0; pair < TILE_ROWS; pair += W) {
      Vec values[W];
      for (int i = 0; i < W; i++) {
        values[i] = row + i < num_rows ? load_pairs(x + (row + i) * D + 2 * pair, num_terms - 2 * pair) : zero();
      }
      turn_lanes(values);
      for (int i = 0; i < W; i++) store(pairs + (pair + i) * TILE_ROWS + row, values[i]);
    }
  }
}

// sums[c * COLUMNS + r] = w[c] . x[r]. x: packed rows; the next 16 begin stride values on. w: D apart; padded: their last terms.
// next: what is to be read soon, as far after w, or null.
template <bool MORE_COLUMNS, bool MORE_ROWS>
void tile_sums(const bf16* x, int64_t stride, const bf16* w, int64_t D, const bf16* padded, const bf16* next, float* sums) {
  settle();
  _tile_zero(0);
  if constexpr (MORE_ROWS) _tile_zero(1);
  if constexpr (MORE_COLUMNS) _tile_zero(2);
  if constexpr (MORE_COLUMNS && MORE_ROWS) _tile_zero(3);
  for (int64_t k = 0; k < D; k += TERMS, x += TILE_VALUES) {
    const bool whole = k + TERMS <= D;
    const bf16* column = whole ? w + k : padded;
    const int64_t apart = whole ? D : TERMS;
    if (next != nullptr) {
      for (int c = 0; c < COLUMNS; c++) _mm_prefetch(reinterpret_cast<const char*>(next + c * D + k), _MM_HINT_T1);
    }
    _tile_loadd(4, column, apart * sizeof(bf16));
    _tile_loadd(6, x, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (MORE_ROWS) {
      _tile_loadd(7, x + stride, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (MORE_COLUMNS) {
      _tile_loadd(5, column + TILE_ROWS * apart, apart * sizeof(bf16));
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (MORE_ROWS) _tile_dpbf16ps(3, 5, 7);
    }
  }
  constexpr int ROW_BYTES = COLUMNS * sizeof(float);
  _tile_stored(0, sums, ROW_BYTES);
  if constexpr (MORE_ROWS) _tile_stored(1, sums + TILE_ROWS, ROW_BYTES);
  if constexpr (MORE_COLUMNS) _tile_stored(2, sums + TILE_ROWS * COLUMNS, ROW_BYTES);
  if constexpr (MORE_COLUMNS && MORE_ROWS) _tile_stored(3, sums + TILE_ROWS * COLUMNS + TILE_ROWS, ROW_BYTES);
}

struct TileRows {
  static constexpr int AT_ONCE = COLUMNS;  // rows: the sums of a block are a square
  static constexpr int64_t PACKED_AT_ONCE = 16;  // tiles of an item of the pool

  struct Columns {
    Tiles tiles;
    explicit Columns(int count) : tiles(config(count)) {}
    static TileConfig config(int count) {
      TileConfig config;
      const int first = count < TILE_ROWS ? count : TILE_ROWS;
      config.set(0, 1, first), config.set(4, 4, first);
      config.set(2, 3, count - first), config.set(5, 5, count - first);
      config.set(6, 7, TILE_ROWS);
      return config;
    }
  };

  int64_t T, D, num_tiles;  // of 16 rows
  Scratch<bf16> packed;     // [blocks of 16 rows, num_tiles, 16 pairs, 16 rows, 2]

  TileRows(const bf16* x, int64_t num_rows, int64_t depth)
      : T(num_rows), D(depth), num_tiles((D + TERMS - 1) / TERMS), packed((T + TILE_ROWS - 1) / TILE_ROWS * num_tiles * TILE_VALUES) {
    const int64_t parts = (num_tiles + PACKED_AT_ONCE - 1) / PACKED_AT_ONCE;
    auto pack = [&](int64_t item) {
      const int64_t block = item / parts, row = block * TILE_ROWS, first = item % parts * PACKED_AT_ONCE;
      for (int64_t tile = first; tile < first + PACKED_AT_ONCE && tile < num_tiles; tile++) {
        const int64_t k = tile * TERMS;
        pack_tile(x + row * D + k, D, T - row, D - k, packed.values + (block * num_tiles + tile) * TILE_VALUES);
      }
    };
    for_each((T + TILE_ROWS - 1) / TILE_ROWS * parts, pack);
  }

  void sums(int64_t row, int n, const bf16* w, int count, const bf16* next, float* out) const {
    const bf16* x = packed.values + row / TILE_ROWS * num_tiles * TILE_VALUES;
    const int64_t stride = num_tiles * TILE_VALUES;
    bf16 padded[COLUMNS * TERMS];
    if (D % TERMS != 0) pad_terms(w, D, count, padded);
    float turned[COLUMNS * COLUMNS] = {};
    const auto run = count > TILE_ROWS ? (n > TILE_ROWS ? tile_sums<true, true> : tile_sums<true, false>)
                                       : (n > TILE_ROWS ? tile_sums<false, true> : tile_sums<false, false>);
    run(x, stride, w, D, padded, next, turned);
    for (int r = 0; r < n; r += W) {
      for (int c = 0; c < count; c += W) {
        Vec values[W];
        for (int i = 0; i < W; i++) values[i] = load(turned + (c + i) * COLUMNS + r);
        turn_lanes(values);
        for (int i = 0; i < W; i++) store(out + (r + i) * COLUMNS + c, values[i]);
      }
    }
  }
};

}  // namespace
}  // namespace JAXSERVE_ISA
}  // namespace jaxserve

#endif
#endif
