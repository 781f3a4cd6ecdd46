// The matmuls on AMX's tiles against float64, their order against Intel's, and their bits over numbers of rows and threads. Prints
// "right", or what is wrong. Compiled with amx_model.h it runs on any CPU, without it on one that has the instructions, or an emulator.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/cpu/calls.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/pool.h"

namespace jaxserve::amx {
void matmul(const Matmul&);
void grouped_matmul(const GroupedMatmul&);
}  // namespace jaxserve::amx

namespace {

using Values = std::vector<uint16_t>;  // bfloat16

bool right = true;

void check(bool holds, const std::string& what) {
  if (!holds) std::printf("wrong: %s\n", what.c_str());
  right &= holds;
}

float wide(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof(y));
  return y;
}

uint16_t narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

Values values(size_t n, uint32_t seed, float scale = 1) {  // uniform in [-scale, scale)
  Values x(n);
  for (uint16_t& value : x) {
    seed = 1664525 * seed + 1013904223;
    value = narrow(scale * (static_cast<float>(seed >> 8) * 0x1p-23f - 1));
  }
  return x;
}

float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }

// x . w as TDPBF16PS adds: within 32 terms the even and the odd ones apart, each rounded to float32; zeros after the last. apart: of
// the terms of w.
float in_order(const uint16_t* x, const uint16_t* w, int64_t D, int64_t apart) {
  float total = 0;
  for (int64_t k = 0; k < D; k += 32) {
    float sums[2] = {};
    for (int64_t i = k; i < k + 32; i++) {
      const double product = i < D ? static_cast<double>(flushed(wide(x[i]))) * flushed(wide(w[i * apart])) : 0;
      sums[(i - k) % 2] = flushed(static_cast<float>(sums[(i - k) % 2] + product));
    }
    total = flushed(total + flushed(sums[0] + sums[1]));
  }
  return total;
}

struct Case {
  int64_t T, D, F;
  bool norm, bias, residual, gated, transposed;
};

struct Arrays {
  Values x, w, scale, bias, residual;
  explicit Arrays(const Case& c)
      : x(values(c.T * c.D, 1)),
        w(values(c.D * c.F, 2, 0.2f)),
        scale(values(c.D, 3)),
        bias(values(c.F, 4)),
        residual(values(c.T * c.F, 5)) {}
};

// Rows first, ..., first + count - 1 of the product. Out: of bfloat16 (uint16_t), or of float32 sums.
template <typename Out>
std::vector<Out> multiply(const Case& c, const Arrays& a, int64_t first, int64_t count) {
  const Values x(a.x.begin() + first * c.D, a.x.begin() + (first + count) * c.D);  // a sanitizer sees what lies beyond
  const Values residual(a.residual.begin() + first * c.F, a.residual.begin() + (first + count) * c.F);
  std::vector<Out> out(count * (c.gated ? c.F / 2 : c.F));
  std::memset(out.data(), 0xff, out.size() * sizeof(Out));  // NaN
  Values normed(x.size());
  jaxserve::Matmul m{};
  m.x = x.data(), m.w = a.w.data(), m.out = out.data(), m.normed = normed.data();
  if (c.norm) m.scale = a.scale.data();
  if (c.bias) m.bias = a.bias.data();
  if (c.residual) m.residual = residual.data();
  m.T = count, m.D = c.D, m.F = c.F, m.eps = 1e-6f, m.gated = c.gated, m.transposed = c.transposed;
  m.float32_out = sizeof(Out) == sizeof(float), m.dtype = jaxserve::Dtype::kBfloat16;
  jaxserve::amx::matmul(m);
  return out;
}

double wanted(const Case& c, const Arrays& a, int64_t row, int64_t column) {
  const uint16_t* x = a.x.data() + row * c.D;
  double squares = 0;
  for (int64_t k = 0; k < c.D; k++) squares += static_cast<double>(wide(x[k])) * wide(x[k]);
  const double factor = c.norm ? 1 / std::sqrt(squares / static_cast<double>(c.D) + 1e-6) : 1;
  auto product = [&](int64_t f) {
    double sum = c.bias ? wide(a.bias[f]) : 0;
    for (int64_t k = 0; k < c.D; k++) {
      sum += factor * wide(x[k]) * (c.norm ? wide(a.scale[k]) : 1) * wide(a.w[c.transposed ? f * c.D + k : k * c.F + f]);
    }
    return sum;
  };
  const double y = product(column);
  if (c.gated) return y / (1 + std::exp(-y)) * product(c.F / 2 + column);
  return c.residual ? y + wide(a.residual[row * c.F + column]) : y;
}

