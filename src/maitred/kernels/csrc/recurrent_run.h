// A unit of the recurrence, for each recurrent_<isa>.cpp, whose vectors V are vector_math.h's. A column of a matrix is
// computed by itself, key by key in ascending order, so its bits depend on the request's tokens alone.
#pragma once

#include <cmath>
#include <cstring>

#include "recurrent.h"
#include "vector_math.h"

namespace maitred {
namespace {

template <class V>
inline V load_of(const float* from, int left) {
  return left >= V::width ? V::load(from) : V::load_part(from, left);
}

template <class V>
inline void store_of(float* to, V a, int left) {
  left >= V::width ? V::store(to, a) : V::store_part(to, a, left);
}

template <class V>
float sum_of_squares(const float* x, int count) {
  V sum = V::set1(0.0f);
  for (int i = 0; i < count; i += V::width) {
    const V value = load_of<V>(x + i, count - i);
    sum = V::fma(value, value, sum);
  }
  return V::sum(sum);
}

template <class V>
void scale(float* x, int count, float factor) {
  for (int i = 0; i < count; i += V::width)
    store_of<V>(x + i, load_of<V>(x + i, count - i) * V::set1(factor), count - i);
}

template <class V>
void open_gate(const float* gate, float* values, int count) {
  const V one = V::set1(1.0f), zero = V::set1(0.0f);
  for (int i = 0; i < count; i += V::width) {
    const V opened = load_of<V>(values + i, count - i) / (one + exp_of(zero - load_of<V>(gate + i, count - i)));
    store_of<V>(values + i, opened, count - i);
  }
}

// Vectors of columns that go through a strip together, as registers have room for their sums.
template <class V>
constexpr int kVectors = V::width == 1 ? 16 : 4;

// One token through columns of a strip; `seen` is S'k on entry, and with kMore that of the next token's key when it
// returns.
template <class V, bool kMore>
inline void pass_strip(float* matrix, int key_dim, const float* q, const float* k, const float* next, const float* v,
                       float beta, float decay, V* seen, float* out) {
  constexpr int kParts = kVectors<V>;
  V change[kParts], sums[kParts];
  for (int j = 0; j < kParts; ++j) {
    change[j] = V::set1(beta) * (V::load(v + j * V::width) - V::set1(decay) * seen[j]);
    sums[j] = seen[j] = V::set1(0.0f);
  }
  for (int i = 0; i < key_dim; ++i, matrix += kStateStrip) {
    const V key = V::set1(k[i]), query = V::set1(q[i]), ahead = V::set1(kMore ? next[i] : 0.0f);
    for (int j = 0; j < kParts; ++j) {
      const V value = V::fma(key, change[j], V::set1(decay) * V::load(matrix + j * V::width));
      V::store(matrix + j * V::width, value);
      sums[j] = V::fma(query, value, sums[j]);
      if (kMore) seen[j] = V::fma(ahead, value, seen[j]);
    }
  }
  for (int j = 0; j < kParts; ++j) V::store(out + j * V::width, sums[j]);
}

template <class V>
struct UnitRun {
  const RecurrentUnit& unit;
  const RecurrentOp& op = *unit.op;
  const int group = op.group();
  const int64_t channels = op.channels(), padded = op.padded_value();
  float* const history = unit.state;
  float* const matrices = history + (op.conv_width - 1) * channels + unit.key_head * group * op.matrix_floats();
  float* const pending = history + (op.conv_width - 1) * channels + op.value_heads * op.matrix_floats();
  const int64_t query_channel = int64_t{unit.key_head} * op.key_dim;
  const int64_t key_channel = query_channel + int64_t{op.key_heads} * op.key_dim;
  // of kRecurrentRun tokens
  float* const queries = unit.scratch;
  float* const keys = queries + kRecurrentRun * op.key_dim;
  float* const values = keys + kRecurrentRun * op.key_dim;
  float* const outputs = values + kRecurrentRun * group * padded;
  float* const gates = outputs + kRecurrentRun * group * padded;  // [token][head] beta, decay
  float* const trial = gates + kRecurrentRun * group * 2;         // matrices that drafts change

