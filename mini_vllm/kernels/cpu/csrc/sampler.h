// The sampler, row by row: what `model/sampler.py` computes, without sorting a vocabulary and with noise only where it
// can matter.
//
//   best tokens   the k-th largest maximum of some hundred stretches of the row is a bound that at least k tokens reach;
//                 the few that do are sorted
//   noise         a token's 32 random bits alone bound its Gumbel number from above; logarithms are taken only for the
//                 few tokens that could still win
//   top_p         nothing is sorted: a token is drawn, and what stands before it is summed to see whether it counts
//
// What always holds: tokens stand in one order, the greater logit first and among equals the smaller id, as in
// `model/sampling_order.py`; the noise is that of `model/noise.py`. A row of NaN is never sorted.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "vector.h"

namespace mini_vllm {

struct Candidate {
  float value;
  int64_t token_id;
};

inline bool comes_before(const Candidate& a, const Candidate& b) {
  return a.value > b.value || (a.value == b.value && a.token_id < b.token_id);
}

// Sixteen logits from `start` on, -inf where the row has ended.
inline Floats logits_at(const float* row, int64_t start, int64_t size) {
  if (start + LANES <= size) return load(row + start);
  Floats lanes = load_some(row + start, int(size - start));
  for (int j = int(size - start); j < LANES; j++) lanes[j] = -INFINITE;
  return lanes;
}

// The first maximum of a row. NaN if there is one anywhere, as in torch.max.
inline Candidate best_of(const float* row, int64_t size) {
  Floats best = broadcast(-INFINITE);
  Ints broken{};
  for (int64_t i = 0; i < size; i += LANES) {
    const Floats lanes = logits_at(row, i, size);
    broken |= lanes != lanes;
    best = max(lanes, best);
  }
  if (any(broken)) return {NAN, 0};
  const float value = horizontal_max(best);
  int64_t start = 0;
  while (!any(logits_at(row, start, size) == value)) start += LANES;
  return {value, std::find(row + start, row + size, value) - row};
}

constexpr int64_t GROUP_VECTORS = 64;

// A bound that at least k tokens of the row reach: the k-th largest of the maxima of disjoint groups of tokens. A group
// is every sixteenth of some thousand tokens in a row, so that the maxima of sixteen groups are found at once.
inline float bound_of_best(const float* row, int64_t size, int64_t k, std::vector<float>& maxima) {
  // Four maxima and more for each of the k: with as many as k the bound would be the least of them, which most reach.
  const int64_t length = std::min(GROUP_VECTORS, size / (4 * std::max<int64_t>(k, 1))) * LANES;
  if (length <= LANES) return -INFINITE;
  maxima.clear();
  for (int64_t start = 0; start < size; start += length) {
    Floats best = broadcast(-INFINITE);
    for (int64_t i = start; i < std::min(start + length, size); i += LANES) best = max(logits_at(row, i, size), best);
    for (int j = 0; j < LANES; j++) maxima.push_back(best[j]);
  }
  if (int64_t(maxima.size()) < k) return -INFINITE;
  std::nth_element(maxima.begin(), maxima.begin() + (k - 1), maxima.end(), std::greater<float>());
  return maxima[k - 1];
}

// The k first of a row's tokens in order, those of -inf left out.
inline void best_candidates(const float* row, int64_t size, int64_t k, std::vector<float>& maxima, std::vector<Candidate>& result) {
  const float bound = bound_of_best(row, size, k, maxima);
  result.clear();
  for (int64_t start = 0; start < size; start += LANES) {
    if (!any(logits_at(row, start, size) >= bound)) continue;
    for (int64_t i = start; i < std::min(start + LANES, size); i++)
      if (row[i] >= bound && row[i] > -INFINITE) result.push_back({row[i], i});
  }
  if (int64_t(result.size()) > k) {
    std::nth_element(result.begin(), result.begin() + k, result.end(), comes_before);
    result.resize(k);
  }
  std::sort(result.begin(), result.end(), comes_before);
}

// ---- noise: see model/noise.py -----------------------------------------------------------------------------------

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;

inline uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

inline uint64_t noise_key(int64_t seed, int64_t sample_index, int64_t position) {
  return mix(mix(mix(uint64_t(seed) + GOLDEN) + uint64_t(sample_index) + GOLDEN) + uint64_t(position) + GOLDEN);
}

inline uint32_t random_bits(uint64_t key, int64_t token_id) {
  return uint32_t(mix(key + (uint64_t(token_id) + 1) * GOLDEN) >> 32);
}

inline float gumbel(uint32_t bits) {
  const float uniform = std::min((float(bits) + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
  return -std::log(-std::log1p(-uniform));
}

// Not below gumbel(bits): with v the uniform number, -log(-log1p(-v)) <= -log(v) = ln 2 (32 - log2(bits)), and a float's
// own bits, read as an integer, are its logarithm with a straight line between powers of two, which lies below it.
inline Floats gumbel_bound(Words bits) {
  const Floats number = __builtin_convertvector(bits, Floats) + 0.5f;
  const Floats log2_bits = __builtin_convertvector((Ints)number, Floats) * 0x1p-23f - 127.0f;
  return (32.0f - log2_bits) * 0.693148f + 1e-3f;
}

inline int64_t draw_among(const std::vector<Candidate>& candidates, uint64_t key) {
  Candidate best{-INFINITE, candidates.empty() ? 0 : candidates[0].token_id};
  for (const Candidate& one : candidates) {
    const float value = one.value + gumbel(random_bits(key, one.token_id));
    if (value > best.value) best = {value, one.token_id};
  }
  return best.token_id;
}

constexpr Candidate BEHIND_ALL{-INFINITE, 0};  // no token of -inf comes before it, and every other one does

// Among the tokens of a row that come before `end`. `first` is the best of the row, and always one of them.
inline Candidate draw_before(const Candidate& end, const float* row, int64_t size, int64_t first, uint64_t key) {
  Candidate best{row[first] + gumbel(random_bits(key, first)), first};
  for (int64_t start = 0; start < size; start += LANES) {
    const Floats lanes = logits_at(row, start, size);
    const Ints may_come = lanes >= end.value;
    if (!any(may_come)) continue;
    alignas(64) uint32_t bits[LANES];
    for (int i = 0; i < LANES; i++) bits[i] = random_bits(key + uint64_t(start) * GOLDEN, i);  // of token start + i
    const Ints may_win = may_come & (lanes + gumbel_bound(*(const Words*)bits) >= best.value);
    if (!any(may_win)) continue;
    for (int i = 0; i < LANES; i++) {
      if (!may_win[i] || !comes_before({lanes[i], start + i}, end)) continue;
      const Candidate one{lanes[i] + gumbel(bits[i]), start + i};
      if (comes_before(one, best)) best = one;
    }
  }
  return {row[best.token_id], best.token_id};
}

// The sum of the exponentials of the tokens that come before `end`. None is above 0.
inline double mass_before(const Candidate& end, const float* row, int64_t size) {
  Ints token_ids;
  for (int i = 0; i < LANES; i++) token_ids[i] = i;
  double mass = 0;
  constexpr float LOG2_E = 1.44269504f;
  constexpr int64_t STRETCH = 64 * LANES;  // summed in single precision, which is quicker
  for (int64_t begin = 0; begin < size; begin += STRETCH) {
    Floats sum{};
    for (int64_t i = begin; i < std::min(begin + STRETCH, size); i += LANES, token_ids += LANES) {
      const Floats lanes = logits_at(row, i, size);
      const Ints come = (lanes > end.value) | ((lanes == end.value) & (token_ids < int32_t(end.token_id)));
      if (any(come)) sum += come ? exp2<float>(lanes * LOG2_E) : Floats{};
    }
    mass += horizontal_sum(sum);
  }
  return mass;
}

// ---- one draw ----------------------------------------------------------------------------------------------------

// Entries [begin, end) of the lists that all draws share.
struct Pairs {
  const int64_t* token_ids;
  const float* values;
  int64_t begin, end;
};

struct DrawArguments {
  const float* row;
  int64_t vocab_size;
  float temperature, top_p, min_p, repetition, presence, frequency;
  int64_t top_k;
  uint64_t key;
  Pairs allowed, forbidden, bias;
  const int32_t* grammar_mask;                 // or null
  bool has_penalties;
  const int64_t *prompt, *output;              // tokens that penalties look at
  int64_t prompt_size, output_size;

  bool adjusts() const {
    return grammar_mask || has_penalties || allowed.begin < allowed.end || forbidden.begin < forbidden.end || bias.begin < bias.end;
  }
};

struct SamplerScratch {
  std::vector<float> row, scaled, maxima;
  std::vector<Candidate> candidates;
  std::vector<int32_t> counts;   // [vocab_size], all zero between two draws
  std::vector<int64_t> touched;  // tokens whose count is not zero
};

constexpr int32_t IN_PROMPT = 1 << 30;  // beside the count of a token in the output

inline void penalise(const DrawArguments& a, SamplerScratch& scratch) {
  scratch.counts.resize(a.vocab_size);
  const auto touch = [&](int64_t token_id) -> int32_t& {
    if (scratch.counts[token_id] == 0) scratch.touched.push_back(token_id);
    return scratch.counts[token_id];
  };
  // Lists are padded with the vocabulary's size.
  for (int64_t i = 0; i < a.output_size && a.output[i] < a.vocab_size; i++) touch(a.output[i])++;
  for (int64_t i = 0; i < a.prompt_size && a.prompt[i] < a.vocab_size; i++) touch(a.prompt[i]) |= IN_PROMPT;
  for (int64_t token_id : scratch.touched) {
    const float count = float(scratch.counts[token_id] & ~IN_PROMPT);
    float logit = scratch.row[token_id];
    logit = logit > 0 ? logit / a.repetition : logit * a.repetition;
    logit -= a.frequency * count;
    scratch.row[token_id] = logit - a.presence * (count > 0 ? 1.0f : 0.0f);
    scratch.counts[token_id] = 0;
  }
  scratch.touched.clear();
}

// Masks, bias and penalties, in the order of `model/sampling_adjustments.py`, on a copy of the row.
inline void adjust(const DrawArguments& a, SamplerScratch& scratch) {
  std::vector<float>& row = scratch.row;
  if (a.allowed.begin < a.allowed.end) {
    row.assign(a.vocab_size, -INFINITE);
    for (int64_t i = a.allowed.begin; i < a.allowed.end; i++) row[a.allowed.token_ids[i]] = a.row[a.allowed.token_ids[i]];
  } else {
    row.assign(a.row, a.row + a.vocab_size);
  }
  if (a.grammar_mask)
    for (int64_t i = 0; i < a.vocab_size; i++)
      if (!(uint32_t(a.grammar_mask[i / 32]) >> (i % 32) & 1)) row[i] = -INFINITE;
  for (int64_t i = a.forbidden.begin; i < a.forbidden.end; i++) row[a.forbidden.token_ids[i]] = -INFINITE;
  for (int64_t i = a.bias.begin; i < a.bias.end; i++) row[a.bias.token_ids[i]] += a.bias.values[i];
  if (a.has_penalties) penalise(a, scratch);
}

// (logit - best) / temperature, -inf where min_p cuts off.
inline void scale(const float* row, float best, const DrawArguments& a, std::vector<float>& scaled) {
  scaled.resize(a.vocab_size);
  const float bound = a.min_p > 0 ? std::log(a.min_p) : -INFINITE;
  for (int64_t i = 0; i < a.vocab_size; i += LANES) {
    Floats lanes = (logits_at(row, i, a.vocab_size) - best) / a.temperature;
    lanes = lanes < bound ? broadcast(-INFINITE) : lanes;
    store_some(scaled.data() + i, lanes, int(std::min<int64_t>(LANES, a.vocab_size - i)));
  }
}

// Among the k best tokens, of these only the first that hold top_p of their mass.
inline int64_t draw_by_top_k(const DrawArguments& a, SamplerScratch& scratch) {
  std::vector<Candidate>& candidates = scratch.candidates;
  best_candidates(scratch.scaled.data(), a.vocab_size, a.top_k, scratch.maxima, candidates);
  const auto weight = [](const Candidate& one) { return std::exp(double(one.value)); };
  if (a.top_p < 1) {
    double total = 0, mass = 0;
    for (const Candidate& one : candidates) total += weight(one);
    size_t kept = 0;
    while (kept < candidates.size() && (kept == 0 || mass < a.top_p * total)) mass += weight(candidates[kept++]);
    candidates.resize(kept);
  }
  return draw_among(candidates, a.key);
}

// Among the first tokens that hold top_p of the mass: the nucleus. Its end is not looked for. What is drawn from more
// tokens and lies in the nucleus is what is drawn from the nucleus; if it lies behind, so does all that comes after it,
// and the next draw is among those before it. It takes 1 + ln(1 / top_p) draws on the average.
inline int64_t draw_by_top_p(const DrawArguments& a, const float* scaled, int64_t first) {
  const double total = mass_before(BEHIND_ALL, scaled, a.vocab_size), limit = double(a.top_p) * total;
  // All tokens that are lighter than this weigh less, together, than what the nucleus leaves out.
  const double lightest = 0.999 * (total - limit) / a.vocab_size;
  Candidate one{float(std::log(lightest)), 0};
  do {
    one = draw_before(one, scaled, a.vocab_size, first, a.key);
  } while (one.token_id != first && !(mass_before(one, scaled, a.vocab_size) < limit));
  return one.token_id;
}

struct Drawn {
  int64_t token_id;
  bool has_no_token;
};

inline Drawn draw(const DrawArguments& a, SamplerScratch& scratch) {
  const float* row = a.row;
  if (a.adjusts()) {
    adjust(a, scratch);
    row = scratch.row.data();
  }
  const Candidate best = best_of(row, a.vocab_size);
  if (!std::isfinite(best.value)) return {0, best.value == -INFINITE};
  if (!(a.temperature > 0)) return {best.token_id, false};
  scale(row, best.value, a, scratch.scaled);
  const float* scaled = scratch.scaled.data();
  if (a.top_k > 0 && a.top_k < a.vocab_size) return {draw_by_top_k(a, scratch), false};
  if (a.top_p < 1) return {draw_by_top_p(a, scaled, best.token_id), false};
  return {draw_before(BEHIND_ALL, scaled, a.vocab_size, best.token_id, a.key).token_id, false};
}

// log softmax at one token, and the best k tokens with theirs. NaN where the row is broken.
inline float logprobs_of(const float* row, int64_t size, int64_t target, int64_t k, int64_t* top_token_ids, float* top_logprobs,
                         SamplerScratch& scratch) {
  std::fill(top_token_ids, top_token_ids + k, 0);
  std::fill(top_logprobs, top_logprobs + k, NAN);
  const float best = best_of(row, size).value;
  if (!std::isfinite(best)) return NAN;
  Floats sum{};
  for (int64_t i = 0; i < size; i += LANES) sum += exp(logits_at(row, i, size) - best);
  const float log_sum = std::log(horizontal_sum(sum));
  if (k > 0) best_candidates(row, size, k, scratch.maxima, scratch.candidates);
  for (int64_t i = 0; i < k; i++) {
    const bool exists = i < int64_t(scratch.candidates.size());
    top_token_ids[i] = exists ? scratch.candidates[i].token_id : 0;
    top_logprobs[i] = exists ? scratch.candidates[i].value - best - log_sum : -INFINITE;
  }
  return row[target] - best - log_sum;
}

}  // namespace mini_vllm
