// Tiles of dot products, and what turns a matrix around for them. What `simd.h` says of sums holds here.

#ifndef JAXSERVE_KERNELS_CPU_DOT_H_
#define JAXSERVE_KERNELS_CPU_DOT_H_

#include <stdlib.h>

#include "kernels/cpu/simd.h"

namespace jaxserve {
namespace JAXSERVE_ISA {
namespace {

// Terms of a sum that are multiplied at a time.
template <typename T>
struct Terms {
  using Values = Vec;
  static constexpr int COUNT = W;
  INLINE Values read(const T* p) { return load(p); }
  INLINE Values read_first(const T* p, int n) { return load_first(p, n); }
  INLINE Vec add_product(Vec sum, Values a, Values b) { return fma(a, b, sum); }
  INLINE Vec to_lanes(Values a) { return a; }
  INLINE Values from_lanes(Vec a) { return a; }
};

#ifdef __AVX512BF16__
template <>
struct Terms<bf16> {
  using Values = __m512bh;
  static constexpr int COUNT = 32;
  INLINE Values read(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  INLINE Values read_first(const bf16* p, int n) { return (__m512bh)_mm512_maskz_loadu_epi16((1u << n) - 1, p); }
  INLINE Vec add_product(Vec sum, Values a, Values b) { return _mm512_dpbf16_ps(sum, a, b); }
  INLINE Vec to_lanes(Values a) { return (Vec)a; }  // a pair of values in each lane: moved, never computed with
  INLINE Values from_lanes(Vec a) { return (Values)a; }
};
#endif

#ifdef __AVX512F__
constexpr int ROWS = 6;  // 24 sums, 4 columns and a row are 29 of 32 registers
#else
constexpr int ROWS = 2;  // 8, 4 and 1 of 16
#endif

// sums[r * stride + c] = x[r] . w[c] for R rows and four columns. next: what is to be read soon, as far after w[0], or null.
template <int R, typename T>
void dot_tile(const T* x, int64_t row_stride, const T* const w[4], int64_t D, float* sums, int64_t stride, const T* next) {
  using V = Terms<T>;
  Vec total[R][4];  // all loops over r are unrolled: in one that is not, the sums would lie in memory
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    for (int c = 0; c < 4; c++) total[r][c] = zero();
  }
  int64_t k = 0;
  for (; k + V::COUNT <= D; k += V::COUNT) {
    typename V::Values column[4];
    for (int c = 0; c < 4; c++) column[c] = V::read(w[c] + k);
    if (next != nullptr) {
      for (int c = 0; c < 4; c++) _mm_prefetch(reinterpret_cast<const char*>(next + c * D + k), _MM_HINT_T1);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      typename V::Values row = V::read(x + r * row_stride + k);
      for (int c = 0; c < 4; c++) total[r][c] = V::add_product(total[r][c], row, column[c]);
    }
  }
  if (k < D) {
    const int n = static_cast<int>(D - k);
    typename V::Values column[4];
    for (int c = 0; c < 4; c++) column[c] = V::read_first(w[c] + k, n);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      typename V::Values row = V::read_first(x + r * row_stride + k, n);
      for (int c = 0; c < 4; c++) total[r][c] = V::add_product(total[r][c], row, column[c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) _mm_storeu_ps(sums + r * stride, sum4(total[r][0], total[r][1], total[r][2], total[r][3]));
}

// The same for n <= ROWS rows.
template <typename T>
void dot_rows(const T* x, int64_t row_stride, int n, const T* const w[4], int64_t D, float* sums, int64_t stride, const T* next) {
  switch (n) {
    case 1:
      return dot_tile<1>(x, row_stride, w, D, sums, stride, next);
    case 2:
      return dot_tile<2>(x, row_stride, w, D, sums, stride, next);
#ifdef __AVX512F__
    case 3:
      return dot_tile<3>(x, row_stride, w, D, sums, stride, next);
    case 4:
      return dot_tile<4>(x, row_stride, w, D, sums, stride, next);
    case 5:
      return dot_tile<5>(x, row_stride, w, D, sums, stride, next);
    case 6:
      return dot_tile<6>(x, row_stride, w, D, sums, stride, next);
#endif
  }
}

// Memory of the thread for the time of an item.
template <typename T>
struct Scratch {
  T* values;
  explicit Scratch(int64_t count) : values(count == 0 ? nullptr : static_cast<T*>(malloc(count * sizeof(T)))) {}
  ~Scratch() { free(values); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
};

INLINE void turn_tile(const bf16* w, int64_t stride, int64_t D, bf16* out) {  // 8 x 8
  __m128i a[8], b[8];
  for (int i = 0; i < 8; i++) a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w + i * stride));
  for (int i = 0; i < 4; i++) {
    b[2 * i] = _mm_unpacklo_epi16(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
  }
  for (int i = 0; i < 2; i++) {
    for (int h = 0; h < 2; h++) {
      a[4 * i + 2 * h] = _mm_unpacklo_epi32(b[4 * i + h], b[4 * i + h + 2]);
      a[4 * i + 2 * h + 1] = _mm_unpackhi_epi32(b[4 * i + h], b[4 * i + h + 2]);
    }
  }
  for (int i = 0; i < 4; i++) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + (2 * i) * D), _mm_unpacklo_epi64(a[i], a[i + 4]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + (2 * i + 1) * D), _mm_unpackhi_epi64(a[i], a[i + 4]));
  }
}

INLINE void turn_tile(const float* w, int64_t stride, int64_t D, float* out) {  // 4 x 4
  __m128 a = _mm_loadu_ps(w), b = _mm_loadu_ps(w + stride), c = _mm_loadu_ps(w + 2 * stride), d = _mm_loadu_ps(w + 3 * stride);
  _MM_TRANSPOSE4_PS(a, b, c, d);
  _mm_storeu_ps(out, a), _mm_storeu_ps(out + D, b), _mm_storeu_ps(out + 2 * D, c), _mm_storeu_ps(out + 3 * D, d);
}

// out[c * D + k] = w[k * stride + c] for k < D, c < count.
template <typename T>
void turn(const T* w, int64_t stride, int64_t D, int count, T* out) {
  constexpr int SIZE = 16 / sizeof(T);
  int64_t k = 0;
  for (; k + SIZE <= D; k += SIZE) {
    int c = 0;
    for (; c + SIZE <= count; c += SIZE) turn_tile(w + k * stride + c, stride, D, out + c * D + k);
    for (; c < count; c++) {
      for (int i = 0; i < SIZE; i++) out[c * D + k + i] = w[(k + i) * stride + c];
    }
  }
  for (; k < D; k++) {
    for (int c = 0; c < count; c++) out[c * D + k] = w[k * stride + c];
  }
}

}  // namespace
}  // namespace JAXSERVE_ISA
}  // namespace jaxserve

#endif