  int64_t values_of(int head) const { return int64_t{op.head_of(unit.key_head, head)} * op.value_dim; }
  int64_t value_channel(int head) const { return 2 * int64_t{op.key_heads} * op.key_dim + values_of(head); }

  // Tokens are counted from the first one that the slot has not consumed; before 0 are those of its history.
  const float* channels_of(int token) const {
    if (token < 0) return history + (op.conv_width - 1 + token) * channels;
    if (token < unit.num_replayed) return pending + token * op.pending_width();
    return unit.inputs + (token - unit.num_replayed) * unit.input_stride;
  }
  const float* gates_of(int token) const {
    const bool replayed = token < unit.num_replayed;
    return channels_of(token) + channels + (replayed ? 0 : int64_t{op.value_heads} * op.value_dim);
  }

  void run() const {
    if (unit.fresh) {
      for (int i = 0; i < op.conv_width - 1; ++i)
        each_range([&](int64_t first, int count) {
          std::memset(history + i * channels + first, 0, static_cast<size_t>(count) * sizeof(float));
        });
      std::memset(matrices, 0, static_cast<size_t>(group * op.matrix_floats()) * sizeof(float));
    }
    const int certain = unit.num_replayed + unit.num_certain, end = unit.num_replayed + unit.num_tokens;
    int done = 0;
    for (const StateSave* save = unit.saves; save != unit.saves_end; ++save) {
      run_tokens(done, unit.num_replayed + save->num_tokens, matrices);
      done = unit.num_replayed + save->num_tokens;
      float* const to = unit.slots->slot(op.layer, save->slot);
      keep_history(done, to);
      std::memcpy(to + (matrices - history), matrices, static_cast<size_t>(group * op.matrix_floats()) * sizeof(float));
    }
    run_tokens(done, certain, matrices);
    if (certain < end) {
      std::memcpy(trial, matrices, static_cast<size_t>(group * op.matrix_floats()) * sizeof(float));
      run_tokens(certain, end, trial);
    }
    keep_history(certain, history);
    for (int token = certain; token < end; ++token) {
      float* const to = pending + (token - certain) * op.pending_width();
      keep(channels_of(token), to);
      for (int i = 0; i < 2 * group; ++i) {
        const int gate = i / group * op.value_heads + op.head_of(unit.key_head, i % group);
        to[channels + gate] = gates_of(token)[gate];
      }
    }
  }

  template <class Body>
  void each_range(const Body& body) const {
    body(query_channel, op.key_dim);
    body(key_channel, op.key_dim);
    for (int head = 0; head < group; ++head) body(value_channel(head), op.value_dim);
  }

  // The convolution's inputs before the token, in ascending order: they may be moved within the slot.
  void keep_history(int token, float* to) const {
    for (int i = 0; i < op.conv_width - 1; ++i) keep(channels_of(token - (op.conv_width - 1) + i), to + i * channels);
  }

  void keep(const float* from, float* to) const {
    if (from == to) return;
    each_range([&](int64_t first, int count) {
      std::memcpy(to + first, from + first, static_cast<size_t>(count) * sizeof(float));
    });
  }

  void run_tokens(int first, int end, float* to) const {
    for (; first < end; first += kRecurrentRun) {
      const int count = end - first < kRecurrentRun ? end - first : kRecurrentRun;
      for (int t = 0; t < count; ++t) prepare(first + t, t);
      for (int head = 0; head < group; ++head)
        for (int64_t column = 0; column < op.value_dim; column += kVectors<V> * V::width) {
          float* const strip = to + head * op.matrix_floats() + column / kStateStrip * kStateStrip * op.key_dim;
          run_strip(strip + column % kStateStrip, head, head * padded + column, count);
        }
      for (int t = 0; t < count; ++t)
        if (first + t >= unit.num_replayed) finish(first + t - unit.num_replayed, t);
    }
  }

