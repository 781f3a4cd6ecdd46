// AMX's instructions on tiles in software, under the names of their intrinsics, as Intel's manual (volume 2, chapter 3, the operation
// of LDTILECFG, TILELOADD, TILESTORED, TILEZERO, TILERELEASE and TDPBF16PS) has them. A compiler includes this before everything else
// (-include): the kernels of kernels/*/cpu.cc then compute on any CPU. What the CPU would refuse ends the process.

#ifndef JAXSERVE_TESTS_KERNELS_AMX_MODEL_H_
#define JAXSERVE_TESTS_KERNELS_AMX_MODEL_H_

#ifndef JAXSERVE_AMX_MODEL
#define JAXSERVE_AMX_MODEL
#endif

#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace amx_model {

constexpr int NAMES = 8, MAX_ROWS = 16, MAX_BYTES = 64;  // of palette 1

[[noreturn]] inline void fault(const char* what) {
  fprintf(stderr, "AMX: %s\n", what);
  abort();
}

struct Tile {
  unsigned rows, row_bytes;
  alignas(64) uint8_t data[MAX_ROWS][MAX_BYTES];
};

struct State {
  bool configured = false;
  Tile tiles[NAMES];
  ~State() {
    if (configured) fault("a thread ends that has not released its tiles");
  }
};

inline State& state() {
  static thread_local State own;
  return own;
}

inline Tile& tile(int name) {
  if (!state().configured) fault("#UD: tiles are not configured");
  if (name < 0 || name >= NAMES || state().tiles[name].rows == 0) fault("#UD: not a tile of this configuration");
  return state().tiles[name];
}

inline void loadconfig(const void* memory) {
  uint8_t bytes[64];
  memcpy(bytes, memory, sizeof(bytes));
  if (bytes[0] != 1) fault("#GP: not palette 1");
  if (bytes[1] != 0) fault("a start row, which nothing here sets");
  for (int i = 2; i < 16; i++) {
    if (bytes[i] != 0) fault("#GP: reserved bytes are not zero");
  }
  State& now = state();
  for (int name = 0; name < 16; name++) {
    uint16_t row_bytes;
    memcpy(&row_bytes, bytes + 16 + 2 * name, sizeof(row_bytes));
    const unsigned rows = bytes[48 + name];
    if (name >= NAMES) {
      if (rows != 0 || row_bytes != 0) fault("#GP: a tile that palette 1 does not have");
      continue;
    }
    if (rows > MAX_ROWS || row_bytes > MAX_BYTES || (rows == 0) != (row_bytes == 0)) fault("#GP: no shape of a tile");
    now.tiles[name].rows = rows, now.tiles[name].row_bytes = row_bytes;
    memset(now.tiles[name].data, 0, sizeof(now.tiles[name].data));
  }
  now.configured = true;
}

inline void release() { state().configured = false; }

inline void zero(int name) {
  Tile& t = tile(name);
  memset(t.data, 0, sizeof(t.data));
}

inline void loadd(int name, const void* base, int64_t stride) {
  Tile& t = tile(name);
  if (t.row_bytes % 4 != 0) fault("#UD: rows that are no whole number of words");
  memset(t.data, 0, sizeof(t.data));
  for (unsigned row = 0; row < t.rows; row++) memcpy(t.data[row], static_cast<const uint8_t*>(base) + row * stride, t.row_bytes);
}

inline void stored(int name, void* base, int64_t stride) {
  Tile& t = tile(name);
  if (t.row_bytes % 4 != 0) fault("#UD: rows that are no whole number of words");
  for (unsigned row = 0; row < t.rows; row++) memcpy(static_cast<uint8_t*>(base) + row * stride, t.data[row], t.row_bytes);
}

inline float value(const uint8_t* row, unsigned i) {  // a bfloat16
  uint16_t half;
  memcpy(&half, row + 2 * i, sizeof(half));
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

// Apart from its caller, so that nothing moves across the setting of MXCSR.
__attribute__((noinline)) inline void add_products(Tile& c, const Tile& a, const Tile& b) {
  const unsigned columns = c.row_bytes / 4;
  for (unsigned m = 0; m < c.rows; m++) {
    float even[MAX_BYTES / 4] = {}, odd[MAX_BYTES / 4] = {};
    for (unsigned k = 0; k < a.row_bytes / 4; k++) {
      for (unsigned n = 0; n < columns; n++) {
        even[n] = __builtin_fmaf(value(a.data[m], 2 * k), value(b.data[k], 2 * n), even[n]);
        odd[n] = __builtin_fmaf(value(a.data[m], 2 * k + 1), value(b.data[k], 2 * n + 1), odd[n]);
      }
    }
    for (unsigned n = 0; n < columns; n++) {
      float sum;
      memcpy(&sum, c.data[m] + 4 * n, sizeof(sum));
      sum += even[n] + odd[n];
      memcpy(c.data[m] + 4 * n, &sum, sizeof(sum));
    }
    memset(c.data[m] + c.row_bytes, 0, MAX_BYTES - c.row_bytes);
  }
}

inline void dpbf16ps(int sums, int rows, int columns) {
  if (sums == rows || sums == columns || rows == columns) fault("#UD: a tile twice");
  Tile &c = tile(sums), &a = tile(rows), &b = tile(columns);
  if (c.row_bytes % 4 != 0 || a.row_bytes % 4 != 0 || b.row_bytes % 4 != 0) fault("#UD: rows that are no whole number of words");
  if (c.rows != a.rows || c.row_bytes != b.row_bytes || a.row_bytes / 4 != b.rows) fault("#UD: shapes that do not fit");
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x9fc0);  // to nearest even, values below 2^-126 are zeros (DAZ, FTZ), nothing is raised
  add_products(c, a, b);
  _mm_setcsr(before);
}

}  // namespace amx_model

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(memory) amx_model::loadconfig(memory)
#define _tile_release() amx_model::release()
#define _tile_zero(tile) amx_model::zero(tile)
#define _tile_loadd(tile, base, stride) amx_model::loadd(tile, base, stride)
#define _tile_stored(tile, base, stride) amx_model::stored(tile, base, stride)
#define _tile_dpbf16ps(sums, rows, columns) amx_model::dpbf16ps(sums, rows, columns)

#endif
