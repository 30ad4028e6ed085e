// PagedAttention (Kwon et al. 2023, arXiv:2309.06180): prefill, chunked prefill and decode in one kernel.
//
// How a block is laid out. Both products of attention, scores = Q K^T and output = P V, are chains of `dot` steps
// (vector.h), so keys and values lie as the second operand of a step wants them. For one block and one head:
//
//   keys     [block_size / 16][head_dim / W][16 keys][W]     a step is W dimensions of 16 keys
//   values   [block_size / W][head_dim][W]                   a step is W keys of 16 dimensions          (W: Step::WIDTH)
//
// Blocks shorter than 16 tokens keep the same order with fewer keys side by side, and are copied together when read.
//
// What one thread does at a time, a task: up to 48 rows that share a key head, or those of all key heads where they are so
// few together. A "row" is one query of one query head. With three query heads a key head 48 rows are 16 queries. Rows are
// multiplied six together, a "group of rows"; a "block" is always one of the cache. Keys come in tiles of 64, at absolute
// positions 0, 64, 128, ...:
//
//            tile 0      tile 1      tile 2
//   row 0   |###########|####       |           |      # seen    (causal: up to the query's own position; a window
//   row 1   |###########|#####      |           |                 also hides the oldest)
//   ...
//   row 47  |###########|###########|##         |
//
// Each row carries a running maximum, sum and output through the tiles (online softmax, Milakov and Gimelshein 2018,
// arXiv:1805.02867; tiled as in FlashAttention, Dao et al. 2022, arXiv:2205.14135).
//
// Exactness: what a row computes depends on its query, its position and the keys it sees. Which rows stand beside it,
// how the sequence was cut into chunks, and the size of a block do not enter: tiles lie at absolute positions, every sum
// is taken in order, and a key that is not seen adds exactly nothing if its value is a finite number.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "attention_plan.h"
#include "vector.h"

namespace mini_vllm {

constexpr int TILE = 4 * LANES;       // keys in a tile
constexpr int GROUP_ROWS = 6;         // rows whose 4 sums each fit in the registers

// The place of an element within the keys (or values) of one head in one block.
template <class Element>
struct BlockLayout {
  static constexpr int WIDTH = Step<Element>::WIDTH;
  int64_t block_size, width;  // width: head_dim, padded with zeros to a multiple of 16

  int64_t key(int64_t offset, int64_t dimension) const {
    const int64_t side = std::min<int64_t>(LANES, block_size);
    return ((offset / side * (width / WIDTH) + dimension / WIDTH) * side + offset % side) * WIDTH + dimension % WIDTH;
  }
  int64_t value(int64_t offset, int64_t dimension) const {
    const int64_t side = std::min<int64_t>(WIDTH, block_size);
    return (offset / side * width + dimension) * side + offset % side;
  }
  int64_t size() const { return block_size * width; }
};

template <class Element>
struct AttentionArguments {
  const Element *query, *key, *value;  // [tokens, heads, head_dim]; a head's elements lie side by side
  int64_t query_stride, key_stride, value_stride;  // elements from one token to the next
  Element *key_cache, *value_cache;    // [blocks, kv_heads, BlockLayout::size()]
  const int32_t* block_tables;         // [sequences, table_width]
  const int64_t* slot_mapping;
  Element* output;                     // [tokens, heads, head_dim]
  int64_t table_width, num_heads, num_kv_heads, head_dim;
  BlockLayout<Element> layout;
  float scale, softcap;                // softcap 0: none
  int64_t window;                      // keys that a query sees, itself included; 0: all

