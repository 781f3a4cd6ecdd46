// Vectors of float32, as wide as the instruction set that a file is compiled for, and what kernels read and write with them.
//
// A kernel's file is compiled once for each instruction set (`build.py`), each time into a namespace of its own, JAXSERVE_ISA. It
// includes no templates of the standard library: a linker keeps one copy of those, which may be the one that this CPU can't run.
//
// Sums have one order: lane by lane along the row, then the lanes, as `sum` and `sum4` add them. So an element's bits depend on its
// row and its column alone.

#ifndef JAXSERVE_KERNELS_CPU_SIMD_H_
#define JAXSERVE_KERNELS_CPU_SIMD_H_

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

namespace jaxserve {
namespace JAXSERVE_ISA {

struct bf16 {
  uint16_t bits;
};

#ifdef __AVX512F__

using Vec = __m512;
constexpr int W = 16;  // lanes

INLINE Vec zero() { return _mm512_setzero_ps(); }
INLINE Vec set1(float x) { return _mm512_set1_ps(x); }
INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
INLINE Vec load(const bf16* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
INLINE Vec floor(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
INLINE Vec power_of_two(Vec n) {  // of integers in [-126, 127]
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
INLINE Vec keep_first(Vec x, int n, float fill) {  // lanes from n on become fill
  return _mm512_mask_blend_ps(static_cast<__mmask16>((1u << n) - 1), _mm512_set1_ps(fill), x);
}
// As bfloat16, in the low halves: rounded to nearest even; NaN stays NaN.
INLINE __m512i bf16_bits(Vec x) {
  __m512i bits = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  return _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), rounded, _mm512_set1_epi32(0x7fc0));
}
INLINE Vec select_above(Vec x, float limit, Vec y) {  // y where x > limit, else x
  return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_GT_OQ), y);
}
INLINE void store(bf16* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(bf16_bits(x)));
}
INLINE Vec rounded(Vec x, const bf16*) { return _mm512_castsi512_ps(_mm512_slli_epi32(bf16_bits(x), 16)); }
// The sums of the lanes of four vectors.
INLINE __m128 sum4(Vec a, Vec b, Vec c, Vec d) {
  Vec ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)), cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  __m512d ab2 = _mm512_castps_pd(ab), cd2 = _mm512_castps_pd(cd);
  Vec abcd = add(_mm512_castpd_ps(_mm512_unpacklo_pd(ab2, cd2)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab2, cd2)));
  __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(abcd), 1));
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), high);
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// x[i] becomes lane i of each.
INLINE void turn_lanes(Vec x[W]) {
  __m512d y[W];
  for (int i = 0; i < W; i += 4) {
    __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(x[i], x[i + 1])), b = _mm512_castps_pd(_mm512_unpacklo_ps(x[i + 2], x[i + 3]));
    __m512d c = _mm512_castps_pd(_mm512_unpackhi_ps(x[i], x[i + 1])), d = _mm512_castps_pd(_mm512_unpackhi_ps(x[i + 2], x[i + 3]));
    y[i] = _mm512_unpacklo_pd(a, b), y[i + 1] = _mm512_unpackhi_pd(a, b);
    y[i + 2] = _mm512_unpacklo_pd(c, d), y[i + 3] = _mm512_unpackhi_pd(c, d);
  }
  for (int i = 0; i < 4; i++) {  // 4 x 4 blocks of four lanes
    Vec a = _mm512_castpd_ps(y[i]), b = _mm512_castpd_ps(y[i + 4]), c = _mm512_castpd_ps(y[i + 8]), d = _mm512_castpd_ps(y[i + 12]);
    Vec ab = _mm512_shuffle_f32x4(a, b, 0x88), cd = _mm512_shuffle_f32x4(c, d, 0x88);  // blocks 0 and 2
    x[i] = _mm512_shuffle_f32x4(ab, cd, 0x88), x[i + 8] = _mm512_shuffle_f32x4(ab, cd, 0xdd);
    ab = _mm512_shuffle_f32x4(a, b, 0xdd), cd = _mm512_shuffle_f32x4(c, d, 0xdd);  // 1 and 3
    x[i + 4] = _mm512_shuffle_f32x4(ab, cd, 0x88), x[i + 12] = _mm512_shuffle_f32x4(ab, cd, 0xdd);
  }
}

#else  // AVX2, FMA

using Vec = __m256;
constexpr int W = 8;

