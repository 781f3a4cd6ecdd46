// The grouped matmul for CPUs: an item of the pool is a tile of rows and a block of columns of its expert's matrix, which is turned
// around for it. Matrices of experts without tiles are not read.

#include "kernels/cpu/pool.h"
#include "kernels/fused_matmul/product.h"

namespace jaxserve {
namespace JAXSERVE_ISA {
namespace {

template <typename T>
void run(const GroupedMatmul& g) {
  const int64_t blocks = Product<T, T>{g.product, nullptr}.num_items();
  auto item = [&](int64_t i) {
    const int64_t tile = i / blocks, row = g.tile_row[tile];
    Matmul m = g.product;
    m.w = static_cast<const T*>(m.w) + g.tile_group[tile] * m.D * m.F;
    m.T = g.tile_rows[tile];
    const Product<T, T> product{m, static_cast<const T*>(m.x) + row * m.D};
    m.out = static_cast<T*>(m.out) + row * product.width();
    product(i % blocks);
  };
  for_each(*g.num_tiles * blocks, item);
}

}  // namespace

void grouped_matmul(const GroupedMatmul& g) { g.product.dtype == Dtype::kFloat32 ? run<float>(g) : run<bf16>(g); }

}  // namespace JAXSERVE_ISA
}  // namespace jaxserve
