// Routed experts: the choice of each row's experts from its router's logits, and their sum.
//
// Rows are gathered by expert, so that an expert's weights are read once for all rows that have it; a row's experts are
// then added up in ascending order of their numbers. So a row's bits depend on no other row.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "linear.h"
#include "program.h"
#include "program_ops.h"

namespace maitred {

// model/spec.py says what each rule is.
enum class Scoring : uint8_t { softmax, softmax_of_chosen, sigmoid };

struct RouteOp {
  Scoring scoring;
  int num_experts, num_active;  // of a layer, of a row
  int num_groups, num_active_groups, best_of_group;
  bool normalized;
  float scale;
  const float* correction;     // [num_experts], null: none
  const float* expert_scales;  // the same
};

// Throws std::invalid_argument for numbers that do not fit each other.
void check(const RouteOp& op);

// One row: experts [num_active] in ascending order, and their weights. logits [num_experts] may hold anything;
// `scratch` has room for three times as many values.
void route_row(const RouteOp& op, const float* logits, float* scratch, int32_t* experts, float* weights);

// Packed matrices of one shape, one behind the other.
struct PackedExperts {
  LinearShape shape;
  const uint8_t* data;
  PackedLinear operator[](int expert) const { return {shape, data + expert * packed_bytes(shape)}; }
};

struct ExpertsOp {
  PackedExperts gate_up, down;
  int first_inner, first_out;  // channels that this rank's weights begin with
  int width;                   // of an expert, all ranks' channels
  LinearOut gated;             // act, and what it takes; rows are not looked at
  Ending ending;               // store or add
  float alpha;                 // of the ending
  bool few;
};

// What all routed layers of a program share: the rows' experts, and room for the rows of a pass.
class ExpertBuffers {
 public:
  static constexpr int kTokens = 512;  // of a pass

  // The largest of all layers: experts, experts of a row, width, width of the output; gate_up and down of each.
  ExpertBuffers(Program& program, int num_experts, int num_active, int width, int hidden,
                const std::vector<LinearShape>& shapes);

  // Those of the layer that was routed last.
  int32_t* experts(int64_t row) const { return experts_ + row * num_active_; }
  float* weights(int64_t row) const { return weights_ + row * num_active_; }
  float* scratch(const Worker& worker) const { return scratch_ + int64_t{worker.index} * 3 * num_experts_; }
  void check(const RouteOp& op) const;
  void check(const ExpertsOp& op, int num_active, int64_t hidden) const;

  // target's rows of those that the operands hold, in passes. Called by all workers with one fresh counter of the
  // rank's; they have met when it returns.
  void run(const Program& program, const ExpertsOp& op, int num_active, const OperandBuffers& operands, int num_rows,
           const Rows& target, int64_t* tokens_of_expert, WorkCounter& counter, const Worker& worker);

 private:
  struct Pass {  // of rows [first, first + count)
    int first, count;
    int num_pairs = 0;         // of a row and an expert
    std::vector<int> begins;   // by expert: its first pair; one more for the end
    std::vector<int> row_of;   // by pair
    std::vector<int> pair_of;  // by row and place among its experts
    std::vector<int> touched;  // experts that have rows
  };
  void plan(int first, int count, int num_active, int64_t* tokens_of_expert);
  Operand gathered(const LinearShape& shape, int first) const;
  void gather(const Operand& from, int64_t row_bytes, int num_sums, WorkCounter& counter);
  void multiply(const LinearKernels& kernels, const PackedExperts& weights, const LinearOut& out, int channel,
                WorkCounter* counters, const Worker& worker) const;
  void add_up(const ExpertsOp& op, int num_active, const Rows& target, const Worker& worker) const;

  int num_experts_, num_active_;
  int64_t width_, hidden_, row_bytes_, num_sums_, inner_stride_, out_stride_;
  int32_t* experts_;
  float *weights_, *scratch_;
  float *inner_, *outputs_;  // of pairs
  uint8_t* rows_;            // of pairs, made ready; each rank its own
  float* scales_;
  int32_t* sums_;
  Pass pass_;
  std::unique_ptr<WorkCounter[]> counters_;  // of the pass
};

void add_route(Program& program, const RouteOp& op, const ExpertBuffers& buffers, const Rows& logits, bool few);

// tokens_of_expert [num_experts]: counts up the rows that each had; may be null.
void add_experts(Program& program, const ExpertsOp& op, int num_active, ExpertBuffers& buffers,
                 const OperandBuffers& operands, const Rows& target, int64_t* tokens_of_expert,
                 const std::string& name);

// values[t] *= sigmoid(logits[t][column])
void add_sigmoid_scale(Program& program, const Rows& values, const Rows& logits, int column, bool few);

}  // namespace maitred
