// A block of an expert's columns for CPUs that multiply tiles (AMX): 16 rows and 64 columns are four tiles of sums.
//
// Rows of x are the rows of one operand as they lie. A matrix lies [D, F], so that pairs of its rows are interleaved for the other,
// once for all rows of an item.

#ifndef JAXSERVE_KERNELS_GROUPED_MATMUL_TILE_BLOCK_H_
#define JAXSERVE_KERNELS_GROUPED_MATMUL_TILE_BLOCK_H_

#ifdef __AMX_BF16__

#include "kernels/cpu/tiles.h"

namespace jaxserve {
namespace JAXSERVE_ISA {
namespace {

// a[0], b[0], a[1], b[1], ... of 16 values each.
INLINE void interleave(const bf16* a, const bf16* b, bf16* out) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)), y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
  const __m256i low = _mm256_unpacklo_epi16(x, y), high = _mm256_unpackhi_epi16(x, y);  // of each half
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permute2x128_si256(low, high, 0x20));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16), _mm256_permute2x128_si256(low, high, 0x31));
}

struct TileBlock {
  static constexpr int AT_ONCE = TILE_ROWS;
  static constexpr int WIDTH = 64;
  static constexpr int FETCHED = 16;  // terms before its use that a row of the matrix is fetched
  static int64_t scratch_size(int64_t, int64_t D) { return (D + TERMS - 1) / TERMS * TERMS * WIDTH; }

  const bf16* packed;  // [blocks of 32 terms, 4 tiles, 16 pairs, 16 columns, 2]

  TileBlock(const bf16* w, int64_t F, int64_t D, int count, bf16* scratch) : packed(scratch) {
    if (count == 0) return;
    const bf16 none[TILE_ROWS] = {};
    for (int64_t k = 0; k < (D + TERMS - 1) / TERMS * TERMS; k += 2) {
      bf16* pairs = scratch + k / TERMS * 4 * TILE_VALUES + k % TERMS * TILE_ROWS;
      for (int c = 0; c < WIDTH; c += TILE_ROWS) {
        const int64_t n = count - c;  // columns from here on
        const bf16 *first = none, *second = none;
        bf16 some[2][TILE_ROWS] = {};
        if (n >= TILE_ROWS) {
          if (k < D) first = w + k * F + c;
          if (k + 1 < D) second = w + (k + 1) * F + c;
        } else if (n > 0) {
          if (k < D) memcpy(some[0], w + k * F + c, n * sizeof(bf16));
          if (k + 1 < D) memcpy(some[1], w + (k + 1) * F + c, n * sizeof(bf16));
          first = some[0], second = some[1];
        }
        for (int i = 0; i < 2; i++) _mm_prefetch(reinterpret_cast<const char*>(w + (k + FETCHED + i) * F + c), _MM_HINT_T0);
        interleave(first, second, pairs + c / TILE_ROWS * TILE_VALUES);
      }
    }
  }

  // out[r * WIDTH + c] for n <= AT_ONCE rows.
  void sums(const bf16* x, int n, int64_t D, float* out) const {
    TileConfig config;
    config.set(0, 4, n);
    config.set(5, 6, TILE_ROWS);
    bf16 padded[AT_ONCE * TERMS];
    if (D % TERMS != 0) pad_terms(x, D, n, padded);
    const Tiles tiles(config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const bf16* columns = packed;
    for (int64_t k = 0; k < D; k += TERMS, columns += 4 * TILE_VALUES) {
      const bool whole = k + TERMS <= D;
      _tile_loadd(4, whole ? x + k : padded, (whole ? D : TERMS) * sizeof(bf16));
      _tile_loadd(5, columns, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, columns + TILE_VALUES, 64);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(5, columns + 2 * TILE_VALUES, 64);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(6, columns + 3 * TILE_VALUES, 64);
      _tile_dpbf16ps(3, 4, 6);
    }
    constexpr int ROW_BYTES = WIDTH * sizeof(float);
    _tile_stored(0, out, ROW_BYTES);
    _tile_stored(1, out + TILE_ROWS, ROW_BYTES);
    _tile_stored(2, out + 2 * TILE_ROWS, ROW_BYTES);
    _tile_stored(3, out + 3 * TILE_ROWS, ROW_BYTES);
  }
};

}  // namespace
}  // namespace JAXSERVE_ISA
}  // namespace jaxserve

#endif
#endif
