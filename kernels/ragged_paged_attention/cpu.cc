// Ragged paged attention for CPUs: one pass over a sequence's pages for a tile of its queries and all query heads of a KV head.
//
// A tile is some consecutive tokens of one sequence. The softmax is online (arXiv:1805.02867) over CHUNK positions at a time and
// starts afresh at multiples of SPLIT; the states of splits are joined in order, by `join`. An item of the pool is a tile and a KV
// head, or where there are few of those, one split of them. Splits and chunks begin at multiples from position 0, and a chunk of which
// a row sees nothing leaves its state as it was. So a row's bits depend on its own sequence alone.

#include "kernels/cpu/calls.h"
#include "kernels/cpu/dot.h"
#include "kernels/cpu/pool.h"
#include "kernels/cpu/simd.h"

namespace jaxserve {
namespace JAXSERVE_ISA {
namespace {

constexpr int CHUNK = 128;
constexpr int SPLIT = 512;
constexpr int TILE_ROWS = 32;  // about as many: tokens times query heads of a KV head
// Logit of a key that a row does not see, and where a maximum starts. Finite, so that no inf - inf arises, and far apart, so that
// exp(MASKED - maximum) is 0 even for a row that has seen nothing.
constexpr float MASKED = -1e30f, FIRST_MAXIMUM = -1e29f;

// What a step says is within bounds when the host is right. Where it is wrong, the values are: no memory is touched that is not ours.
int64_t clamp(int64_t x, int64_t least, int64_t most) { return x < least || most < least ? least : x > most ? most : x; }

template <int R>
struct Rows {
  static constexpr int COUNT = R;
};

struct Tile {
  int seq, token, count, position;  // of the first token: its row of q, and where it stands
};

struct State {  // of the M rows of a tile and head
  float *maximum, *total, *sums;  // [M], [M], [M, H]
  State(float* values, int64_t M) : maximum(values), total(values + M), sums(values + 2 * M) {}
  static int64_t size(int64_t M, int64_t H) { return M * (2 + H); }
};

// sums[m, h...] += weights[m] . values for ROWS rows, positions first to last, VECS vectors of the head from h on.
template <int R, int VECS, typename T>
void add_values(const float* weights, const T* const* values, int first, int last, int64_t h, int64_t H, float* sums) {
  Vec acc[R][VECS];
  for (int r = 0; r < R; r++) {
    for (int v = 0; v < VECS; v++) acc[r][v] = load(sums + r * H + h + v * W);
  }
  for (int j = first; j < last; j++) {
    Vec value[VECS];
    for (int v = 0; v < VECS; v++) value[v] = load(values[j] + h + v * W);
    for (int r = 0; r < R; r++) {
      Vec weight = set1(weights[r * CHUNK + j]);
      for (int v = 0; v < VECS; v++) acc[r][v] = fma(weight, value[v], acc[r][v]);
    }
  }
  for (int r = 0; r < R; r++) {
    for (int v = 0; v < VECS; v++) store(sums + r * H + h + v * W, acc[r][v]);
  }
}

template <int R, typename T>
void add_rows(const float* weights, const T* const* values, int first, int last, int64_t H, float* sums) {
  int64_t h = 0;
  for (; h + 4 * W <= H; h += 4 * W) add_values<R, 4>(weights, values, first, last, h, H, sums);
  for (; h + W <= H; h += W) add_values<R, 1>(weights, values, first, last, h, H, sums);
  if (h == H) return;
  const int n = static_cast<int>(H - h);
  for (int r = 0; r < R; r++) {
    Vec acc = load_first(sums + r * H + h, n);
    for (int j = first; j < last; j++) acc = fma(set1(weights[r * CHUNK + j]), load_first(values[j] + h, n), acc);
    store_first(sums + r * H + h, acc, n);
  }
}

// logits[r * CHUNK + j] = q[r] . keys[j] for R rows and the positions of two vectors. Each is one sum along the head.
template <int R, typename T>
void score_rows(const float* q, const float* keys, int64_t depth, float* logits) {
  using V = Terms<T>;
  Vec acc[R][2];
  for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = zero();
  for (int64_t d = 0; d < depth; d++) {
    const typename V::Values left = V::from_lanes(load(keys + 2 * d * W)), right = V::from_lanes(load(keys + (2 * d + 1) * W));
    for (int r = 0; r < R; r++) {
      const typename V::Values row = V::from_lanes(set1(q[r * depth + d]));
      acc[r][0] = V::add_product(acc[r][0], row, left);
      acc[r][1] = V::add_product(acc[r][1], row, right);
    }
  }
  for (int r = 0; r < R; r++) store(logits + r * CHUNK, acc[r][0]), store(logits + r * CHUNK + W, acc[r][1]);
}

// f(m, constant number of rows from m on) for all M rows.
template <typename F>
INLINE void for_rows(int64_t M, F f) {
  int64_t m = 0;
  for (; m + ROWS <= M; m += ROWS) f(m, Rows<ROWS>());
  switch (M - m) {
    case 1:
      return f(m, Rows<1>());
#ifdef __AVX512F__
    case 2:
      return f(m, Rows<2>());
    case 3:
      return f(m, Rows<3>());
    case 4:
      return f(m, Rows<4>());
    case 5:
      return f(m, Rows<5>());
#endif
  }
}

template <typename T>
struct Walk {
  const Attention& a;
  int64_t G;         // query heads of a KV head
  const Tile* tiles;

