// The grouped matmul for CPUs: an item of the pool is a tile of rows and a block of columns of its expert's matrix [D, F]. Matrices
// of experts without tiles are not read.
//
// A lane of a vector is a column, so that matrices are used as they lie and no sum crosses lanes. Each element is one sum along D,
// from its first term to its last (with bfloat16 products, of pairs of terms), whatever the tile: a row's bits depend on it alone.
// Where the CPU multiplies tiles (AMX), `tile_block.h` has the sums, in the order of `tiles.h`.

#include "kernels/cpu/pool.h"
#include "kernels/fused_matmul/product.h"
#include "kernels/grouped_matmul/tile_block.h"

namespace jaxserve {
namespace JAXSERVE_ISA {
namespace {

constexpr int LANES = 4 * W;  // columns of a block
constexpr int AHEAD = 16;     // terms before its use that a row of the block is fetched

INLINE float value(float x) { return x; }
INLINE float value(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  memcpy(&y, &bits, sizeof(y));
  return y;
}

INLINE void fetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

// Terms k, ..., k + COUNT - 1 of the sums of R rows. w: the block's columns of term k, F apart; count of them are there.
template <typename T>
struct LaneTerms {
  static constexpr int COUNT = 1;
  template <int R>
  INLINE void add(Vec total[R][4], const T* x, int64_t D, const T* w, int64_t F, int count, int) {
    (void)F;
    Vec column[4];
    for (int c = 0; c < 4; c++) {
      const int n = count - c * W;
      column[c] = n >= W ? load(w + c * W) : n > 0 ? load_first(w + c * W, n) : zero();
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Vec row = set1(value(x[r * D]));
      for (int c = 0; c < 4; c++) total[r][c] = fma(row, column[c], total[r][c]);
    }
  }
};

#ifdef __AVX512BF16__
template <>
struct LaneTerms<bf16> {
  static constexpr int COUNT = 2;
  template <int R>
  INLINE void add(Vec total[R][4], const bf16* x, int64_t D, const bf16* w, int64_t F, int count, int n) {
    // Of the words of a and b one after the other: each lane has a column of a in its low half, and the same of b in its high half.
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i first = _mm512_or_si512(_mm512_or_si512(lane, _mm512_slli_epi32(lane, 16)), _mm512_set1_epi32(32 << 16));
    const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    __m512bh column[4];
    for (int h = 0; h < 2; h++) {
      const int there = count - 32 * h;
      const __mmask32 mask = there >= 32 ? ~0u : there > 0 ? (1u << there) - 1 : 0u;
      const __m512i a = _mm512_maskz_loadu_epi16(mask, w + 32 * h);
      const __m512i b = _mm512_maskz_loadu_epi16(n == 2 ? mask : 0u, w + F + 32 * h);
      column[2 * h] = (__m512bh)_mm512_permutex2var_epi16(a, first, b);
      column[2 * h + 1] = (__m512bh)_mm512_permutex2var_epi16(a, second, b);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      uint32_t pair = x[r * D].bits;
      if (n == 2) memcpy(&pair, x + r * D, sizeof(pair));
      const __m512bh row = (__m512bh)_mm512_set1_epi32(static_cast<int>(pair));
      for (int c = 0; c < 4; c++) total[r][c] = _mm512_dpbf16_ps(total[r][c], row, column[c]);
    }
  }
};
#endif

// sums[r * LANES + c] = x[r] . w[:, c] for R rows, D apart, and the block's columns, of which count are there.
template <int R, typename T>
void lane_tile(const T* x, int64_t D, const T* w, int64_t F, int count, float* sums) {
  using V = LaneTerms<T>;
  Vec total[R][4];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    for (int c = 0; c < 4; c++) total[r][c] = zero();
  }
  int64_t k = 0;
  for (; k + V::COUNT <= D; k += V::COUNT) {
    for (int i = 0; i < V::COUNT; i++) {
      for (int c = 0; c < LANES; c += 64 / static_cast<int>(sizeof(T))) fetch(w + (k + AHEAD + i) * F + c);
    }
    V::template add<R>(total, x + k, D, w + k * F, F, count, V::COUNT);
  }
  if (k < D) V::template add<R>(total, x + k, D, w + k * F, F, count, 1);
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    for (int c = 0; c < 4; c++) store(sums + r * LANES + c * W, total[r][c]);
  }
}

// The same for n <= ROWS rows.
template <typename T>
void lane_rows(const T* x, int n, int64_t D, const T* w, int64_t F, int count, float* sums) {
  switch (n) {
    case 1:
      return lane_tile<1>(x, D, w, F, count, sums);
    case 2:
      return lane_tile<2>(x, D, w, F, count, sums);
#ifdef __AVX512F__
    case 3:
      return lane_tile<3>(x, D, w, F, count, sums);
    case 4:
      return lane_tile<4>(x, D, w, F, count, sums);
    case 5:
      return lane_tile<5>(x, D, w, F, count, sums);
    case 6:
      return lane_tile<6>(x, D, w, F, count, sums);
#endif
  }
}

// Columns of a matrix for some rows: as they lie, F apart, or where several tiles of rows read them, side by side in scratch.
template <typename T>
struct Block {
  static constexpr int AT_ONCE = ROWS;
  static constexpr int WIDTH = LANES;
  static int64_t scratch_size(int64_t num_rows, int64_t D) { return num_rows > ROWS ? D * LANES : 0; }
  const T* w;
  int64_t F;
  int count;
  Block(const T* columns, int64_t stride, int64_t D, int num_columns, T* scratch) : w(columns), F(stride), count(num_columns) {
    if (scratch == nullptr) return;
    for (int64_t k = 0; k < D; k++) memcpy(scratch + k * LANES, columns + k * stride, count * sizeof(T));
    w = scratch, F = LANES;
  }
  // out[r * WIDTH + c] for n <= AT_ONCE rows.
  void sums(const T* x, int n, int64_t D, float* out) const { lane_rows(x, n, D, w, F, count, out); }
};

// Columns: a block of them; see Block.
template <typename T, typename Columns>
void run(const GroupedMatmul& g) {
  const Result<T, T> whole{g.product};
  const int64_t D = g.product.D, width = whole.width(), blocks = (width + Columns::WIDTH - 1) / Columns::WIDTH;
  auto item = [&](int64_t i) {
    const int64_t tile = i / blocks, first = i % blocks * Columns::WIDTH, num_rows = g.tile_rows[tile];
    const int count = static_cast<int>(width - first < Columns::WIDTH ? width - first : Columns::WIDTH);
    Matmul m = g.product;
    m.out = static_cast<T*>(m.out) + g.tile_row[tile] * width;
    const Result<T, T> result{m};
    const T* x = static_cast<const T*>(m.x) + g.tile_row[tile] * D;
    const T* w = static_cast<const T*>(m.w) + g.tile_group[tile] * D * m.F + first;
    const int64_t size = Columns::scratch_size(num_rows, D);
    Scratch<T> scratch(m.gated ? 2 * size : size);
    const Columns columns(w, m.F, D, count, size ? scratch.values : nullptr);
    const Columns up(w + (m.gated ? width : 0), m.F, D, m.gated ? count : 0, size && m.gated ? scratch.values + size : nullptr);
    float sums[Columns::AT_ONCE * Columns::WIDTH], up_sums[Columns::AT_ONCE * Columns::WIDTH];
    for (int64_t row = 0; row < num_rows; row += Columns::AT_ONCE) {
      const int n = static_cast<int>(num_rows - row < Columns::AT_ONCE ? num_rows - row : Columns::AT_ONCE);
      columns.sums(x + row * D, n, D, sums);
      if (m.gated) up.sums(x + row * D, n, D, up_sums);
      for (int r = 0; r < n; r++) result.finish(sums + r * Columns::WIDTH, up_sums + r * Columns::WIDTH, row + r, first, count);
    }
  };
  for_each(*g.num_tiles * blocks, item);
}

}  // namespace

void grouped_matmul(const GroupedMatmul& g) {
  if (g.product.dtype == Dtype::kFloat32) return run<float, Block<float>>(g);
#ifdef __AMX_BF16__
  run<bf16, TileBlock>(g);
#else
  run<bf16, Block<bf16>>(g);
#endif
}

}  // namespace JAXSERVE_ISA
}  // namespace jaxserve
