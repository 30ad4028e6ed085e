// y = x W^T for a few or many rows, with the weights packed ahead.
//
// Packed weights: panels of 32 outputs, each panel one stretch of memory that is read from front to back.
//
//   W [outputs, inputs]   ->   panel p holds outputs 32 p ... 32 p + 31, step after step of the inputs:
//
//       step 0   | inputs 0, 1 of 16 outputs | inputs 0, 1 of the next 16 |     64 bytes each; for float a step is one
//       step 1   | inputs 2, 3 of 16 outputs | inputs 2, 3 of the next 16 |     input instead of two (Step in vector.h)
//
//   rows of x   up to 12 at a time, each with 2 vectors of sums: 24 of them, 2 of weights and 1 of x fill the 32
//               registers of AVX-512; with fewer registers the compiler keeps some of the sums in memory
//
// One row: the weights stream past once, and memory is the limit. Many rows: a panel stays in the second-level cache
// while all rows of a chunk pass, and the multipliers are the limit. It is the same loop.
//
// Exactness: an output is one chain of `dot` steps over the inputs, first to last. Neither the number of rows nor a
// row's place among them enters.
#pragma once

#include <algorithm>

#include "vector.h"

namespace mini_vllm {

constexpr int PANEL = 2 * LANES;    // outputs in a panel
constexpr int MAX_ROWS = 12;        // rows whose sums fit in the registers
constexpr int64_t CHUNK_ROWS = 20 * MAX_ROWS;  // rows that pass a panel before the next one is fetched

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

// What a product is, apart from the rows and panels that a call works on.
template <class Element, class Output>
struct LinearArguments {
  const Element* x;         // [rows, inputs], rows `x_stride` elements apart
  const Element* packed;    // panels
  const Element* bias;      // [outputs] or null
  const Element* residual;  // [rows, outputs], added to the product before it is rounded; or null
  Output* y;                // [rows, outputs]
  int64_t x_stride, inputs, outputs;
};

// Lays rows of x out so that the kernel reads one stretch: step k of row 0, step k of row 1, ..., step k + 1 of row 0 ...
// Read in place, rows a power of two apart would push each other out of the first-level cache.
template <class Element>
void interleave(const Element* x, int64_t x_stride, int64_t inputs, int rows, Element* to) {
  constexpr int WIDTH = Step<Element>::WIDTH;
  for (int r = 0; r < rows; r++)
    for (int64_t k = 0; k < inputs; k += WIDTH)
      std::memcpy(to + (k * rows + r * WIDTH), x + r * x_stride + k, sizeof(Element) * WIDTH);
}

// The sums of ROWS interleaved rows with one panel. Nothing is called here, or the compiler would keep the sums in memory.
// `ahead` is a part of the next panel that is asked for meanwhile, `share` elements of it in each step.
template <int ROWS, class Element>
void sum_products(const Element* x, const Element* weight, int64_t inputs, const Element* ahead, int64_t share,
                  float (*result)[PANEL]) {
  using S = Step<Element>;
  Floats sums[ROWS][2] = {};
  for (int64_t k = 0; k < inputs; k += S::WIDTH) {
    const auto first = S::load_packed(weight), second = S::load_packed(weight + LANES * S::WIDTH);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
      const auto spread = S::spread(x + r * S::WIDTH);
      sums[r][0] = S::dot(spread, first, sums[r][0]);
      sums[r][1] = S::dot(spread, second, sums[r][1]);
    }
    __builtin_prefetch(ahead, 0, 2);
    ahead += share;
    x += ROWS * S::WIDTH;
    weight += PANEL * S::WIDTH;
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++) {
    store(result[r], sums[r][0]);
    store(result[r] + LANES, sums[r][1]);
  }
}

// Adds bias and residual, rounds and writes.
template <class Element, class Output>
void finish(const LinearArguments<Element, Output>& a, const float* sums, int64_t row, int64_t panel) {
  for (int64_t column = panel * PANEL; column < std::min((panel + 1) * PANEL, a.outputs); column += LANES, sums += LANES) {
    const int count = int(std::min<int64_t>(LANES, a.outputs - column));
    Floats sum = load(sums);
    if (a.bias) sum += load_some(a.bias + column, count);
    if (a.residual) sum += load_some(a.residual + row * a.outputs + column, count);
    store_some(a.y + row * a.outputs + column, sum, count);
  }
}

template <class Element>
void sum_products(int rows, const Element* x, const Element* weight, int64_t inputs, const Element* ahead, int64_t share,
                  float (*result)[PANEL]) {
  switch (rows) {
    case 1: return sum_products<1>(x, weight, inputs, ahead, share, result);
    case 2: return sum_products<2>(x, weight, inputs, ahead, share, result);
    case 3: return sum_products<3>(x, weight, inputs, ahead, share, result);
    case 4: return sum_products<4>(x, weight, inputs, ahead, share, result);
    case 5: return sum_products<5>(x, weight, inputs, ahead, share, result);
    case 6: return sum_products<6>(x, weight, inputs, ahead, share, result);
    case 7: return sum_products<7>(x, weight, inputs, ahead, share, result);
    case 8: return sum_products<8>(x, weight, inputs, ahead, share, result);
    case 9: return sum_products<9>(x, weight, inputs, ahead, share, result);
    case 10: return sum_products<10>(x, weight, inputs, ahead, share, result);
    case 11: return sum_products<11>(x, weight, inputs, ahead, share, result);
    case 12: return sum_products<12>(x, weight, inputs, ahead, share, result);
  }
}

// Rows [begin, end) against panels [first, last): one task of one thread. `scratch` holds CHUNK_ROWS * inputs elements.
template <class Element, class Output>
void linear(const LinearArguments<Element, Output>& a, int64_t begin, int64_t end, int64_t first, int64_t last, Element* scratch) {
  // Blocks as even as can be: 13 rows are 7 and 6, for 12 and 1 would read the panel for a single row.
  const int64_t rows = end - begin, blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;
  const auto start = [&](int64_t block) { return rows * block / blocks; };
  for (int64_t block = 0; block < blocks; block++)
    interleave(a.x + (begin + start(block)) * a.x_stride, a.x_stride, a.inputs, int(start(block + 1) - start(block)), scratch + start(block) * a.inputs);
  const int64_t panel_size = PANEL * a.inputs;
  for (int64_t panel = first; panel < last; panel++) {
    const Element *weight = a.packed + panel * panel_size, *next = panel + 1 < last ? weight + panel_size : weight;
    // A single block reads as fast as the memory gives; the processor sees by itself where that goes on.
    const int64_t share = blocks > 1 ? PANEL * Step<Element>::WIDTH / blocks : 0;
    for (int64_t block = 0; block < blocks; block++) {
      float sums[MAX_ROWS][PANEL];
      const int count = int(start(block + 1) - start(block));
      sum_products(count, scratch + start(block) * a.inputs, weight, a.inputs, next + panel_size * block / blocks,
                   share, sums);
      for (int r = 0; r < count; r++) finish(a, sums[r], begin + start(block) + r, panel);
    }
  }
}

}  // namespace mini_vllm
