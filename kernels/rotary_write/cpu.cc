// The rotary write for CPUs: a token's heads are normed, rotated and written to where they belong, in one pass.
//
// Values are rounded where `xla.py` rounds them: after the norm, after its scale, after the rotation.

#include "kernels/cpu/calls.h"
#include "kernels/cpu/pool.h"
#include "kernels/cpu/simd.h"

namespace jaxserve {
namespace JAXSERVE_ISA {
namespace {

constexpr int64_t FEW = 16384;  // values that one thread is done with before another has begun

template <typename T>
void rotate_head(const RotaryWrite& r, const T* x, const T* scale, const float* cos, const float* sin, T* out) {
  const int64_t half = r.H / 2;
  Vec factor = set1(1.0f);
  if (scale != nullptr) {
    Vec squares = zero();
    for_lanes(r.H, [&](int64_t i, int n) {
      Vec v = load_n(x + i, n);
      squares = fma(v, v, squares);
    });
    factor = set1(1.0f / sqrtf(sum(squares) / static_cast<float>(r.H) + r.eps));
  }
  auto normed = [&](int64_t i, int n) {
    Vec v = load_n(x + i, n);
    if (scale == nullptr) return v;
    return rounded(mul(rounded(mul(v, factor), x), load_n(scale + i, n)), x);
  };
  for_lanes(half, [&](int64_t i, int n) {
    Vec first = normed(i, n), second = normed(half + i, n), c = load_n(cos + i, n), s = load_n(sin + i, n);
    store_n(out + i, sub(mul(first, c), mul(second, s)), n);
    store_n(out + half + i, add(mul(second, c), mul(first, s)), n);
  });
}

template <typename T>
void run(const RotaryWrite& r) {
  auto token = [&](int64_t t) {
    const T* heads = static_cast<const T*>(r.qkv) + t * (r.N + 2 * r.K) * r.H;
    const float *cos = r.cos + t * (r.H / 2), *sin = r.sin + t * (r.H / 2);
    for (int64_t n = 0; n < r.N; n++) {
      T* out = static_cast<T*>(r.q) + (t * r.N + n) * r.H;
      rotate_head(r, heads + n * r.H, static_cast<const T*>(r.q_scale), cos, sin, out);
    }
    const int64_t slot = r.slots[t];
    if (slot < 0 || slot >= r.num_pages * r.page_size) return;  // padding
    const int64_t offset = slot % r.page_size * r.H, page_values = r.page_size * r.H;
    T* page = static_cast<T*>(r.kv_pages) + slot / r.page_size * 2 * r.K * page_values + offset;
    for (int64_t k = 0; k < r.K; k++) {
      rotate_head(r, heads + (r.N + k) * r.H, static_cast<const T*>(r.k_scale), cos, sin, page + k * page_values);
      memcpy(page + (r.K + k) * page_values, heads + (r.N + r.K + k) * r.H, r.H * sizeof(T));
    }
  };
  if (r.T * (r.N + 2 * r.K) * r.H <= FEW) {
    for (int64_t t = 0; t < r.T; t++) token(t);
  } else {
    for_each(r.T, token);
  }
}

}  // namespace

void rotary_write(const RotaryWrite& r) { r.dtype == Dtype::kFloat32 ? run<float>(r) : run<bf16>(r); }

}  // namespace JAXSERVE_ISA
}  // namespace jaxserve
