// The operations a program is made of, each over buffers of the program; model/program.py says what they compute.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "adapters.h"
#include "attention.h"
#include "first_touch.h"
#include "linear.h"
#include "program.h"
#include "qkv.h"

namespace maitred {

// Up to this many rows each thread prepares a copy of its own, instead of meeting the others for it.
constexpr int kOwnRows = 2;

// Rows that a thread multiplies with a head's matrix at once.
constexpr int kHeadRows = 64;

// Prepared rows that a linear reads: one buffer for all linears of a program, and a small one for each thread.
class OperandBuffers {
 public:
  // shapes: of all the linears that will read them. by_head: there are linears by head among them.
  OperandBuffers(Program& program, const std::vector<LinearShape>& shapes, bool by_head);
  Operand of(const Worker& worker, const LinearShape& shape, int num_rows) const;
  // Room for kHeadRows of this thread alone, where there are linears by head.
  Operand own(const Worker& worker, const LinearShape& shape) const;

 private:
  struct Room {
    uint8_t* rows;
    float* scales;
    int32_t* sums;
  };
  Room shared_;
  std::vector<Room> own_;  // of each thread
};

struct Rows {
  float* values;
  int64_t width;
  int64_t stride;  // floats from one row to the next

  float* row(int64_t index) const { return values + index * stride; }
  // Throws std::invalid_argument for columns that are not there.
  Rows columns(int64_t first, int64_t count) const;
};

// The program's adapters and the linear's number among theirs; null: they add nothing to it.
struct AdaptedLinear {
  Adapters* adapters = nullptr;
  int linear = 0;
  int first = 0;  // tile of it that this rank's weights begin with
  bool active() const { return adapters != nullptr && adapters->active(linear); }
};

// Memory of the pool that the program's steps will write.
void add_first_touch(Program& program, FirstTouch& first_touch);

// What only other ranks compute: this one meets them after it.
void add_idle(Program& program, const AdaptedLinear& adapted, const std::string& name);

// weights: embeddings of the tokens from `first` on; those of others are written by the ranks that have them. most: ids
// are token + type * most, where tokens have types; 0: they have none.
void add_embed(Program& program, const PackedLinear& weights, int first, int most, float scale, const Rows& target);

// target += the row of weights for each token: that of its type, or, where `most` is 0, of its position + offset.
void add_embed_more(Program& program, const PackedLinear& weights, int offset, int most, const Rows& target);

// Layer norm of each row, in place.
void add_layer_norm(Program& program, const Rows& rows, const float* weight, const float* bias, float eps, bool few);

// The rows of source whose logits are wanted, one below the other.
void add_take(Program& program, const Rows& source, const Rows& target);

// Rows that a linear writes as the next one reads them, so that nothing is left to prepare: bf16 in the place of
// floats, but for steps in which adapters read those for `reader`.
struct HalfRows {
  Rows rows;
  size_t next;  // operation of the program that may take them
  bool few, taken = false;
  AdaptedLinear reader;
  bool in_use() const { return taken && !reader.active(); }
  Operand operand() const { return {DType::bf16, rows.values, rows.stride * 4, nullptr, nullptr}; }
};

// few: as many rows as logits are wanted; and if `taken`, those of source that belong to them, else its first ones.
// norm_weight null: no norm.
void add_prepare(Program& program, const OperandBuffers& operands, const Rows& source, const LinearShape& shape,
                 const float* norm_weight, float eps, bool few, bool taken, bool rotated, const int32_t* order,
                 const AdaptedLinear& adapted, const std::shared_ptr<HalfRows>& half);

// few: as many rows as logits are wanted. from, to: half rows that it may read and write, null where there are none.
void add_linear(Program& program, const OperandBuffers& operands, const PackedLinear& weights, const LinearOut& out,
                bool few, const AdaptedLinear& adapted, const std::string& name, const std::shared_ptr<HalfRows>& from,
                const std::shared_ptr<HalfRows>& to);

// A matrix for each head, one behind the other: of this rank, which has `count` heads from `first` on.
struct HeadLinearOp {
  LinearShape shape;
  const uint8_t* data;
  int first, count;
  int copied;  // columns of a head behind those that are multiplied; they stand before its outputs
};

// target's head = copied columns, then matrix x the columns before them, in each row; rows are as in add_prepare.
void add_head_linear(Program& program, const OperandBuffers& operands, const HeadLinearOp& op, const Rows& source,
                     const Rows& target, bool few, bool taken, const std::string& name);

// target = act(gate) * up
void add_gate(Program& program, const Rows& gate, const Rows& up, const Rows& target, GateAct act, bool few);

// The next two do the same with so many heads side by side, of part's or source's width each.
void add_norm_add(Program& program, const Rows& part, const Rows& target, const float* weight, float eps, float scale,
                  bool few, int num_heads = 1);

// target = source, normed if there is a weight; both of source's width. few: as many rows as logits are wanted.
void add_norm(Program& program, const Rows& source, const Rows& target, const float* weight, float eps, bool few,
              int num_heads = 1);

// rows *= scale
void add_scale(Program& program, const Rows& rows, const float* scale, bool few);

// table: room for max_tokens x 2 x num_pairs values.
void add_rope_table(Program& program, const RopeOp& rope, float* table);

// layer: of the model, in whose order they tell that they have written.
void add_qkv(Program& program, int layer, const QKVOp& op, const Rows& source, const float* rope_table,
             const float* query_table, uint8_t* queries);

// plan: of the op's window, built anew for each step by a planner of the program.
void add_attention(Program& program, const AttentionOp& op, AttentionPlan& plan, const AttentionScratch& scratch,
                   const uint8_t* queries, const Rows& target);

}  // namespace maitred
