// Suffix decoding's search on the host: what jaxserve/speculative/suffix.py does in numpy, with the same arrays and the same result.

#ifndef JAXSERVE_KERNELS_CPU_SUFFIX_SEARCH_H_
#define JAXSERVE_KERNELS_CPU_SUFFIX_SEARCH_H_

#include <cstdint>

namespace jaxserve {

constexpr int kOccurrences = 8;  // of a pair of tokens, that are looked at: MAX_OCCURRENCES of text_index.py

// The arrays of a SuffixDrafts, S rows. Of each row its match in its own text, then of each row its match in outputs: 2S.
struct SuffixTexts {
  int32_t* tokens;     // ids + 1; 0 where nothing is, as behind each text
  int32_t* chains;     // [2^(64 - shift), kOccurrences]: where pairs of like hashes ended of late
  int64_t* begins;     // [S]: of each row's text
  int64_t* lens;       // [S]: its tokens that are indexed
  int64_t* groups;     // [2S]
  int64_t* places;     // [2S, kOccurrences]: where matches go on; 0: none
  int64_t* lengths;    // [2S]: tokens that agree before these; 0: there is no match
  int32_t* group_at;   // [num_outputs]: of the outputs that stand from outputs_begin on
  int64_t outputs_begin, num_outputs, num_rows, shift, most, depth;
  double factor, min_prob;
};
static_assert(sizeof(SuffixTexts) == 16 * 8, "suffix_search.py has the same fields");

// The tokens that a step brought to n rows: those of row rows[i] are counts[i] of sampled[entries[i]], which has `width`.
struct SuffixStep {
  const int64_t *rows, *entries;
  const int32_t* sampled;
  const int64_t* counts;
  int64_t n, width;
  bool with_outputs;  // whether any are kept
  int32_t* proposed;  // [S, most]: written for these rows; -1: no draft
  int64_t* used;      // [n]: where the outputs stand that were drafted from
};
static_assert(sizeof(SuffixStep) == 9 * 8, "suffix_search.py has the same fields");

// Indexes the tokens and writes the drafts. Returns how many of `used` it wrote.
int64_t suffix_propose(const SuffixTexts& texts, const SuffixStep& step);

}  // namespace jaxserve

#endif
