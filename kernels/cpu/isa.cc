#include "kernels/cpu/isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace jaxserve {
namespace {

bool has_vectors(int level) {
  __builtin_cpu_init();
  switch (level) {
    case kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case kAvx512:
      return has_vectors(kAvx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    case kAvx512Bf16:
      return has_vectors(kAvx512) && __builtin_cpu_supports("avx512bf16");
  }
  return false;
}

#ifdef JAXSERVE_AMX_MODEL  // a build of the tests, which compute tiles in software: tests/kernels/amx_model.h

bool has_tiles() { return has_vectors(kAvx2); }

#else

struct Registers {
  uint32_t a, b, c, d;
};

Registers cpuid(uint32_t leaf, uint32_t part) {
  Registers r{};
  __get_cpuid_count(leaf, part, &r.a, &r.b, &r.c, &r.d);  // leaves them 0 where the CPU has no such leaf
  return r;
}

bool cpu_has_tiles() {
  const uint32_t features = cpuid(7, 0).d;
  if (!(features >> 22 & 1) || !(features >> 24 & 1)) return false;  // AMX-BF16, AMX-TILE
  const Registers palette = cpuid(0x1d, 1), products = cpuid(0x1e, 0);
  const bool registers = palette.b >> 16 >= 8 && (palette.b & 0xffff) >= 64 && (palette.c & 0xffff) >= 16;  // as tiles.h has them
  return registers && (products.b & 0xff) >= 16 && (products.b >> 8 & 0xffff) >= 64;
}

bool system_saves_tiles() {
  if (!(cpuid(1, 0).c >> 27 & 1)) return false;  // OSXSAVE: xgetbv is there
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr uint32_t TILES = 1u << 17 | 1u << 18;  // their configuration and their data
  return (low & TILES) == TILES;
}

// Linux (since 5.16) refuses where a thread's alternate signal stack is too small for a frame with tiles.
bool system_permits_tiles() {
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;  // asm/prctl.h, which may be older
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

bool has_tiles() { return has_vectors(kAvx512Bf16) && cpu_has_tiles() && system_saves_tiles() && system_permits_tiles(); }

#endif

}  // namespace

bool has_level(int level) {
  if (level != kAmx) return has_vectors(level);
  static const bool tiles = has_tiles();
  return tiles;
}

int best_level() {
  for (int level = kAmx; level > kNone; level--) {
    if (has_level(level)) return level;
  }
  return kNone;
}

}  // namespace jaxserve