  void prepare(int token, int t) const {
    float* const q = queries + t * op.key_dim;
    float* const k = keys + t * op.key_dim;
    convolve(token, query_channel, op.key_dim, q);
    convolve(token, key_channel, op.key_dim, k);
    scale<V>(q, op.key_dim,
             1.0f / (V::root(sum_of_squares<V>(q, op.key_dim) + 1e-6f) * V::root(static_cast<float>(op.key_dim))));
    scale<V>(k, op.key_dim, 1.0f / V::root(sum_of_squares<V>(k, op.key_dim) + 1e-6f));
    for (int head = 0; head < group; ++head) {
      float* const v = values + (t * group + head) * padded;
      convolve(token, value_channel(head), op.value_dim, v);
      for (int64_t i = op.value_dim; i < padded; ++i) v[i] = 0.0f;
      const int own = op.head_of(unit.key_head, head);
      const float *const b = gates_of(token) + own, step = b[op.value_heads] + op.step_bias[own];
      const float softplus = step > 20.0f ? step : std::log1p(std::exp(step));
      gates[(t * group + head) * 2] = 1.0f / (1.0f + std::exp(-*b));
      gates[(t * group + head) * 2 + 1] = std::exp(op.rate[own] * softplus);
    }
  }

  void convolve(int token, int64_t first, int count, float* out) const {
    const float* taps[kMostTaps];
    for (int w = 0; w < op.conv_width; ++w) taps[w] = channels_of(token - (op.conv_width - 1) + w) + first;
    for (int i = 0; i < count; i += V::width) {
      V sum = V::set1(0.0f);
      for (int w = 0; w < op.conv_width; ++w)
        sum =
            V::fma(load_of<V>(op.conv + w * channels + first + i, count - i), load_of<V>(taps[w] + i, count - i), sum);
      store_of<V>(out + i, silu(sum), count - i);
    }
  }

  void run_strip(float* matrix, int head, int64_t column, int count) const {
    constexpr int kParts = kVectors<V>;
    V seen[kParts];
    for (int j = 0; j < kParts; ++j) seen[j] = V::set1(0.0f);
    for (int i = 0; i < op.key_dim; ++i)
      for (int j = 0; j < kParts; ++j)
        seen[j] = V::fma(V::set1(keys[i]), V::load(matrix + i * kStateStrip + j * V::width), seen[j]);
    for (int t = 0; t < count; ++t) {
      const float *const q = queries + t * op.key_dim, *const k = keys + t * op.key_dim;
      const float* const gate = gates + (t * group + head) * 2;
      const int64_t at = int64_t{t} * group * padded + column;
      if (t + 1 < count)
        pass_strip<V, true>(matrix, op.key_dim, q, k, k + op.key_dim, values + at, gate[0], gate[1], seen,
                            outputs + at);
      else
        pass_strip<V, false>(matrix, op.key_dim, q, k, k, values + at, gate[0], gate[1], seen, outputs + at);
    }
  }

  void finish(int token, int t) const {
    for (int head = 0; head < group; ++head) {
      const float* const o = outputs + (t * group + head) * padded;
      const float mean = sum_of_squares<V>(o, op.value_dim) / static_cast<float>(op.value_dim);
      const V inverse = V::set1(1.0f / V::root(mean + op.eps));
      const int64_t at = values_of(head);
      const float* const z = unit.inputs + token * unit.input_stride + channels + at;
      float* const to = unit.target + token * unit.target_stride + at;
      for (int i = 0; i < op.value_dim; i += V::width) {
        const int left = op.value_dim - i;
        store_of<V>(to + i,
                    load_of<V>(o + i, left) * inverse * load_of<V>(op.norm + i, left) * silu(load_of<V>(z + i, left)),
                    left);
      }
    }
  }
};

template <class V>
constexpr RecurrentKernels kRecurrent{[](const RecurrentUnit& unit) { UnitRun<V>{unit}.run(); }, &open_gate<V>};

}  // namespace
}  // namespace maitred