  int64_t group() const { return num_heads / num_kv_heads; }  // query heads that share a key head
  Element* head_of(Element* cache, int64_t block, int64_t head) const {
    return cache + (block * num_kv_heads + head) * layout.size();
  }
};

// Stores the keys and values of one token, heads [first_head, first_head + heads).
template <class Element>
void write_token(const AttentionArguments<Element>& a, int64_t token, int64_t first_head, int64_t heads) {
  constexpr int WIDTH = Step<Element>::WIDTH;
  const int64_t block = a.slot_mapping[token] / a.layout.block_size, offset = a.slot_mapping[token] % a.layout.block_size;
  // From one step of a key to the next, and from one element of a value to the next.
  const int64_t key_step = std::min<int64_t>(LANES, a.layout.block_size) * WIDTH;
  const int64_t value_step = std::min<int64_t>(WIDTH, a.layout.block_size);
  const int64_t first_key = a.layout.key(offset, 0), first_value = a.layout.value(offset, 0);
  for (int64_t head = first_head; head < first_head + heads; head++) {
    const Element* key = a.key + token * a.key_stride + head * a.head_dim;
    const Element* value = a.value + token * a.value_stride + head * a.head_dim;
    Element* keys = a.head_of(a.key_cache, block, head) + first_key;
    Element* values = a.head_of(a.value_cache, block, head) + first_value;
    for (int64_t d = 0; d < a.head_dim; d += WIDTH, keys += key_step)
      copy_up_to<WIDTH>(keys, key + d, a.head_dim - d);
    for (int64_t d = 0; d < a.head_dim; d++) values[d * value_step] = value[d];
  }
}

// What a thread needs to work on a task; kept between tasks, since its size depends on the layer only.
template <class Element>
struct AttentionScratch {
  std::vector<Element> queries;        // [rows][width]
  std::vector<Element> probabilities;  // of one group of rows: [rows][TILE]
  std::vector<Element> keys, values;   // a tile copied together, for short blocks only
  std::vector<float> outputs;          // [rows][width]
  std::vector<float> maxima, factors;  // [rows]
  std::vector<Floats> sums;            // [rows], sixteen partial sums each
  std::vector<int64_t> positions;      // [rows]
};

// Where the keys and values of one tile lie.
template <class Element>
struct Tile {
  int64_t start;                          // first position
  const Element* keys[TILE / LANES];      // 16 keys each
  const Element* values[TILE / LANES];
};

template <class Element>
Tile<Element> find_tile(const AttentionArguments<Element>& a, int64_t sequence, int64_t head, int64_t start, int64_t end,
                        AttentionScratch<Element>& scratch) {
  Tile<Element> tile{start, {}, {}};
  const BlockLayout<Element> together{LANES, a.layout.width};
  const int32_t* table = a.block_tables + sequence * a.table_width;
  int64_t block = start / a.layout.block_size, offset = start % a.layout.block_size;
  for (int64_t part = 0; part < TILE / LANES; part++) {
    const int64_t first = start + part * LANES;
    if (first >= end) {  // nobody looks at it, but it is asked for ahead
      tile.keys[part] = tile.keys[0];
      tile.values[part] = tile.values[0];
    } else if (a.layout.block_size >= LANES) {
      tile.keys[part] = a.head_of(a.key_cache, table[block], head) + offset * a.layout.width;
      tile.values[part] = a.head_of(a.value_cache, table[block], head) + offset * a.layout.width;
      offset += LANES;
      if (offset == a.layout.block_size) block++, offset = 0;
    } else {
      Element *keys = scratch.keys.data() + part * together.size(), *values = scratch.values.data() + part * together.size();
      for (int64_t i = 0; i < std::min<int64_t>(LANES, end - first); i++) {
        const int64_t block = table[(first + i) / a.layout.block_size], offset = (first + i) % a.layout.block_size;
        const Element *k = a.head_of(a.key_cache, block, head), *v = a.head_of(a.value_cache, block, head);
        for (int64_t d = 0; d < a.layout.width; d++) {
          keys[together.key(i, d)] = k[a.layout.key(offset, d)];
          values[together.value(i, d)] = v[a.layout.value(offset, d)];
        }
      }
      tile.keys[part] = keys;
      tile.values[part] = values;
    }
  }
  return tile;
}

// scores[r][j] = query r . key j, not scaled yet, for the first 16 * VECTORS keys. Step by step it asks for the same part of
// the tile that comes next: blocks lie anywhere, so the processor cannot guess, and would wait for the memory at each of
// them. (The values of that tile are asked for in `multiply_values`, so that the requests are spread.)
template <int ROWS, int VECTORS, class Element>
void multiply_keys(const Element* queries, const Tile<Element>& tile, const Tile<Element>& next, int64_t width,
                   float (*scores)[TILE]) {
  using S = Step<Element>;
  Floats sums[ROWS][VECTORS] = {};
  for (int64_t d = 0; d < width; d += S::WIDTH) {
    typename S::Packed keys[VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) keys[j] = S::load_packed(tile.keys[j] + d * LANES);
#pragma GCC unroll 4
    for (int j = 0; j < TILE / LANES; j++) __builtin_prefetch(next.keys[j] + d * LANES, 0, 2);
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++) {
      const auto spread = S::spread(queries + r * width + d);
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; j++) sums[r][j] = S::dot(spread, keys[j], sums[r][j]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) store(scores[r] + j * LANES, sums[r][j]);
}

template <int ROWS, class Element>
void multiply_keys(int64_t vectors, const Element* queries, const Tile<Element>& tile, const Tile<Element>& next, int64_t width,
                   float (*scores)[TILE]) {
  switch (vectors) {
    case 1: return multiply_keys<ROWS, 1>(queries, tile, next, width, scores);
    case 2: return multiply_keys<ROWS, 2>(queries, tile, next, width, scores);
    case 3: return multiply_keys<ROWS, 3>(queries, tile, next, width, scores);
    case 4: return multiply_keys<ROWS, 4>(queries, tile, next, width, scores);
  }
}

// outputs[r] = outputs[r] * factors[r] + probabilities[r] V, for 16 * VECTORS dimensions and the first `count` keys.
template <int ROWS, int VECTORS, class Element>
void multiply_values(const Element* probabilities, const Tile<Element>& tile, const Tile<Element>& next, int64_t dimension,
                     int64_t count, int64_t width, const float* factors, float* outputs) {
  using S = Step<Element>;
  Floats sums[ROWS][VECTORS];
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) sums[r][j] = load(outputs + r * width + dimension + j * LANES) * factors[r];
  for (int64_t key = 0; key < count; key += S::WIDTH) {
    const int64_t place = key % LANES * width + dimension * S::WIDTH;
    const Element* from = tile.values[key / LANES] + place;
    typename S::Packed values[VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++)
      __builtin_prefetch(next.values[key / LANES] + place + j * LANES * S::WIDTH, 0, 2);
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) values[j] = S::load_packed(from + j * LANES * S::WIDTH);
    if (S::WIDTH == 2 && key + 1 == count)  // the second key of the pair does not exist: 0 * NaN would be NaN
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; j++) values[j] = S::first_only(values[j]);
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++) {
      const auto spread = S::spread(probabilities + r * TILE + key);
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; j++) sums[r][j] = S::dot(spread, values[j], sums[r][j]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) store(outputs + r * width + dimension + j * LANES, sums[r][j]);
}

