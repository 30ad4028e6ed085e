// y = x W^T for a few or many rows, with the weights packed ahead.
//
// Packed weights: panels of 32 outputs, each panel one stretch of memory that is read from front to back.
//
//   W [outputs, inputs]   ->   panel p holds outputs 32 p ... 32 p + 31, step after step of the inputs:
//
//       step 0   | inputs 0, 1 of 16 outputs | inputs 0, 1 of the next 16 |     64 bytes each; for float a step is one
//       step 1   | inputs 2, 3 of 16 outputs | inputs 2, 3 of the next 16 |     input instead of two (Step in vector.h)
//
// Packed rows: the rows of x lie in blocks of up to 12, and within a block in segments of 64 bytes, 16 steps: segment 0 of
// row 0, segment 0 of row 1, ..., segment 1 of row 0, ... So a block is read from front to back; read in place, rows a power
// of two apart would push each other out of the first-level cache. 2 vectors of sums for each of 12 rows, 2 of weights and
// one of x have room in the 32 registers of AVX-512; with fewer registers the compiler keeps some of the sums in memory.
//
// One row: the weights stream past once, and memory is the limit. Many rows: a panel stays in the second-level cache
// while all rows of a chunk pass, and the multipliers are the limit. It is the same loop.
//
// Exactness: an output is one chain of `dot` steps over the inputs, first to last. Neither the number of rows nor a
// row's place among them enters.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "ahead.h"
#include "vector.h"