INLINE Vec zero() { return _mm256_setzero_ps(); }
INLINE Vec set1(float x) { return _mm256_set1_ps(x); }
INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
INLINE void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
INLINE Vec load(const bf16* p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
INLINE Vec floor(Vec a) { return _mm256_floor_ps(a); }
INLINE Vec power_of_two(Vec n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
INLINE Vec keep_first(Vec x, int n, float fill) {
  __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_blendv_ps(_mm256_set1_ps(fill), x, _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane)));
}
INLINE __m256i bf16_bits(Vec x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
}
INLINE Vec select_above(Vec x, float limit, Vec y) {
  return _mm256_blendv_ps(x, y, _mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_GT_OQ));
}
INLINE void store(bf16* p, Vec x) {
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(bf16_bits(x), _mm256_setzero_si256()), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
INLINE Vec rounded(Vec x, const bf16*) { return _mm256_castsi256_ps(_mm256_slli_epi32(bf16_bits(x), 16)); }
INLINE __m128 sum4(Vec a, Vec b, Vec c, Vec d) {
  Vec abcd = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
}
INLINE void turn_lanes(Vec x[W]) {
  __m256d y[W];
  for (int i = 0; i < W; i += 4) {
    __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(x[i], x[i + 1])), b = _mm256_castps_pd(_mm256_unpacklo_ps(x[i + 2], x[i + 3]));
    __m256d c = _mm256_castps_pd(_mm256_unpackhi_ps(x[i], x[i + 1])), d = _mm256_castps_pd(_mm256_unpackhi_ps(x[i + 2], x[i + 3]));
    y[i] = _mm256_unpacklo_pd(a, b), y[i + 1] = _mm256_unpackhi_pd(a, b);
    y[i + 2] = _mm256_unpacklo_pd(c, d), y[i + 3] = _mm256_unpackhi_pd(c, d);
  }
  for (int i = 0; i < 4; i++) {
    Vec a = _mm256_castpd_ps(y[i]), b = _mm256_castpd_ps(y[i + 4]);
    x[i] = _mm256_permute2f128_ps(a, b, 0x20), x[i + 4] = _mm256_permute2f128_ps(a, b, 0x31);
  }
}

#endif

INLINE float sum(Vec a) { return _mm_cvtss_f32(sum4(a, a, a, a)); }

// The first n < W values of p; the other lanes are fill.
template <typename T>
INLINE Vec load_first(const T* p, int n, float fill = 0) {
  T values[W] = {};
  memcpy(values, p, n * sizeof(T));
  return keep_first(load(values), n, fill);
}

template <typename T>
INLINE void store_first(T* p, Vec x, int n) {
  T values[W];
  store(values, x);
  memcpy(p, values, n * sizeof(T));
}

// f(i, n) for runs of n lanes from i on, n == W but for the last; the first argument of a run that is whole is a constant.
template <typename F>
INLINE void for_lanes(int64_t size, F f) {
  int64_t i = 0;
  for (; i + W <= size; i += W) f(i, W);
  if (i < size) f(i, static_cast<int>(size - i));
}
template <typename T>
INLINE Vec load_n(const T* p, int n, float fill = 0) {
  return n == W ? load(p) : load_first(p, n, fill);
}
template <typename T>
INLINE void store_n(T* p, Vec x, int n) {
  if (n == W) {
    store(p, x);
  } else {
    store_first(p, x, n);
  }
}

// What a value of T keeps of x.
INLINE Vec rounded(Vec x, const float*) { return x; }

// exp(x) to 2 ulp, 0 below -87.3, exp(88) above 88, NaN of NaN. By Cody and Waite's reduction to [-ln 2 / 2, ln 2 / 2], and Cephes' polynomial (expf).
INLINE Vec exp(Vec x) {
  Vec clamped = min(max(x, set1(-87.3f)), set1(88.0f));
  Vec n = floor(fma(clamped, set1(1.44269504088896341f), set1(0.5f)));
  Vec r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), clamped));
  Vec y = set1(1.9875691500e-4f);
  y = fma(y, r, set1(1.3981999507e-3f));
  y = fma(y, r, set1(8.3334519073e-3f));
  y = fma(y, r, set1(4.1665795894e-2f));
  y = fma(y, r, set1(1.6666665459e-1f));
  y = fma(y, r, set1(5.0000001201e-1f));
  y = add(fma(y, mul(r, r), r), set1(1.0f));
  y = mul(y, power_of_two(n));
#ifdef __AVX512F__
  y = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, set1(-87.3f), _CMP_NLT_UQ), y);
  return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
#else
  y = _mm256_and_ps(y, _mm256_cmp_ps(x, set1(-87.3f), _CMP_NLT_UQ));
  return _mm256_blendv_ps(y, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
#endif
}

}  // namespace JAXSERVE_ISA
}  // namespace jaxserve

#endif