// Which of a tile's keys a row sees: [first, last]. All of them, or the row is not `whole`.
struct Seen {
  int32_t first, last;
  Seen(int64_t position, int64_t start, int64_t window) {
    const int64_t oldest = window > 0 ? position - window + 1 - start : 0;
    first = int32_t(std::max<int64_t>(std::min<int64_t>(oldest, TILE), 0));
    last = int32_t(std::min<int64_t>(position - start, TILE));
  }
  bool whole() const { return first == 0 && last >= TILE - 1; }
  Ints operator()(int j) const {  // of 16 keys, those that are seen
    const Ints key = Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + j * LANES;
    return (key <= last) & (key >= first);
  }
};

// Gemma 2's cap: what a score s becomes is tanh(s scale / cap) cap. Left out is the last factor.
template <int ROWS>
void cap(float (*scores)[TILE], int64_t vectors, float factor) {
  for (int r = 0; r < ROWS; r++)
    for (int64_t j = 0; j < vectors * LANES; j += LANES) store(scores[r] + j, tanh(load(scores[r] + j) * factor));
}

// The scores of some rows and a tile's first 16 * vectors keys become probabilities, and the rows' running maxima and sums
// move on. Scores times `power_of_two` are powers of two, exp(s) = 2^(s log2 e), for the processor's numbers are. MASKED:
// some row does not see all these keys.
template <int ROWS, bool MASKED, class Element>
void softmax(const AttentionArguments<Element>& a, float (*scores)[TILE], int64_t vectors, int64_t start, int64_t row,
             AttentionScratch<Element>& scratch) {
  constexpr float LOG2_E = 1.44269504f;
  if (!MASKED) vectors = TILE / LANES;  // so it is, and now the compiler knows
  if (a.softcap > 0) cap<ROWS>(scores, vectors, a.scale / a.softcap);
  const float power_of_two = (a.softcap > 0 ? a.softcap : a.scale) * LOG2_E;
  float before[LANES] = {}, now[LANES] = {};
  for (int r = 0; r < ROWS; r++) {
    const Seen seen(scratch.positions[row + r], start, a.window);
    Floats best = broadcast(-INFINITE);
    for (int j = 0; j < vectors; j++) {
      Floats score = load(scores[r] + j * LANES);
      if (MASKED) store(scores[r] + j * LANES, score = seen(j) ? score : broadcast(-INFINITE));
      best = max(best, score);
    }
    const float maximum = std::max(scratch.maxima[row + r], horizontal_max(best) * power_of_two);
    now[r] = maximum == -INFINITE ? 0.0f : maximum;  // nothing seen yet: any number will do
    before[r] = scratch.maxima[row + r];
    scratch.maxima[row + r] = maximum;
  }
  float factors[LANES];
  store(factors, exp2<float>(load(before) - load(now)));
  for (int r = 0; r < ROWS; r++) {
    const Seen seen(scratch.positions[row + r], start, a.window);
    Floats sum{};
    for (int j = 0; j < vectors; j++) {
      const Floats score = load(scores[r] + j * LANES);
      // Rounded as the maximum was, so that it is exactly 2^0: of huge scores the rounding alone is beyond any exponent.
      Floats probability = exp2<Element>(score * power_of_two - now[r]);
      if (MASKED) probability = seen(j) ? probability : Floats{};
      sum += probability;
      store(scratch.probabilities.data() + r * TILE + j * LANES, probability);
    }
    scratch.sums[row + r] = scratch.sums[row + r] * factors[r] + sum;
    scratch.factors[row + r] = factors[r];
  }
}