  int64_t rows(const Tile& tile) const { return tile.count * G; }
  int end(const Tile& tile) const { return tile.position + tile.count; }
  int begin(const Tile& tile) const {
    const int64_t first = a.window > 0 ? tile.position - a.window + 1 : 0;
    return first > 0 ? static_cast<int>(first) : 0;
  }

  // The positions of a chunk in the pages: keys and values of positions first to last - 1, all of which are fetched from memory.
  void find(const Tile& tile, int64_t head, int chunk, int first, int last, const T** keys, const T** values) const {
    const int32_t* pages = a.page_table + tile.seq * a.table_width;
    const int64_t page_values = a.page_size * a.H;
    for (int j = first; j < last;) {
      const int64_t place = (chunk + j) / a.page_size, offset = (chunk + j) % a.page_size;
      const int64_t page = clamp(pages[clamp(place, 0, a.table_width - 1)], 0, a.num_pages - 1);
      const T* key = static_cast<const T*>(a.kv_pages) + (page * 2 * a.K + head) * page_values + offset * a.H;
      const int page_end = a.page_size - offset < last - j ? j + static_cast<int>(a.page_size - offset) : last;
      for (; j < page_end; j++, key += a.H) {
        keys[j] = key, values[j] = key + a.K * page_values;
        fetch(key);
      }
    }
    for (int j = first; j < last; j++) fetch(values[j]);
  }

  void fetch(const T* row) const {
    for (int64_t h = 0; h < a.H; h += 64 / sizeof(T)) _mm_prefetch(reinterpret_cast<const char*>(row + h), _MM_HINT_T0);
  }

  // Lanes that a row of q or of keys is, W values or pairs of values each time; the last are filled up with zeros.
  int64_t depth() const { return (a.H + Terms<T>::COUNT - 1) / Terms<T>::COUNT * W; }
  Vec lanes(const T* row, int64_t d) const {
    using V = Terms<T>;
    const int64_t h = d / W * V::COUNT;
    return V::to_lanes(h + V::COUNT <= a.H ? V::read(row + h) : V::read_first(row + h, static_cast<int>(a.H - h)));
  }

  // The logits of positions first to last - 1 and of what lies about them in vectors, which nobody reads.
  void score(const float* q, int64_t M, const T* const* keys, int first, int last, float* turned, float* logits) const {
    for (int begin = first / (2 * W) * 2 * W; begin < last; begin += 2 * W) {
      for (int64_t d = 0; d < depth(); d += W) {
        for (int side = 0; side < 2; side++) {
          Vec x[W];
          for (int i = 0; i < W; i++) {
            const int j = begin + side * W + i;
            x[i] = lanes(keys[j < first ? first : j < last ? j : last - 1], d);
          }
          turn_lanes(x);
          for (int i = 0; i < W; i++) store(turned + (2 * (d + i) + side) * W, x[i]);
        }
      }
      for_rows(M, [&](int64_t m, auto rows) {
        score_rows<decltype(rows)::COUNT, T>(q + m * depth(), turned, depth(), logits + m * CHUNK + begin);
      });
    }
  }

