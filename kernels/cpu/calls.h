// What the kernels are called with. `calls.cc` fills these in from XLA's buffers and picks the instruction set.

#ifndef JAXSERVE_KERNELS_CPU_CALLS_H_
#define JAXSERVE_KERNELS_CPU_CALLS_H_

#include <cstdint>

namespace jaxserve {

enum class Dtype { kBfloat16, kFloat32 };

struct Matmul {  // kernels/fused_matmul/api.py
  const void* x;         // [T, D]
  const void* w;         // [F, D], or [D, F] where not transposed
  const void* scale;     // [D], or null
  const void* bias;      // [F], or null
  const void* residual;  // [T, F], or null
  void* out;             // [T, F], or [T, F / 2] where gated
  void* normed;          // [T, D] to work in, where there is a scale
  int64_t T, D, F;
  float eps;
  bool gated, transposed;
  bool float32_out;  // the sums as they are; x and w may be bfloat16
  Dtype dtype;
};

struct GroupedMatmul {  // kernels/grouped_matmul/layout.py
  Matmul product;             // of all rows, its w of all groups, one after the other
  const int32_t* tile_group;  // [W]
  const int32_t* tile_row;    // [W]
  const int32_t* tile_rows;   // [W]
  const int32_t* num_tiles;   // []
};

struct Attention {  // kernels/ragged_paged_attention/api.py
  const void* q;              // [T, N, H]
  const void* kv_pages;       // [num_pages, 2, K, page_size, H]
  const int32_t* page_table;  // [S, table_width]
  const int32_t* cu_q_lens;   // [S + 1]
  const int32_t* kv_lens;     // [S]
  void* out;                  // [T, N, H]
  int64_t T, N, H, K, S, table_width, num_pages, page_size;
  float scale;
  int64_t window;  // 0: none
  float soft_cap;  // 0: none
  Dtype dtype;
};

struct RotaryWrite {  // kernels/rotary_write/api.py
  const void* qkv;       // [T, N + 2 K, H]
  void* kv_pages;        // [num_pages, 2, K, page_size, H]
  const float *cos, *sin;  // [T, H / 2]
  const int32_t* slots;  // [T]
  const void *q_scale, *k_scale;  // [H], or null
  void* q;               // [T, N, H]
  int64_t T, N, H, K, num_pages, page_size;
  float eps;
  Dtype dtype;
};

struct Kernels {  // of one instruction set
  void (*matmul)(const Matmul&);
  void (*grouped_matmul)(const GroupedMatmul&);
  void (*attend)(const Attention&);
  void (*rotary_write)(const RotaryWrite&);
};

}  // namespace jaxserve

#endif
