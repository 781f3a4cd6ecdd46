// The kernels as XLA's foreign functions, on the best instruction set that this machine has.

#include "kernels/cpu/calls.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/pool.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxserve {

#define DECLARE(isa)                       \
  namespace isa {                          \
  void matmul(const Matmul&);              \
  void grouped_matmul(const GroupedMatmul&); \
  void attend(const Attention&);           \
  void rotary_write(const RotaryWrite&);   \
  constexpr Kernels kernels{matmul, grouped_matmul, attend, rotary_write}; \
  }
DECLARE(avx2)
DECLARE(avx512)
DECLARE(avx512bf16)
DECLARE(amx)
#undef DECLARE

namespace {

constexpr const Kernels* KERNELS[] = {nullptr, &avx2::kernels, &avx512::kernels, &avx512bf16::kernels, &amx::kernels};  // by level

int level = best_level();

Dtype dtype_of(const ffi::AnyBuffer& x) { return x.element_type() == ffi::F32 ? Dtype::kFloat32 : Dtype::kBfloat16; }

ffi::Error matmul(ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out, ffi::RemainingRets work,
                  bool has_scale, bool has_bias, bool has_residual, bool has_num_rows, float eps, bool gated, bool transposed) {
  Matmul m{};
  m.x = x.untyped_data(), m.w = w.untyped_data(), m.out = out->untyped_data();
  size_t next = 0;
  if (has_scale) m.scale = rest.get<ffi::AnyBuffer>(next++)->untyped_data(), m.normed = work.get<ffi::AnyBuffer>(0).value()->untyped_data();
  if (has_bias) m.bias = rest.get<ffi::AnyBuffer>(next++)->untyped_data();
  if (has_residual) m.residual = rest.get<ffi::AnyBuffer>(next++)->untyped_data();
  const int64_t T = x.dimensions()[0];
  m.T = has_num_rows ? std::clamp<int64_t>(rest.get<ffi::Buffer<ffi::S32>>(next++)->typed_data()[0], 0, T) : T;
  m.D = x.dimensions()[1], m.F = w.dimensions()[transposed ? 0 : 1];
  m.eps = eps, m.gated = gated, m.transposed = transposed, m.dtype = dtype_of(x);
  m.float32_out = m.dtype != Dtype::kFloat32 && dtype_of(*out) == Dtype::kFloat32;
  KERNELS[level]->matmul(m);
  const size_t row_bytes = out->size_bytes() / T;
  std::memset(static_cast<char*>(m.out) + m.T * row_bytes, 0, (T - m.T) * row_bytes);  // of padding
  return ffi::Error::Success();
}

ffi::Error grouped_matmul(ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Buffer<ffi::S32> tile_group, ffi::Buffer<ffi::S32> tile_row,
                          ffi::Buffer<ffi::S32> tile_rows, ffi::Buffer<ffi::S32> num_tiles, ffi::Result<ffi::AnyBuffer> out,
                          bool gated) {
  GroupedMatmul g{};
  Matmul& m = g.product;
  m.x = x.untyped_data(), m.w = w.untyped_data(), m.out = out->untyped_data();
  m.D = w.dimensions()[1], m.F = w.dimensions()[2], m.gated = gated, m.dtype = dtype_of(x);
  g.tile_group = tile_group.typed_data(), g.tile_row = tile_row.typed_data(), g.tile_rows = tile_rows.typed_data();
  g.num_tiles = num_tiles.typed_data();
  KERNELS[level]->grouped_matmul(g);
  return ffi::Error::Success();
}

ffi::Error attend(ffi::AnyBuffer q, ffi::AnyBuffer kv_pages, ffi::Buffer<ffi::S32> page_table, ffi::Buffer<ffi::S32> cu_q_lens,
                  ffi::Buffer<ffi::S32> kv_lens, ffi::Result<ffi::AnyBuffer> out, float scale, int64_t window, float soft_cap) {
  Attention a{};
  a.q = q.untyped_data(), a.kv_pages = kv_pages.untyped_data(), a.out = out->untyped_data();
  a.page_table = page_table.typed_data(), a.cu_q_lens = cu_q_lens.typed_data(), a.kv_lens = kv_lens.typed_data();
  a.T = q.dimensions()[0], a.N = q.dimensions()[1], a.H = q.dimensions()[2];
  a.num_pages = kv_pages.dimensions()[0], a.K = kv_pages.dimensions()[2], a.page_size = kv_pages.dimensions()[3];
  a.S = page_table.dimensions()[0], a.table_width = page_table.dimensions()[1];
  a.scale = scale, a.window = window, a.soft_cap = soft_cap, a.dtype = dtype_of(q);
  KERNELS[level]->attend(a);
  return ffi::Error::Success();
}

ffi::Error rotary_write(ffi::AnyBuffer qkv, ffi::AnyBuffer kv_pages, ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin,
                        ffi::Buffer<ffi::S32> slots, ffi::RemainingArgs scales, ffi::Result<ffi::AnyBuffer> q,
                        ffi::Result<ffi::AnyBuffer> pages, float eps) {
  if (kv_pages.untyped_data() != pages->untyped_data()) return ffi::Error::Internal("rotary_write: the pages were not given in place");
  RotaryWrite r{};
  r.qkv = qkv.untyped_data(), r.kv_pages = pages->untyped_data(), r.q = q->untyped_data();
  r.cos = cos.typed_data(), r.sin = sin.typed_data(), r.slots = slots.typed_data();
  if (scales.size() > 0) {
    r.q_scale = scales.get<ffi::AnyBuffer>(0)->untyped_data(), r.k_scale = scales.get<ffi::AnyBuffer>(1)->untyped_data();
  }
  r.T = qkv.dimensions()[0], r.N = q->dimensions()[1], r.H = qkv.dimensions()[2];
  r.num_pages = kv_pages.dimensions()[0], r.K = kv_pages.dimensions()[2], r.page_size = kv_pages.dimensions()[3];
  r.eps = eps, r.dtype = dtype_of(qkv);
  KERNELS[level]->rotary_write(r);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

#pragma GCC visibility push(default)  // from here on

extern "C" {

extern const char jaxserve_cpu_fingerprint[] = JAXSERVE_FINGERPRINT;  // by which build.py knows what this was made from

// The version of XLA's interface to foreign functions that this was compiled for, of major 0. An older XLA refuses it.
int jaxserve_cpu_ffi_minor() { return XLA_FFI_API_MINOR; }

// The level that kernels use (isa.h); 0: this CPU lacks what they need.
int jaxserve_cpu_level() { return jaxserve::level; }

int jaxserve_cpu_has_level(int level) { return jaxserve::has_level(level); }

// For tests: another level. Returns the one that was before, or -1 and changes nothing where this machine does not have it.
int jaxserve_cpu_use_level(int level) {
  if (!jaxserve::has_level(level)) return -1;
  int before = jaxserve::level;
  jaxserve::level = level;
  return before;
}

void jaxserve_cpu_set_num_threads(int num_threads) { jaxserve::set_num_threads(num_threads); }
int jaxserve_cpu_num_threads() { return jaxserve::num_threads(); }

}  // extern "C"

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_cpu_fused_matmul, jaxserve::matmul,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<bool>("has_scale")
                                  .Attr<bool>("has_bias")
                                  .Attr<bool>("has_residual")
                                  .Attr<bool>("has_num_rows")
                                  .Attr<float>("eps")
                                  .Attr<bool>("gated")
                                  .Attr<bool>("transposed"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_cpu_grouped_matmul, jaxserve::grouped_matmul,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("gated"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_cpu_attend, jaxserve::attend,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("soft_cap"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_cpu_rotary_write, jaxserve::rotary_write,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps"));
