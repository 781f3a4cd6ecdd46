// See suffix_search.h; the rule is that of jaxserve/speculative/suffix.py, and the names are its names.

#include "kernels/cpu/suffix_search.h"

#include <algorithm>
#include <vector>

namespace jaxserve {
namespace {

struct Places {
  int32_t at[kOccurrences];
};

// What follows a match, and how many of these tokens stand by expectation.
struct Draft {
  int64_t num_tokens;
  double score;
};

class Search {
 public:
  explicit Search(const SuffixTexts& texts) : t_(texts), chains_(reinterpret_cast<Places*>(texts.chains)) {}

  // The chain of the pair that ends at a place, in a group.
  int64_t chain(int64_t place, int64_t group) const {
    uint64_t pair = uint64_t(uint32_t(t_.tokens[place])) << 32 | uint32_t(t_.tokens[place - 1]);
    uint64_t mixed = pair ^ uint64_t(group) * 0x165667B19E3779F9u;
    return int64_t(mixed * 0x9E3779B97F4A7C15u >> t_.shift);
  }

  const Places& recent(int64_t chain) const { return chains_[chain]; }

  void fetch(int64_t chain) const {  // 32 bytes of 16 or more aligned ones may lie in two lines
    __builtin_prefetch(chains_ + chain, 1);
    __builtin_prefetch(chains_[chain].at + kOccurrences - 1, 1);
  }

  // What stood in the chain before the place.
  Places link(int64_t chain, int64_t place) const {
    Places before = chains_[chain];
    Places& list = chains_[chain];
    std::copy_n(before.at, kOccurrences - 1, list.at + 1);
    list.at[0] = int32_t(place);
    return before;
  }

  bool of_group(int64_t place, int64_t group) const {
    int64_t at = place - t_.outputs_begin;
    return at >= 0 && t_.group_at[std::min(at, t_.num_outputs - 1)] == group;
  }

  // Moves a match past the `count` tokens that came at `begin`. Places that do not go on with them, or stand in no output of
  // `group` (0: any text), are dropped.
  void go_on(int64_t match, int64_t begin, int64_t count, int64_t group) const {
    int64_t* places = t_.places + match * kOccurrences;
    bool stands = false;
    for (int p = 0; p < kOccurrences; ++p) {
      if (places[p] == 0) continue;
      int64_t j = 0;
      while (j < count && t_.tokens[places[p] + j] == t_.tokens[begin + j]) ++j;  // behind a text is a 0, and tokens are not
      places[p] = j == count && (group == 0 || of_group(places[p] + count - 1, group)) ? places[p] + count : 0;
      stands |= places[p] != 0;
    }
    t_.lengths[match] = stands ? std::min(t_.lengths[match] + count, t_.depth) : 0;
  }

  // Of the occurrences of the last pair of a text that ends at `end`, those before which most tokens agree.
  template <typename Within>
  void find(int64_t match, int64_t end, const Places& recent, Within within) const {
    const int32_t* tokens = t_.tokens;
    int64_t agree[kOccurrences] = {}, longest = 0, *places = t_.places + match * kOccurrences;
    for (int p = 0; p < kOccurrences; ++p) {
      int64_t at = recent.at[p];
      if (at == 0 || tokens[at] != tokens[end - 1] || tokens[at - 1] != tokens[end - 2] || !within(p)) continue;
      int64_t n = 2;
      while (n < t_.depth && tokens[end - 1 - n] != 0 && tokens[at - n] == tokens[end - 1 - n]) ++n;
      agree[p] = n, longest = std::max(longest, n);
    }
    for (int p = 0; p < kOccurrences; ++p) places[p] = agree[p] > 0 && agree[p] == longest ? recent.at[p] + 1 : 0;
    t_.lengths[match] = longest;
  }

