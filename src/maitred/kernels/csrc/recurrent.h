// The gated delta rule behind a short convolution (Gated DeltaNet, arXiv:2412.06464), over states that requests keep in
// slots. Of each token and value head, with q and k of length 1:
//   S = decay * S;  S += k (beta * (v - S'k))';  output = S'q, normalised, times silu(z)
//
// A slot holds of each layer the convolution's last inputs [conv_width - 1][channels]; a matrix of each value head,
// [strips of 64 columns][key_dim][64], padded with zeros; and the inputs of the last step's drafts, [most drafts]
// [channels and two numbers a value head], of which the request's next step consumes those that were right.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "program_ops.h"

namespace maitred {

constexpr int kStateStrip = 64;
constexpr int kMostTaps = 64;  // of a convolution

struct RecurrentOp {
  int key_heads, value_heads, key_dim, value_dim, conv_width;
  bool tiled;              // value heads take key heads in turn
  const float* conv;       // [conv_width][channels], the newest token's last
  const float* step_bias;  // [value_heads]
  const float* rate;       // [value_heads] decay is exp(rate * step)
  const float* norm;       // [value_dim]
  float eps;
  int layer;  // among recurrent ones

  int group() const { return value_heads / key_heads; }
  // The i-th of a key head's value heads.
  int head_of(int key_head, int i) const { return tiled ? i * key_heads + key_head : key_head * group() + i; }
  int64_t channels() const { return 2 * int64_t{key_heads} * key_dim + int64_t{value_heads} * value_dim; }
  int64_t input_width() const { return channels() + int64_t{value_heads} * (value_dim + 2); }
  int64_t pending_width() const { return channels() + 2 * value_heads; }
  int64_t padded_value() const { return (value_dim + kStateStrip - 1) / kStateStrip * kStateStrip; }
  int64_t matrix_floats() const { return padded_value() * key_dim; }  // of one value head
  int64_t state_floats(int num_pending) const {
    return (conv_width - 1) * channels() + value_heads * matrix_floats() + num_pending * pending_width();
  }
  int64_t scratch_floats() const;  // of a thread
};

// Slots of all recurrent layers' states. Ranks share them.
struct StateSlots {
  struct Layer {
    float* begin;
    int64_t stride;  // floats of a slot
  };
  std::vector<Layer> layers;
  int num_slots = 0;
  int num_pending = 0;  // tokens of a row that are not certain, at most

  float* slot(int layer, int index) const {
    return layers[static_cast<size_t>(layer)].begin + index * layers[static_cast<size_t>(layer)].stride;
  }
  // Throws std::invalid_argument for a step that they cannot take.
  void check(const StepRows& rows) const;
  // (source, target) each, in this order. Throws std::invalid_argument for a slot that is not there.
  void copy(const std::vector<std::pair<int, int>>& pairs, ThreadPool& threads) const;
};

constexpr int kRecurrentRun = 16;  // tokens that go through a strip one behind the other

// The value heads of one key head, of one request's tokens in a step.
struct RecurrentUnit {
  const RecurrentOp* op;
  float* state;         // the layer's in the slot
  const float* inputs;  // of the first token: channels, z, then b and a of each value head
  int64_t input_stride;
  float* target;
  int64_t target_stride;
  int num_tokens;
  int num_certain;   // of them, the first so many; the others are drafts
  int num_replayed;  // of the slot's drafts, the first so many come before the tokens
  bool fresh;        // the state begins here
  int key_head;
  float* scratch;
  const StateSlots* slots;
  const StateSave *saves, *saves_end;  // of the row
};

struct RecurrentKernels {
  void (*run)(const RecurrentUnit& unit);
  void (*open)(const float* gate, float* values, int count);  // values *= sigmoid(gate)
};
const RecurrentKernels& recurrent_kernels(Isa isa);
const RecurrentKernels& recurrent_kernels_plain();
const RecurrentKernels& recurrent_kernels_avx2();
const RecurrentKernels& recurrent_kernels_avx512();
const RecurrentKernels& recurrent_kernels_neon();

void add_recurrent(Program& program, const RecurrentOp& op, const StateSlots& slots, const Rows& source,
                   const Rows& target);

// values[t] *= sigmoid(gate[t])
void add_open(Program& program, const Rows& gate, const Rows& values);

}  // namespace maitred
