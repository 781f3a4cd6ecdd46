// AMX's registers: eight tiles of 16 rows of 64 bytes, and what the kernels that multiply them share.
//
// Tiles 0 to 3 hold sums, 4 to 7 what is multiplied. _tile_dpbf16ps(c, a, b) adds to each sum of c the product of a row of a, 32
// terms, and a column of b, whose rows hold pairs of terms: the sum of the even terms' products, plus that of the odd ones'. All this
// in float32, rounded to nearest at each term; values below 2^-126 count as zero (Intel's manual, volume 2, TDPBF16PS). Rows and
// columns are taken 32 terms at a time from the first on, the last of them filled up with zeros. So the order of a sum, and its bits,
// depend on D alone.

#ifndef JAXSERVE_KERNELS_CPU_TILES_H_
#define JAXSERVE_KERNELS_CPU_TILES_H_

#ifdef __AMX_BF16__

#include "kernels/cpu/simd.h"

namespace jaxserve {
namespace JAXSERVE_ISA {
namespace {

constexpr int TILE_ROWS = 16;
constexpr int TERMS = 32;                       // bfloat16 values of a row
constexpr int TILE_VALUES = TILE_ROWS * TERMS;  // of a tile

// Of the eight tiles, as the instruction reads it. 0 rows: not in use.
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t num_rows[16] = {};
  void set(int first, int last, int rows) {
    for (int tile = first; tile <= last; tile++) num_rows[tile] = static_cast<uint8_t>(rows), row_bytes[tile] = rows > 0 ? 64 : 0;
  }
};
static_assert(sizeof(TileConfig) == 64);

// What was stored lies in memory from here on. The intrinsics of g++ 12 do not say that _tile_loadd reads memory, nor that
// _tile_loadconfig reads more than eight bytes.
INLINE void settle() { asm volatile("" ::: "memory"); }

// The tiles of this thread, until the end of the scope: no system has to save them afterwards.
struct Tiles {
  explicit Tiles(const TileConfig& config) {
    settle();
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// The last terms of count rows, fewer than TERMS, with zeros after them: [count, TERMS] in out. x: the first row, D apart.
INLINE void pad_terms(const bf16* x, int64_t D, int count, bf16* out) {
  const int64_t first = D / TERMS * TERMS;
  memset(out, 0, count * TERMS * sizeof(bf16));
  for (int i = 0; i < count; i++) memcpy(out + i * TERMS, x + i * D + first, (D - first) * sizeof(bf16));
}

}  // namespace
}  // namespace JAXSERVE_ISA
}  // namespace jaxserve

#endif
#endif