  // Logits of a row to weights: exp(logit - maximum), where the row's maximum may rise. Sums so far shrink with it.
  void soften(float* logits, int first, int last, int64_t position, int chunk, float* maximum, float* total, float* sums) const {
    const int64_t unseen = a.window > 0 ? position - a.window + 1 - chunk : 0;
    const int from = unseen > first ? static_cast<int>(unseen < last ? unseen : last) : first;
    const int until = position + 1 - chunk < last ? static_cast<int>(position + 1 - chunk) : last;
    const int end = (last + W - 1) / W * W;
    for (int j = 0; j < from; j++) logits[j] = MASKED;
    for (int j = until < from ? from : until; j < end; j++) logits[j] = MASKED;
    Vec highest = set1(*maximum);
    for (int j = 0; j < end; j += W) {
      Vec x = load(logits + j);
      if (a.soft_cap > 0) {  // tanh(y) = 1 - 2 / (exp(2 y) + 1)
        Vec e = exp(mul(x, set1(2 * a.scale / a.soft_cap)));
        Vec capped = mul(set1(a.soft_cap), sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f)))));
        x = select_above(x, MASKED, capped);
      } else {
        x = select_above(x, MASKED, mul(x, set1(a.scale)));
      }
      store(logits + j, x);
      highest = max(x, highest);
    }
    float lanes[W], top = *maximum;
    store(lanes, highest);
    for (float lane : lanes) top = lane > top ? lane : top;
    Vec shrink = exp(set1(*maximum - top)), sum_of_weights = zero();
    for (int j = 0; j < end; j += W) {
      Vec weight = exp(sub(load(logits + j), set1(top)));
      store(logits + j, weight);
      sum_of_weights = add(sum_of_weights, weight);
    }
    float factor[W];
    store(factor, shrink);
    *total = *total * factor[0] + sum(sum_of_weights);
    *maximum = top;
    if (factor[0] != 1.0f) {
      for_lanes(a.H, [&](int64_t h, int n) { store_n(sums + h, mul(load_n(sums + h, n), shrink), n); });
    }
  }

  // Floats that a walk works in: rows of q [M, depth], turned keys [depth, 2 W], logits [M, CHUNK].
  int64_t work_size(int64_t M) const { return M * (depth() + CHUNK) + depth() * 2 * W; }

  // The state of a tile's rows over the positions of a split.
  void walk_split(const Tile& tile, int64_t head, int split, float* work, State state) const {
    const int64_t M = rows(tile);
    float *q = work, *turned = q + M * depth(), *logits = turned + depth() * 2 * W;
    for (int64_t m = 0; m < M; m++) {
      const int64_t token = tile.token + m / G, query_head = head * G + m % G;
      const T* row = static_cast<const T*>(a.q) + (token * a.N + query_head) * a.H;
      for (int64_t d = 0; d < depth(); d += W) store(q + m * depth() + d, lanes(row, d));
      state.maximum[m] = FIRST_MAXIMUM, state.total[m] = 0;
    }
    memset(state.sums, 0, M * a.H * sizeof(float));
    const int last_position = end(tile) < split + SPLIT ? end(tile) : split + SPLIT;
    const int first_position = begin(tile) > split ? begin(tile) : split;
    const T *keys[CHUNK], *values[CHUNK];
    for (int chunk = first_position / CHUNK * CHUNK; chunk < last_position; chunk += CHUNK) {
      const int first = first_position > chunk ? first_position - chunk : 0;
      const int last = last_position - chunk < CHUNK ? last_position - chunk : CHUNK;
      find(tile, head, chunk, first, last, keys, values);
      score(q, M, keys, first, last, turned, logits);
      for (int64_t m = 0; m < M; m++) {
        float* own = logits + m * CHUNK;
        soften(own, first, last, tile.position + m / G, chunk, state.maximum + m, state.total + m, state.sums + m * a.H);
      }
      for_rows(M, [&](int64_t m, auto rows) {
        add_rows<decltype(rows)::COUNT>(logits + m * CHUNK, values, first, last, a.H, state.sums + m * a.H);
      });
    }
  }

  // Adds the state of a later split to that of the ones before.
  void join(State into, State from, int64_t M) const {
    for (int64_t m = 0; m < M; m++) {
      const float top = from.maximum[m] > into.maximum[m] ? from.maximum[m] : into.maximum[m];
      float factors[2][W];
      Vec a_factor = exp(set1(into.maximum[m] - top)), b_factor = exp(set1(from.maximum[m] - top));
      store(factors[0], a_factor), store(factors[1], b_factor);
      into.total[m] = into.total[m] * factors[0][0] + from.total[m] * factors[1][0];
      into.maximum[m] = top;
      float *sums = into.sums + m * a.H, *others = from.sums + m * a.H;
      for_lanes(a.H, [&](int64_t h, int n) {
        store_n(sums + h, fma(load_n(others + h, n), b_factor, mul(load_n(sums + h, n), a_factor)), n);
      });
    }
  }

  void write(const Tile& tile, int64_t head, State state) const {
    for (int64_t m = 0; m < rows(tile); m++) {
      T* out = static_cast<T*>(a.out) + ((tile.token + m / G) * a.N + head * G + m % G) * a.H;
      const Vec total = set1(state.total[m] > 0 ? state.total[m] : 1.0f);
      for_lanes(a.H, [&](int64_t h, int n) { store_n(out + h, div(load_n(state.sums + m * a.H + h, n), total), n); });
    }
  }

  // All splits of a tile and head.
  void whole(const Tile& tile, int64_t head) const {
    const int64_t M = rows(tile), size = State::size(M, a.H);
    Scratch<float> memory(work_size(M) + 2 * size);
    State into(memory.values + work_size(M), M), from(memory.values + work_size(M) + size, M);
    const int first = begin(tile) / SPLIT * SPLIT;
    for (int split = first; split < end(tile); split += SPLIT) {
      walk_split(tile, head, split, memory.values, split == first ? into : from);
      if (split != first) join(into, from, M);
    }
    write(tile, head, into);
  }

  // One split of a tile and head, and what joins them.
  void part(const Tile& tile, int64_t head, int split, State state) const {
    Scratch<float> work(work_size(rows(tile)));
    walk_split(tile, head, split, work.values, state);
  }
};