void check_matmul(const Case& c) {
  const Arrays a(c);
  const int64_t width = c.gated ? c.F / 2 : c.F;
  const std::string name = std::to_string(c.T) + " rows, " + std::to_string(c.D) + " x " + std::to_string(c.F);
  jaxserve::set_num_threads(1);
  const Values whole = multiply<uint16_t>(c, a, 0, c.T);
  double worst = 0, largest = 0;
  for (int64_t row = 0; row < c.T; row++) {
    for (int64_t column = 0; column < width; column++) {
      const double want = wanted(c, a, row, column), error = std::fabs(wide(whole[row * width + column]) - want);
      worst = error <= worst ? worst : error;  // NaN is worst
      largest = std::fmax(largest, std::fabs(want));
    }
  }
  check(worst <= 0.02 * largest, name + ": off by " + std::to_string(worst) + " of " + std::to_string(largest));
  for (int num_threads : {4, 3}) {
    jaxserve::set_num_threads(num_threads);
    check(multiply<uint16_t>(c, a, 0, c.T) == whole, name + ": other bits with " + std::to_string(num_threads) + " threads");
  }
  for (int64_t count : {1, 2, 15, 16, 17, 31, 32, 33}) {
    for (int64_t first : {int64_t{0}, c.T - count}) {
      if (count > c.T) continue;
      const Values want(whole.begin() + first * width, whole.begin() + (first + count) * width);
      check(multiply<uint16_t>(c, a, first, count) == want, name + ": other bits among " + std::to_string(count));
    }
  }
}

// scale: of x, so that products and sums may be too small for float32.
void check_order(const Case& c, float scale) {
  Arrays a(c);
  a.x = values(c.T * c.D, 1, scale);
  const std::vector<float> sums = multiply<float>(c, a, 0, c.T);
  int64_t others = 0, zeros = 0;
  for (int64_t i = 0; i < c.T * c.F; i++) {
    const int64_t f = i % c.F;
    const float want = in_order(a.x.data() + i / c.F * c.D, a.w.data() + (c.transposed ? f * c.D : f), c.D, c.transposed ? 1 : c.F);
    others += std::memcmp(&sums[i], &want, sizeof(float)) != 0;
    zeros += want == 0;
  }
  check(others == 0, std::to_string(others) + " of " + std::to_string(c.T * c.F) + " sums in another order, scale " + std::to_string(scale));
  check(zeros < c.T * c.F, "all sums are zero");
}

void check_grouped(int64_t D, int64_t F, bool gated) {
  const std::vector<int32_t> group{0, 2, 2, 3}, row{0, 8, 16, 88}, rows{5, 8, 64, 33}, num_tiles{4};
  const int64_t num_rows = 128, width = gated ? F / 2 : F;
  const Values x = values(num_rows * D, 6), w = values(4 * D * F, 7, 0.2f);
  const std::string name = "experts of " + std::to_string(D) + " x " + std::to_string(F);
  auto run = [&](int num_threads, std::vector<int32_t> sizes) {
    jaxserve::set_num_threads(num_threads);
    Values out(num_rows * width, 0xffff);
    jaxserve::GroupedMatmul g{};
    g.product.x = x.data(), g.product.w = w.data(), g.product.out = out.data(), g.product.D = D, g.product.F = F;
    g.product.gated = gated, g.product.dtype = jaxserve::Dtype::kBfloat16;
    g.tile_group = group.data(), g.tile_row = row.data(), g.tile_rows = sizes.data(), g.num_tiles = num_tiles.data();
    jaxserve::amx::grouped_matmul(g);
    return out;
  };
  const Values whole = run(1, rows);
  Values want(whole.size(), 0xffff);
  for (size_t tile = 0; tile < group.size(); tile++) {
    for (int64_t r = row[tile]; r < row[tile] + rows[tile]; r++) {
      auto sum = [&](int64_t f) { return wide(narrow(in_order(x.data() + r * D, w.data() + group[tile] * D * F + f, D, F))); };
      for (int64_t f = 0; f < width; f++) {
        const float y = sum(f);
        want[r * width + f] = narrow(gated ? y / (1 + std::exp(-y)) * sum(width + f) : y);
      }
    }
  }
  if (gated) {  // where our exp is not the C library's
    int64_t far = 0;
    for (size_t i = 0; i < whole.size(); i++) {
      far += whole[i] != want[i] && !(std::fabs(wide(whole[i]) - wide(want[i])) <= 0.01f * std::fabs(wide(want[i])));
    }
    check(far == 0, name + ": " + std::to_string(far) + " gated values are wrong");
  } else {
    check(whole == want, name + ": not the sums in their order");
  }
  check(run(4, rows) == whole, name + ": other bits with 4 threads");
  const Values few = run(2, {1, 3, 17, 32});
  for (int64_t r : {0, 8, 9, 10, 16, 32, 88, 119}) {
    check(std::memcmp(&few[r * width], &whole[r * width], width * sizeof(uint16_t)) == 0, name + ": other bits among fewer rows");
  }
}

}  // namespace

int main() {
  if (!jaxserve::has_level(jaxserve::kAmx)) {
    std::puts("no AMX: the CPU lacks it, or the system does not let this process use it");
    return 2;
  }
  for (bool transposed : {true, false}) {
    check_matmul({70, 256, 96, true, true, false, false, transposed});
    check_matmul({48, 160, 128, true, false, false, true, transposed});
    check_matmul({33, 37, 33, true, true, true, false, transposed});
    check_matmul({17, 100, 70, false, true, false, true, transposed});
    check_matmul({5, 3, 2, false, false, true, false, transposed});
    check_matmul({40, 1088, 17, false, false, true, false, transposed});
    for (float scale : {1.0f, 1e-36f, 2e-37f}) check_order({37, 300, 50, false, false, false, false, transposed}, scale);
  }
  check_grouped(96, 128, false);
  check_grouped(75, 70, false);
  check_grouped(130, 200, true);
  if (right) std::puts("right");
  return right ? 0 : 1;
}