namespace mini_vllm {

constexpr int PANEL = 2 * LANES;         // outputs in a panel
constexpr int MAX_ROWS = 12;             // rows whose sums fit in the registers
constexpr int64_t MANY_OUTPUTS = 8192;   // so many of a row are not kept in the caches
template <class Element>
using SumOf = typename Step<Element>::Sum;
template <class Element>
constexpr int SEGMENT = 16 * Step<Element>::WIDTH;  // inputs that lie side by side in packed rows
constexpr int64_t CHUNK_BLOCKS = 20;     // blocks of rows that pass a panel before the next one is fetched

inline int64_t num_panels(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

// Puts panel p of W [outputs, inputs] in order. Outputs past the end are zero.
template <class Element>
void pack_panel(const Element* weight, int64_t outputs, int64_t inputs, int64_t panel, Element* packed) {
  constexpr int WIDTH = Step<Element>::WIDTH;
  Element* to = packed + panel * PANEL * inputs;
  for (int64_t k = 0; k < inputs; k += WIDTH)
    for (int column = 0; column < PANEL; column++)
      for (int i = 0; i < WIDTH; i++) {
        const int64_t output = panel * PANEL + column;
        *to++ = output < outputs ? weight[output * inputs + k + i] : Element(0);
      }
}

template <class Element>
struct PackedRows {
  static constexpr int64_t LENGTH = SEGMENT<Element>;
  Element* data;  // [rows * padded(inputs)]
  int64_t rows, inputs;

  static int64_t padded(int64_t inputs) { return (inputs + LENGTH - 1) / LENGTH * LENGTH; }
  // Blocks as even as can be: 13 rows are 7 and 6, for 12 and 1 would read a panel for a single row.
  int64_t blocks() const { return (rows + MAX_ROWS - 1) / MAX_ROWS; }
  int64_t start(int64_t block) const { return rows * block / blocks(); }
  int64_t block_of(int64_t row) const { return ((row + 1) * blocks() - 1) / rows; }
  const Element* block(int64_t index) const { return data + start(index) * padded(inputs); }

  // Where a row's segments go.
  struct Row {
    Element* first;
    int64_t stride;  // from one segment to the next
    Element* operator()(int64_t input) const { return first + input / LENGTH * stride + input % LENGTH; }
  };
  Row row(int64_t row) const {
    const int64_t block = block_of(row), begin = start(block);
    return {data + begin * padded(inputs) + (row - begin) * LENGTH, (start(block + 1) - begin) * LENGTH};
  }
  // Lays a row down in its place.
  void put(int64_t index, const Element* values) const {
    const Row to = row(index);
    for (int64_t i = 0; i < inputs; i += LENGTH)
      copy_up_to<LENGTH>(to(i), values + i, inputs - i);
  }
};

// W as the kernel reads it.
template <class Element>
struct Matrix {
  const Element* packed;  // panels
  int64_t outputs, inputs;
  const Element* bias;  // [outputs] or null

  int64_t panels() const { return num_panels(outputs); }
  int64_t bytes() const { return panels() * PANEL * inputs * int64_t(sizeof(Element)); }
  const Element* panel(int64_t index) const { return packed + index * PANEL * inputs; }
  // A panel, and its partner where they come in pairs.
  std::pair<Range, Range> ranges(int64_t index, int64_t together) const {
    const auto range = [&](int64_t i) { return i < panels() ? Range(panel(i), PANEL * inputs * sizeof(Element)) : Range(); };
    return {range(index), together == 2 ? range(index + panels() / 2) : Range()};
  }
};

// The sums of ROWS rows with one panel. Nothing is called here that is not inlined, or the compiler would keep the sums in
// memory. Each step asks for what comes ahead.
template <int ROWS, class Element>
void sum_products(const Element* x, const Element* weight, int64_t inputs, Ahead& ahead, SumOf<Element> (*result)[PANEL]) {
  using S = Step<Element>;
  constexpr int LENGTH = SEGMENT<Element>;
  typename S::Sums sums[ROWS][2] = {};
  const char *line = nullptr, *other = nullptr;
  for (int64_t begin = 0; begin < inputs; begin += LENGTH, x += ROWS * LENGTH) {
    if (begin % (STRETCH_LINES * S::WIDTH) == 0) line = ahead.next_stretch(), other = ahead.second_stretch();
    const int64_t count = std::min<int64_t>(LENGTH, inputs - begin);
    for (int64_t k = 0; k < count; k += S::WIDTH) {
      const auto first = S::load_packed(weight), second = S::load_packed(weight + LANES * S::WIDTH);
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; r++) {
        const auto spread = S::spread(x + r * LENGTH + k);
        sums[r][0] = S::dot(spread, first, sums[r][0]);
        sums[r][1] = S::dot(spread, second, sums[r][1]);
      }
      __builtin_prefetch(line, 0, 2);
      __builtin_prefetch(other, 0, 2);
      line += LINE, other += LINE;
      weight += PANEL * S::WIDTH;
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++) {
    store(result[r], sums[r][0]);
    store(result[r] + LANES, sums[r][1]);
  }
}

template <class Element>
void sum_products(int rows, const Element* x, const Element* weight, int64_t inputs, Ahead& ahead,
                  SumOf<Element> (*result)[PANEL]) {
  switch (rows) {
    case 1: return sum_products<1>(x, weight, inputs, ahead, result);
    case 2: return sum_products<2>(x, weight, inputs, ahead, result);
    case 3: return sum_products<3>(x, weight, inputs, ahead, result);
    case 4: return sum_products<4>(x, weight, inputs, ahead, result);
    case 5: return sum_products<5>(x, weight, inputs, ahead, result);
    case 6: return sum_products<6>(x, weight, inputs, ahead, result);
    case 7: return sum_products<7>(x, weight, inputs, ahead, result);
    case 8: return sum_products<8>(x, weight, inputs, ahead, result);
    case 9: return sum_products<9>(x, weight, inputs, ahead, result);
    case 10: return sum_products<10>(x, weight, inputs, ahead, result);
    case 11: return sum_products<11>(x, weight, inputs, ahead, result);
    case 12: return sum_products<12>(x, weight, inputs, ahead, result);
  }
}

// What happens to the sums. Each is called as finish(sums, row, count, panel): sums of rows [row, row + count) with the
// panel, and with its partner where panels come in pairs.

// Adds bias and residual, rounds and writes: y [rows, outputs].
template <class Element, class Output>
struct StoreRows {
  static constexpr int PANELS = 1;
  const Element *bias, *residual;  // [outputs], [rows, outputs]; or null
  Output* y;
  int64_t outputs;

  // Logits: some megabytes, with rows so far apart that they would push each other out of the caches.
  bool passes_caches() const {
    return std::is_same_v<Output, float> && outputs >= MANY_OUTPUTS && outputs % LANES == 0 && uintptr_t(y) % LINE == 0;
  }

  void operator()(const float (*sums)[MAX_ROWS][PANEL], int64_t row, int count, int64_t panel) const {
    for (int r = 0; r < count; r++)
      for (int half = 0; half < 2; half++) {
        const int64_t column = panel * PANEL + half * LANES, place = (row + r) * outputs + column;
        const int width = int(std::min<int64_t>(LANES, outputs - column));
        if (width <= 0) break;
        Floats sum = load(sums[0][r] + half * LANES);
        if (bias) sum += load_some(bias + column, width);
        if (residual) sum += load_some(residual + place, width);
        if constexpr (std::is_same_v<Output, float>)
          if (passes_caches()) {
            store_past_caches(y + place, sum);
            continue;
          }
        store_some(y + place, sum, width);
      }
  }
};

// Something else that a thread does now and then between two panels. `work`: inputs times rows since the last time.
struct Between {
  virtual void operator()(int64_t work) = 0;

 protected:
  ~Between() = default;
};

// x against W, panels [first, last), rows of blocks [first_block, last_block): what one thread does. `following` are the
// panels that it multiplies by afterwards, one or a pair. `between` may be null.
template <class Element, class Finish>
void multiply(const PackedRows<Element>& x, const Matrix<Element>& w, int64_t first_block, int64_t last_block, int64_t first,
              int64_t last, const Finish& finish, Ahead& ahead, std::pair<Range, Range> following, Between* between) {
  const int64_t partner = w.panels() / 2;  // of panel p, in pairs: p + partner
  for (int64_t from = first_block; from < last_block; from += CHUNK_BLOCKS) {
    const int64_t to = std::min(last_block, from + CHUNK_BLOCKS);
    for (int64_t panel = first; panel < last; panel++) {
      // A single block reads as fast as the memory gives; the processor sees by itself where that goes on.
      if (to - from > 1) {
        const int64_t next = panel + 1 < last ? panel + 1 : first;
        const bool is_end = panel + 1 == last && to == last_block;
        const auto ranges = is_end ? following : w.ranges(next, Finish::PANELS);
        ahead.weights(ranges.first, ranges.second);
      }
      for (int64_t block = from; block < to; block++) {
        SumOf<Element> sums[Finish::PANELS][MAX_ROWS][PANEL];
        const int64_t row = x.start(block);
        const int count = int(x.start(block + 1) - row);
        for (int i = 0; i < Finish::PANELS; i++)
          sum_products(count, x.block(block), w.panel(panel + i * partner), x.inputs, ahead, sums[i]);
        finish(sums, row, count, panel);
      }
      if (between) (*between)((x.start(to) - x.start(from)) * x.inputs * Finish::PANELS);
    }
  }
}

// The part of a product that thread `thread` of `threads` computes. Few rows: each thread takes some panels. Many: each
// takes some rows.
struct Share {
  int64_t first_block, last_block, first, last;

  Share(int64_t blocks, int64_t panels, int64_t thread, int64_t threads) {
    const bool by_rows = blocks > threads * CHUNK_BLOCKS / 2;
    const auto part = [&](int64_t count, int64_t index) { return count * index / threads; };
    first_block = by_rows ? part(blocks, thread) : 0, last_block = by_rows ? part(blocks, thread + 1) : blocks;
    first = by_rows ? 0 : part(panels, thread), last = by_rows ? panels : part(panels, thread + 1);
  }
};

}  // namespace mini_vllm