// The tiles of a step, in order of their tokens. Returns how many.
int64_t cut(const Attention& a, int tokens, Tile* tiles) {
  int64_t count = 0, at = 0;
  for (int64_t s = 0; s < a.S; s++) {
    at = clamp(a.cu_q_lens[s], at, a.T);
    const int q_len = static_cast<int>(clamp(a.cu_q_lens[s + 1], at, a.T) - at);
    for (int i = 0; i < q_len; i += tokens) {
      const int n = q_len - i < tokens ? q_len - i : tokens;
      const int64_t position = clamp(a.kv_lens[s] - q_len + i, 0, a.table_width * a.page_size - n);
      tiles[count++] = {static_cast<int>(s), static_cast<int>(at + i), n, static_cast<int>(position)};
    }
    at += q_len;
  }
  return count;
}

template <typename T>
void run(const Attention& a) {
  const int64_t G = a.N / a.K;
  Scratch<Tile> tiles(a.T);
  const int64_t count = cut(a, static_cast<int>(G < TILE_ROWS ? TILE_ROWS / G : 1), tiles.values);
  const int64_t last = clamp(a.cu_q_lens[a.S], 0, a.T);
  memset(static_cast<T*>(a.out) + last * a.N * a.H, 0, (a.T - last) * a.N * a.H * sizeof(T));
  Walk<T> walk{a, G, tiles.values};
  if (count * a.K >= 4 * num_threads()) {
    auto item = [&](int64_t i) { walk.whole(tiles.values[i / a.K], i % a.K); };
    return for_each(count * a.K, item);
  }
  // Few: their splits are items. `place` is where the states of a tile's splits begin.
  Scratch<int64_t> place(count + 1);
  int64_t splits = 0, largest = 0;
  for (int64_t i = 0; i < count; i++) {
    const Tile& tile = tiles.values[i];
    place.values[i] = splits;
    splits += (walk.end(tile) + SPLIT - 1) / SPLIT - walk.begin(tile) / SPLIT;
    largest = walk.rows(tile) > largest ? walk.rows(tile) : largest;
  }
  place.values[count] = splits;
  const int64_t size = State::size(largest, a.H);
  Scratch<float> memory(splits * a.K * size);
  auto state = [&](int64_t split, int64_t head, const Tile& tile) {
    return State(memory.values + (split * a.K + head) * size, walk.rows(tile));
  };
  auto part = [&](int64_t item) {
    const int64_t split = item / a.K, head = item % a.K;
    int64_t i = 0;
    while (place.values[i + 1] <= split) i++;
    const Tile& tile = tiles.values[i];
    const int64_t first = (walk.begin(tile) / SPLIT + split - place.values[i]) * SPLIT;
    walk.part(tile, head, static_cast<int>(first), state(split, head, tile));
  };
  for_each(splits * a.K, part);
  for (int64_t i = 0; i < count; i++) {
    const Tile& tile = tiles.values[i];
    for (int64_t head = 0; head < a.K; head++) {
      State into = state(place.values[i], head, tile);
      for (int64_t s = place.values[i] + 1; s < place.values[i + 1]; s++) walk.join(into, state(s, head, tile), walk.rows(tile));
      walk.write(tile, head, into);
    }
  }
}

}  // namespace

void attend(const Attention& a) { a.dtype == Dtype::kFloat32 ? run<float>(a) : run<bf16>(a); }

}  // namespace JAXSERVE_ISA
}  // namespace jaxserve
