// Memory that is wanted soon, asked for while the multipliers are busy.
//
// A product of many rows is bound by arithmetic and leaves the memory idle; attention of many sequences waits for the
// memory. So each step of a product (linear.h) asks for one line: first of the weights that this thread multiplies next,
// then of the keys and values that it will look at in the next layer. They come to rest in the last-level cache; where two
// halves take turns (share_out.h), those of the next task alone are asked for, and rest in the second-level cache.
//
//   products of layer 3   |=== arithmetic ===|            |=== arithmetic ===|
//   attention                                 |= layer 4 =|
//   memory                |weights, K V of 4 |            |weights, K V of 5 |
//
// Lines are taken in stretches of 2 KB, so that what comes next is decided once in 32 steps. A step asks for one line, or
// for two if the steps would not suffice. Asking changes no result.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mini_vllm {

constexpr int64_t LINE = 64;                    // bytes
constexpr int64_t STRETCH_LINES = 32;
constexpr int64_t STRETCH = LINE * STRETCH_LINES;

struct Range {
  const char *at = nullptr, *end = nullptr;
  Range() = default;
  Range(const void* from, int64_t bytes) : at(static_cast<const char*>(from)), end(at + bytes) {}
};

// Keys and values of one layer: stretches at these distances from the beginning of both caches. What is wanted soonest
// comes first if it will fit into the second-level cache. If not, it comes last (`backwards`): what a cache cannot hold is
// then what is wanted last.
struct CacheAhead {
  const int64_t* offsets = nullptr;
  int64_t count = 0;
  const char *keys = nullptr, *values = nullptr;
  bool backwards = false;

  int64_t stretches() const { return 2 * count; }
  const char* at(int64_t i) const { return (i % 2 ? values : keys) + offsets[backwards ? count - 1 - i / 2 : i / 2]; }
};

// What one thread asks for.
class Ahead {
 public:
  explicit Ahead(const void* readable) : last_(static_cast<const char*>(readable)) {}

  void weights(Range one, Range other = {}) { ranges_[0] = one, ranges_[1] = other; }
  void cache(CacheAhead cache, bool two_lines) { cache_ = cache, next_ = 0, two_lines_ = two_lines; }

  // The beginning of the next stretch; if there is nothing left, of the last one once more.
  const char* next_stretch() {
    for (Range& range : ranges_)
      if (range.at < range.end) {
        last_ = range.at;
        range.at += STRETCH;
        return last_;
      }
    if (next_ < cache_.stretches()) last_ = cache_.at(next_++);
    return last_;
  }
  // What the second line of a step is taken from.
  const char* second_stretch() { return two_lines_ ? next_stretch() : last_; }

 private:
  Range ranges_[2];
  CacheAhead cache_;
  int64_t next_ = 0;
  bool two_lines_ = false;
  const char* last_;
};

}  // namespace mini_vllm