// ROWS rows against one tile: those of its keys that the last row, whose position is the highest, may see.
template <int ROWS, class Element>
void attend_rows(const AttentionArguments<Element>& a, const Tile<Element>& tile, const Tile<Element>& next, int64_t row,
                  AttentionScratch<Element>& scratch) {
  const int64_t width = a.layout.width;
  const int64_t count = std::min<int64_t>(TILE, scratch.positions[row + ROWS - 1] - tile.start + 1);
  if (count <= 0) return;
  const int64_t vectors = (count + LANES - 1) / LANES;
  float scores[ROWS][TILE];
  multiply_keys<ROWS>(vectors, scratch.queries.data() + row * width, tile, next, width, scores);
  // Rows stand in the order of their positions, so the first and the last of them speak for all.
  const auto whole = [&](int64_t r) { return Seen(scratch.positions[r], tile.start, a.window).whole(); };
  if (whole(row) && whole(row + ROWS - 1)) softmax<ROWS, false>(a, scores, vectors, tile.start, row, scratch);
  else softmax<ROWS, true>(a, scores, vectors, tile.start, row, scratch);
  float* outputs = scratch.outputs.data() + row * width;
  const float* factors = scratch.factors.data() + row;
  const Element* probabilities = scratch.probabilities.data();
  int64_t dimension = 0;
  for (; dimension + 4 * LANES <= width; dimension += 4 * LANES)
    multiply_values<ROWS, 4>(probabilities, tile, next, dimension, count, width, factors, outputs);
  for (; dimension < width; dimension += LANES)
    multiply_values<ROWS, 1>(probabilities, tile, next, dimension, count, width, factors, outputs);
}

template <class Element>
void attend_rows(int rows, const AttentionArguments<Element>& a, const Tile<Element>& tile, const Tile<Element>& next,
                  int64_t row, AttentionScratch<Element>& scratch) {
  switch (rows) {
    case 1: return attend_rows<1>(a, tile, next, row, scratch);
    case 2: return attend_rows<2>(a, tile, next, row, scratch);
    case 3: return attend_rows<3>(a, tile, next, row, scratch);
    case 4: return attend_rows<4>(a, tile, next, row, scratch);
    case 5: return attend_rows<5>(a, tile, next, row, scratch);
    case 6: return attend_rows<6>(a, tile, next, row, scratch);
  }
}

// The position of the first key that a task looks at, cut to a tile, and the one after its last.
template <class Element>
std::pair<int64_t, int64_t> keys_of(const AttentionArguments<Element>& a, const AttentionTask& task) {
  const int64_t first = task.keys - task.tokens;  // position of its first query
  const int64_t oldest = a.window > 0 ? std::max<int64_t>(0, first - a.window + 1) : 0;
  return {oldest / TILE * TILE, task.keys};
}

// The rows of a task: for each of its key heads in turn, every query of every query head that shares it. They are computed
// in groups of up to six, as even as can be, and a group has one key head.
template <class Element>
struct TaskRows {
  const AttentionArguments<Element>& a;
  const AttentionTask& task;
  int64_t of_head = task.tokens * a.group(), all = task.heads * of_head;
  int64_t groups = (of_head + GROUP_ROWS - 1) / GROUP_ROWS;  // of one head