  // end: of a match in the text itself, where that ends: it goes on in cycles; 0 for others. Texts that agree so far stay, those
  // that have the most frequent next token; of equally frequent ones the first place's.
  Draft follow(int64_t match, int64_t end, int32_t* draft) const {
    int64_t starts[kOccurrences], num_places = 0, length = t_.lengths[match];
    for (int p = 0; p < kOccurrences; ++p) {
      int64_t place = t_.places[match * kOccurrences + p];
      if (place != 0) starts[num_places++] = place;
    }
    int64_t most = std::min({t_.most, t_.depth - 1, int64_t(t_.factor * double(length))}), num_alive = num_places;
    Draft made{0, 0.0};
    for (int64_t k = 0; k < most; ++k) {
      int32_t next[kOccurrences], best = 0;
      int best_count = 0;
      for (int64_t p = 0; p < num_alive; ++p) {
        int64_t at = starts[p] + k;
        if (end > 0 && at >= end) at = starts[p] + k % std::max<int64_t>(end - starts[p], 1);
        next[p] = t_.tokens[at];
      }
      for (int64_t p = 0; p < num_alive; ++p) {
        int count = 0;
        for (int64_t q = p; q < num_alive; ++q) count += next[q] == next[p];  // of a token that came before p, fewer than there
        if (next[p] != 0 && count > best_count) best_count = count, best = next[p];
      }
      double prob = double(best_count) / double(num_places);
      if (best_count == 0 || prob < t_.min_prob) break;
      int64_t left = 0;
      for (int64_t p = 0; p < num_alive; ++p) {
        if (next[p] == best) starts[left++] = starts[p];
      }
      num_alive = left;
      draft[made.num_tokens++] = best - 1;
      made.score += prob;
    }
    return made;
  }

 private:
  const SuffixTexts& t_;
  Places* chains_;
};

}  // namespace

int64_t suffix_propose(const SuffixTexts& t, const SuffixStep& step) {
  Search search(t);
  int64_t n = step.n, num_tokens = 0, num_used = 0;
  for (int64_t i = 0; i < n; ++i) {  // all texts grow before any pair is read, so that chains can be fetched ahead
    int64_t end = t.begins[step.rows[i]] + t.lens[step.rows[i]];
    const int32_t* ids = step.sampled + step.entries[i] * step.width;
    for (int64_t j = 0; j < step.counts[i]; ++j) t.tokens[end + j] = ids[j] + 1;
    num_tokens += step.counts[i];
  }
  std::vector<int64_t> chains(num_tokens);
  std::vector<Places> recent(n, Places{});
  for (int64_t i = 0, next = 0; i < n; ++i) {
    int64_t row = step.rows[i], end = t.begins[row] + t.lens[row];
    for (int64_t j = 0; j < step.counts[i]; ++j) search.fetch(chains[next++] = search.chain(end + j, t.groups[row]));
    int64_t match = row + t.num_rows;
    if (step.with_outputs && t.lengths[match] == 0) search.fetch(search.chain(end + step.counts[i] - 1, t.groups[match]));
  }
  for (int64_t i = 0, next = 0; i < n; ++i) {
    int64_t row = step.rows[i], end = t.begins[row] + t.lens[row];
    for (int64_t j = 0; j < step.counts[i]; ++j) recent[i] = search.link(chains[next++], end + j);
  }
  std::vector<int32_t> other(t.most);
  for (int64_t i = 0; i < n; ++i) {
    int64_t row = step.rows[i], count = step.counts[i], begin = t.begins[row] + t.lens[row], end = begin + count;
    int32_t* draft = step.proposed + row * t.most;
    std::fill_n(draft, t.most, -1);
    t.lens[row] += count;
    if (t.lengths[row] > 0) search.go_on(row, begin, count, 0);
    if (t.lengths[row] == 0 && count > 0) {
      const Places& own = recent[i];
      search.find(row, end, own, [&](int p) { return own.at[p] > t.begins[row] && own.at[p] < end - 1; });
    }
    Draft made{0, 0.0};
    if (t.lengths[row] > 0) made = search.follow(row, end, draft);
    if (!step.with_outputs) continue;

    int64_t match = row + t.num_rows, group = t.groups[match];
    if (t.lengths[match] > 0) search.go_on(match, begin, count, group);
    if (t.lengths[match] == 0) {
      const Places& theirs = search.recent(search.chain(end - 1, group));
      search.find(match, end, theirs, [&](int p) {  // a place that was used anew may be there twice
        return search.of_group(theirs.at[p], group) && std::find(theirs.at, theirs.at + p, theirs.at[p]) == theirs.at + p;
      });
    }
    if (t.lengths[match] == 0) continue;
    Draft theirs = search.follow(match, 0, other.data());
    if (theirs.score <= made.score) continue;
    std::fill(std::copy_n(other.data(), theirs.num_tokens, draft), draft + t.most, -1);
    const int64_t* places = t.places + match * kOccurrences;
    step.used[num_used++] = *std::max_element(places, places + kOccurrences);
  }
  return num_used;
}

}  // namespace jaxserve

#pragma GCC visibility push(default)

extern "C" int64_t jaxserve_suffix_propose(const jaxserve::SuffixTexts* texts, const jaxserve::SuffixStep* step) {
  return jaxserve::suffix_propose(*texts, *step);
}
