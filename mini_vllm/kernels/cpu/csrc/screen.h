// The greatest output of each row of a product, without computing most of them.
//
// A greedy draw wants one logit of some ten thousand. A copy of the weights in bytes takes half the memory and half the
// time, and tells of each output between what bounds it lies. Only panels whose upper bound reaches the greatest output
// found so far are computed as `linear` would, so the result has the bits it has there.
//
//   panel          0     1     2     3     4
//   upper bound   12.1   7.9  20.4  18.8   3.3
//   computed                 (1) 19.2                  the highest bound first
//                                                       18.8 < 19.2: nothing else can be greater
//
// The bound. With x ~ a u and w ~ b v, u and v vectors of whole numbers, Cauchy and Schwarz say
//
//   w x  <=  a b (u v)  +  |x| |w - b v|  +  |x - a u| |b v|
//
// It is good only if no element of a vector is much larger than the others, for a and b are the largest one's 127th. In
// models some are; so both vectors are turned first, by the same rotation, which changes no product and makes them even.
// (Rotations before quantisation: QuIP, Chee et al. 2023, arXiv:2307.13304; QuaRot, Ashkboos et al. 2024, arXiv:2404.00456.)
#pragma once

#include <cmath>

#include "parallel.h"
#include "sampler.h"

namespace mini_vllm {

constexpr int BYTE_ZERO = 128;          // what a row's 0 is stored as
// Rows whose largest element lies between, and weights up to LARGEST, overflow nowhere, and what is lost where products are
// too small for a float is less than SMALLEST.
constexpr float SMALLEST_ROW = 1e-15f, LARGEST = 1e15f, SMALLEST = 1e-30f;
constexpr int64_t FEWEST_COMPUTED = 8;  // panels that are computed before a row is given up

using Bytes = uint8_t __attribute__((vector_size(16)));

// A fixed rotation of rows. A row is read as a matrix X [size of left, size of right] and becomes left X right.
struct Rotation {
  const float *left, *right;  // [left_size, left_size], [right_size, right_size]
  int64_t left_size, right_size;

  // x [left_size * right_size] -> to; `between` has room for as many.
  void operator()(const float* x, float* between, float* to) const {
    multiply_small(left, left_size, x, between);
    multiply_small(between, right_size, right, to);
  }

 private:
  // one [left_size, inner], other [inner, right_size] -> to.
  void multiply_small(const float* one, int64_t inner, const float* other, float* to) const {
    std::fill(to, to + left_size * right_size, 0.0f);
    for (int64_t i = 0; i < left_size; i++, to += right_size)
      for (int64_t k = 0; k < inner; k++)
        for (int64_t j = 0; j < right_size; j++) to[j] += one[i * inner + k] * other[k * right_size + j];
  }
};

// A matrix in bytes: output j is about scales[j] times its codes.
struct Screen {
  Matrix<int8_t> codes;
  // Of each output; `zeros`: the sum of its codes times -BYTE_ZERO. Outputs that only fill up a panel have 0.
  const float *scales, *norms;  // norms: |v|
  const int32_t* zeros;
  float error;  // |w - b v| <= error * b for all outputs
  float lost;   // what rounding may move a product w x by, in parts of |w| |x|: the rotation's, the sums' and that of `linear`
  Rotation rotation;
};

// A row in bytes, and what its upper bounds are made of. With N = u v and everything divided by a and b:
//   w x / (a b)  <=  N + base + slope * |v|
struct ScreenedRow {
  float scale, base, slope;
  bool has_bounds;
};

// Lays a turned row down as bytes.
inline ScreenedRow screen_row(const float* turned, int64_t inputs, float error, float lost, const PackedRows<int8_t>::Row& place) {
  const auto lanes_at = [&](int64_t i) { return load_some(turned + i, int(std::min<int64_t>(LANES, inputs - i))); };
  Floats largest{}, squares{}, missed{};
  for (int64_t i = 0; i < inputs; i += LANES) largest = max(max(lanes_at(i), -lanes_at(i)), largest);
  const float most = horizontal_max(largest), scale = std::max(most, SMALLEST_ROW) / 127;
  for (int64_t i = 0; i < inputs; i += LANES) {
    const Floats exact = lanes_at(i) / scale, code = nearest_integer(exact);
    squares += exact * exact;
    missed += (exact - code) * (exact - code);
    const auto bytes = __builtin_convertvector(__builtin_convertvector(code, Ints) + BYTE_ZERO, Bytes);
    std::memcpy(place(i), &bytes, std::min<int64_t>(LANES, inputs - i));
  }
  const float length = std::sqrt(horizontal_sum(squares));  // no number if the row has one that is none
  return {scale, error * length * (1 + lost), std::sqrt(horizontal_sum(missed)) + lost * length,
          std::isfinite(length) && most >= SMALLEST_ROW && most <= LARGEST};
}

// Keeps the highest upper bound of each row and panel.
struct KeepBounds {
  static constexpr int PANELS = 1;
  const Screen& screen;
  const ScreenedRow* rows;
  float* bounds;  // [rows, panels]