  int64_t group_start(int64_t head, int64_t index) const { return head * of_head + index * of_head / groups; }

  // body(row, token, query head) for each row in order.
  template <class Body>
  void for_each(Body body) const {
    int64_t row = 0;
    for (int64_t head = task.first_head; head < task.first_head + task.heads; head++)
      for (int64_t token = task.first_token; token < task.first_token + task.tokens; token++)
        for (int64_t member = 0; member < a.group(); member++) body(row++, token, head * a.group() + member);
  }
};

// Makes room, and lays the queries down side by side, padded with zeros.
template <class Element>
void begin_task(const AttentionArguments<Element>& a, const TaskRows<Element>& rows, AttentionScratch<Element>& scratch) {
  const int64_t width = a.layout.width;
  scratch.queries.resize(rows.all * width);
  scratch.outputs.assign(rows.all * width, 0.0f);
  scratch.probabilities.resize(GROUP_ROWS * TILE);
  scratch.maxima.assign(rows.all, -INFINITE);
  scratch.sums.assign(rows.all, Floats{});
  scratch.factors.resize(rows.all);
  scratch.positions.resize(rows.all);
  if (a.layout.block_size < LANES) {
    scratch.keys.resize(TILE * width);
    scratch.values.resize(TILE * width);
  }
  const int64_t first_position = rows.task.keys - rows.task.tokens - rows.task.first_token;
  rows.for_each([&](int64_t row, int64_t token, int64_t query_head) {
    scratch.positions[row] = first_position + token;
    Element* to = scratch.queries.data() + row * width;
    std::memcpy(to, a.query + token * a.query_stride + query_head * a.head_dim, sizeof(Element) * a.head_dim);
    std::fill(to + a.head_dim, to + width, Element(0));
  });
}

// One task, from queries to outputs. `next_task` is what this thread does afterwards, or null.
template <class Element>
void attend(const AttentionArguments<Element>& a, const AttentionTask& task, const AttentionTask* next_task,
            AttentionScratch<Element>& scratch) {
  const TaskRows<Element> rows{a, task};
  const auto [first_key, end] = keys_of(a, task);
  begin_task(a, rows, scratch);
  if (task.writes)
    for (int64_t token = task.first_token; token < task.first_token + task.tokens; token++)
      write_token(a, token, task.first_head, task.heads);
  const auto tile_of = [&](int64_t head, int64_t start) {
    return find_tile(a, task.sequence, task.first_head + head, start, end, scratch);
  };
  // Short blocks are copied together in one place, so their next tile cannot be looked at before this one is done.
  const bool looks_ahead = a.layout.block_size >= LANES;
  Tile<Element> tile = tile_of(0, first_key);
  for (int64_t start = first_key; start < end; start += TILE)
    for (int64_t head = 0; head < task.heads; head++) {
      const bool is_last_head = head + 1 == task.heads, is_last = is_last_head && start + TILE >= end;
      const auto find_next = [&] { return is_last_head ? tile_of(0, start + TILE) : tile_of(head + 1, start); };
      Tile<Element> next = tile;
      if (looks_ahead && !is_last) {
        next = find_next();
      } else if (looks_ahead && next_task) {
        const auto [next_start, next_end] = keys_of(a, *next_task);
        next = find_tile(a, next_task->sequence, next_task->first_head, next_start, next_end, scratch);
      }
      for (int64_t index = 0; index < rows.groups; index++) {  // one group asks for the next tile, the others find it
        const int64_t row = rows.group_start(head, index);
        attend_rows(int(rows.group_start(head, index + 1) - row), a, tile, index == 0 ? next : tile, row, scratch);
      }
      tile = looks_ahead || is_last ? next : find_next();
    }
  rows.for_each([&](int64_t row, int64_t token, int64_t query_head) {
    Element* to = a.output + (token * a.num_heads + query_head) * a.head_dim;
    const float factor = 1.0f / horizontal_sum(scratch.sums[row]);
    for (int64_t d = 0; d < a.head_dim; d += LANES)
      store_some(to + d, load(scratch.outputs.data() + row * a.layout.width + d) * factor,
                 int(std::min<int64_t>(LANES, a.head_dim - d)));
  });
}

}  // namespace mini_vllm