  void operator()(const int32_t (*sums)[MAX_ROWS][PANEL], int64_t row, int count, int64_t panel) const {
    const int64_t column = panel * PANEL;
    for (int r = 0; r < count; r++) {
      const ScreenedRow& own = rows[row + r];
      Floats best = broadcast(-INFINITE);
      for (int half = 0; half < PANEL; half += LANES) {
        const Ints product = load(sums[0][r] + half) + load(screen.zeros + column + half);
        const Floats norms = load(screen.norms + column + half), scales = load(screen.scales + column + half);
        const Floats most = __builtin_convertvector(product, Floats) + own.base;
        best = max(fused_multiply_add(norms, broadcast(own.slope), most) * scales, best);
      }
      bounds[(row + r) * screen.codes.panels() + panel] = horizontal_max(best) * own.scale + SMALLEST;
    }
  }
};

// The first greatest output of panel `panel` for one row, computed as `linear` does.
template <class Element>
Candidate best_of_panel(const Element* x, const Matrix<Element>& w, int64_t panel, Ahead& ahead) {
  float sums[1][PANEL];
  sum_products<1>(x, w.panel(panel), w.inputs, ahead, sums);
  Candidate best = best_of(sums[0], std::min<int64_t>(PANEL, w.outputs - panel * PANEL));
  best.token_id += panel * PANEL;
  return best;
}

// The first greatest output of a row; nothing if too many panels would have to be computed. A panel takes one row as long as
// it takes a block of rows, so beyond a few panels that is where it would be as much work as all panels of a product.
template <class Element>
std::optional<Candidate> best_within(const Element* x, const Matrix<Element>& w, const float* bounds, Ahead& ahead) {
  const int64_t panels = w.panels(), most = std::max(FEWEST_COMPUTED, panels / MAX_ROWS);
  const int64_t likely = std::max_element(bounds, bounds + panels) - bounds;
  Candidate best = best_of_panel(x, w, likely, ahead);
  thread_local std::vector<Candidate> waiting;  // panels, each with its bound
  waiting.clear();
  for (int64_t panel = 0; panel < panels; panel++)
    if (panel != likely && !(bounds[panel] < best.value)) waiting.push_back({bounds[panel], panel});
  std::sort(waiting.begin(), waiting.end(), comes_before);
  for (size_t i = 0; i < waiting.size() && !(waiting[i].value < best.value); i++) {
    if (int64_t(i) == most) return {};
    const Candidate one = best_of_panel(x, w, waiting[i].token_id, ahead);
    if (comes_before(one, best)) best = one;
  }
  return best;
}

// For each row of x its first greatest output. False if some row must be computed whole.
template <class Element>
bool best_outputs(const Element* x, int64_t count, const Matrix<Element>& w, const Screen& screen,
                  Candidate* best) {
  const int64_t inputs = w.inputs, panels = w.panels();
  const PackedRows<int8_t> rows{scratch_memory<int8_t>(count * PackedRows<int8_t>::padded(inputs)), count, inputs};
  std::vector<ScreenedRow> screened(count);
  std::atomic<bool> is_found{true};
  for_each_row(count, inputs * LANES, [&](int64_t row) {
    thread_local std::vector<float> wide, between, turned;
    for (std::vector<float>* memory : {&wide, &between, &turned}) memory->resize(inputs);
    for (int64_t i = 0; i < inputs; i += LANES) {
      const int width = int(std::min<int64_t>(LANES, inputs - i));
      store_some(wide.data() + i, load_some(x + row * inputs + i, width), width);
    }
    screen.rotation(wide.data(), between.data(), turned.data());
    screened[row] = screen_row(turned.data(), inputs, screen.error, screen.lost, rows.row(row));
    if (!screened[row].has_bounds) is_found = false;
  });
  if (!is_found) return false;
  float* bounds = scratch_memory<float>(count * panels);
  std::vector<Ahead> ahead = one_a_thread(rows.data);
  multiply_together(rows, screen.codes, KeepBounds{screen, screened.data(), bounds}, ahead);
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    Ahead nothing(x);
    for (int64_t row = begin; row < end && is_found; row++)
      if (const auto one = best_within(x + row * inputs, w, bounds + row * panels, nothing)) best[row] = *one;
      else is_found = false;
  });
  return is_found;
}

}  // namespace mini_vllm
