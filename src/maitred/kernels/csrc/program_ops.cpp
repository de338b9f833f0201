#include "program_ops.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "elementwise.h"

namespace maitred {
namespace {

// Of an operation that reads weights: its own, and that of what adapters add. Ranks that have none of the weights have
// as many, so that all count the next operations alike.
constexpr int kWeightCounters = 2;

int rows_of(const StepRows& step, bool few) { return few ? step.num_logits : step.num_tokens; }

}  // namespace

Rows Rows::columns(int64_t first, int64_t count) const {
  if (first < 0 || count < 1 || first + count > width)
    throw std::invalid_argument("columns " + std::to_string(first) + " to " + std::to_string(first + count - 1) +
                                " of rows of " + std::to_string(width) + " values");
  return Rows{values + first, count, stride};
}

OperandBuffers::OperandBuffers(Program& program, const std::vector<LinearShape>& shapes, bool by_head) {
  int64_t row_bytes = 64, num_sums = 1;
  for (const LinearShape& shape : shapes) {
    row_bytes = std::max(row_bytes, operand_row_bytes(operand_dtype(shape.dtype), shape.k));
    num_sums = std::max(num_sums, int64_t{sums_per_row(shape)});
  }
  const auto room = [&](int64_t num_rows, void* (Program::*add)(int64_t)) {
    Room made;
    made.rows = static_cast<uint8_t*>((program.*add)(num_rows * row_bytes));
    made.scales = static_cast<float*>((program.*add)(num_rows * static_cast<int64_t>(sizeof(float))));
    made.sums = static_cast<int32_t*>((program.*add)(num_rows * num_sums * static_cast<int64_t>(sizeof(int32_t))));
    return made;
  };
  shared_ = room(std::max(program.limits().max_tokens, program.limits().max_logits), &Program::add_bytes);
  for (int i = 0; i < program.num_threads(); ++i)
    own_.push_back(room(by_head ? kHeadRows : kOwnRows, &Program::add_own_bytes));
}

Operand OperandBuffers::of(const Worker& worker, const LinearShape& shape, int num_rows) const {
  if (num_rows <= kOwnRows) return own(worker, shape);
  const DType dtype = operand_dtype(shape.dtype);
  return Operand{dtype, shared_.rows, operand_row_bytes(dtype, shape.k), shared_.scales, shared_.sums};
}

Operand OperandBuffers::own(const Worker& worker, const LinearShape& shape) const {
  const Room& room = own_[static_cast<size_t>(worker.index)];
  const DType dtype = operand_dtype(shape.dtype);
  return Operand{dtype, room.rows, operand_row_bytes(dtype, shape.k), room.scales, room.sums};
}

void add_first_touch(Program& program, FirstTouch& first_touch) {
  program.add_planner([&first_touch](const StepRows& step) { first_touch.plan(step); });
  program.add("first touch", 1, [&first_touch](const StepRows&, WorkCounter* counters, const Worker&) {
    if (first_touch.num_planned() > 0) first_touch.touch(*counters);
    return false;
  });
}

void add_idle(Program& program, const AdaptedLinear& adapted, const std::string& name) {
  program.add(name, kWeightCounters, [=](const StepRows&, WorkCounter*, const Worker& worker) {
    if (adapted.active()) worker.meet();
    return true;
  });
}

void add_embed(Program& program, const PackedLinear& weights, int first, int most, float scale, const Rows& target) {
  const auto embed = [=](const StepRows& step, WorkCounter* counters, const Worker&) {
    for (int t = counters->take(); t < step.num_tokens; t = counters->take()) {
      const int index = (most > 0 ? step.token_ids[t] % most : step.token_ids[t]) - first;
      if (index < 0 || index >= weights.shape.n) continue;
      float* row = target.values + t * target.stride;
      unpack_row(weights, index, row);
      if (scale != 1.0f) scale_row(row, target.width, scale);
    }
    return true;
  };
  program.add("embed", kWeightCounters, embed, Program::Shares::own);
}

void add_embed_more(Program& program, const PackedLinear& weights, int offset, int most, const Rows& target) {
  const auto embed = [=](const StepRows& step, WorkCounter* counters, const Worker&) {
    std::vector<float> row(static_cast<size_t>(target.width));
    for (int t = counters->take(); t < step.num_tokens; t = counters->take()) {
      const int index = most > 0 ? step.token_ids[t] / most : step.positions[t] + offset;
      unpack_row(weights, index, row.data());
      float* const to = target.values + t * target.stride;
      for (int64_t i = 0; i < target.width; ++i) to[i] += row[static_cast<size_t>(i)];
    }
    return true;
  };
  program.add("embed more", kWeightCounters, embed, Program::Shares::own);
}

void add_layer_norm(Program& program, const Rows& rows, const float* weight, const float* bias, float eps, bool few) {
  const LinearKernels& kernels = linear_kernels(program.isa());
  program.add("layer norm", 1, [=, &kernels](const StepRows& step, WorkCounter* counters, const Worker&) {
    for (int first; (first = counters->take() * kRowsPerShare) < rows_of(step, few);)
      for (int t = first; t < std::min(first + kRowsPerShare, rows_of(step, few)); ++t)
        kernels.layer_norm(rows.row(t), static_cast<int>(rows.width), weight, bias, eps);
    return true;
  });
}

void add_take(Program& program, const Rows& source, const Rows& target) {
  program.add("take", 1, [=](const StepRows& step, WorkCounter* counters, const Worker&) {
    for (int i = counters->take(); i < step.num_logits; i = counters->take())
      std::memcpy(target.values + i * target.stride, source.values + step.logits_tokens[i] * source.stride,
                  static_cast<size_t>(source.width) * sizeof(float));
    return true;
  });
}

void add_prepare(Program& program, const OperandBuffers& operands, const Rows& source, const LinearShape& shape,
                 const float* norm_weight, float eps, bool few, bool taken, bool rotated, const int32_t* order,
                 const AdaptedLinear& adapted, const std::shared_ptr<HalfRows>& half) {
  const LinearKernels& kernels = linear_kernels(program.isa());
  const char* name = norm_weight == nullptr ? "prepare" : "norm and prepare";
  program.add(name, 2, [=, &kernels, &operands](const StepRows& step, WorkCounter* counters, const Worker& worker) {
    if (half != nullptr && half->in_use()) return false;
    const int m = rows_of(step, few);
    const Operand operand = operands.of(worker, shape, m);
    const PrepareSource from{source.values, source.stride, taken ? step.logits_tokens : nullptr, norm_weight, eps,
                             rotated,       order};
    if (adapted.active()) adapted.adapters->project(adapted.linear, from, counters[1], worker);
    if (m <= kOwnRows) {
      kernels.prepare(from, shape, 0, m, operand);
      return adapted.active();
    }
    prepare_rows(kernels, from, shape, m, operand, counters[0], worker);
    return true;
  });
}

void add_linear(Program& program, const OperandBuffers& operands, const PackedLinear& weights, const LinearOut& out,
                bool few, const AdaptedLinear& adapted, const std::string& name, const std::shared_ptr<HalfRows>& from,
                const std::shared_ptr<HalfRows>& half) {
  const LinearKernels& kernels = linear_kernels(program.isa());
  const auto multiply = [=, &kernels, &operands](const StepRows& step, WorkCounter* counters, const Worker& worker) {
    const int m = rows_of(step, few);
    const bool halved = from != nullptr && from->in_use();
    LinearOut to = out;
    to.half = half != nullptr && half->in_use();
    if (adapted.active()) {
      adapted.adapters->expand(adapted.linear, adapted.first, num_tiles(weights.shape), counters[1], worker);
      worker.meet();
      to.deltas = adapted.adapters->deltas(adapted.linear);
      to.first_delta = adapted.first * kTile;
    }
    kernels.linear(weights, halved ? from->operand() : operands.of(worker, weights.shape, m), m, to, counters[0],
                   worker);
    return true;
  };
  program.add(name, kWeightCounters, multiply, Program::Shares::own);
}

void add_head_linear(Program& program, const OperandBuffers& operands, const HeadLinearOp& op, const Rows& source,
                     const Rows& target, bool few, bool taken, const std::string& name) {
  const LinearKernels& kernels = linear_kernels(program.isa());
  const int64_t width_in = op.shape.k + op.copied, width_out = op.copied + out_width(op.shape);
  const auto multiply = [=, &kernels, &operands](const StepRows& step, WorkCounter* counters, const Worker& worker) {
    const int num_rows = rows_of(step, few), num_parts = (num_rows + kHeadRows - 1) / kHeadRows;
    const Operand operand = operands.own(worker, op.shape);
    for (int share; (share = counters->take()) < op.count * num_parts;) {
      const int part = share / op.count, head = op.first + share % op.count, first = part * kHeadRows;
      const int count = std::min(kHeadRows, num_rows - first);
      const float* const from = source.values + head * width_in;
      float* const to = target.row(first) + head * width_out;
      const int32_t* const index = taken ? step.logits_tokens + first : nullptr;
      const float* const rows = taken ? from : from + first * source.stride;
      for (int row = 0; op.copied > 0 && row < count; ++row)
        std::memcpy(to + row * target.stride, rows + (taken ? index[row] : row) * source.stride + op.shape.k,
                    static_cast<size_t>(op.copied) * sizeof(float));
      kernels.prepare({rows, source.stride, index, nullptr, 0.0f}, op.shape, 0, count, operand);
      WorkCounter alone;
      kernels.linear({op.shape, op.data + (head - op.first) * packed_bytes(op.shape)}, operand, count,
                     LinearOut{to + op.copied, target.stride}, alone, Worker{0, 1, nullptr});
    }
    return true;
  };
  program.add(name, kWeightCounters, multiply, Program::Shares::own);
}

void add_gate(Program& program, const Rows& gate, const Rows& up, const Rows& target, GateAct act, bool few) {
  program.add("gate", 1, [=](const StepRows& step, WorkCounter* counters, const Worker&) {
    gate_rows(gate.values, gate.stride, up.values, up.stride, target.values, target.stride, gate.width,
              rows_of(step, few), act, counters[0]);
    return true;
  });
}

void add_norm_add(Program& program, const Rows& part, const Rows& target, const float* weight, float eps, float scale,
                  bool few, int num_heads) {
  program.add("norm and add", num_heads, [=](const StepRows& step, WorkCounter* counters, const Worker&) {
    for (int64_t head = 0; head < num_heads; ++head)
      norm_add_rows(part.values + head * part.width, part.stride, target.values + head * part.width, target.stride,
                    weight, part.width, rows_of(step, few), eps, scale, counters[head]);
    return true;
  });
}

void add_norm(Program& program, const Rows& source, const Rows& target, const float* weight, float eps, bool few,
              int num_heads) {
  const char* name = weight == nullptr ? "copy" : "norm";
  program.add(name, num_heads, [=](const StepRows& step, WorkCounter* counters, const Worker&) {
    for (int64_t head = 0; head < num_heads; ++head)
      norm_rows(source.values + head * source.width, source.stride, target.values + head * source.width, target.stride,
                weight, source.width, rows_of(step, few), eps, counters[head]);
    return true;
  });
}

void add_scale(Program& program, const Rows& rows, const float* scale, bool few) {
  program.add("scale", 1, [=](const StepRows& step, WorkCounter* counters, const Worker&) {
    for (int row = counters->take(); row < rows_of(step, few); row = counters->take())
      scale_row(rows.row(row), rows.width, *scale);
    return true;
  });
}

void add_rope_table(Program& program, const RopeOp& rope, float* table) {
  program.add("rope angles", 1, [=](const StepRows& step, WorkCounter* counters, const Worker& worker) {
    rope_table(rope, step, table, counters[0], worker);
    return true;
  });
}

void add_qkv(Program& program, int layer, const QKVOp& op, const Rows& source, const float* rope_table,
             const float* query_table, uint8_t* queries) {
  const KVPool& pool = program.pool();
  const Isa isa = program.isa();
  program.add("rope and KV write", 1, [=, &pool](const StepRows& step, WorkCounter* counters, const Worker& worker) {
    qkv(op, pool, step, source.values, source.stride, rope_table, query_table, queries, counters[0], worker, isa);
    return true;
  });
  program.mark_kv_write(layer);
}

void add_attention(Program& program, const AttentionOp& op, AttentionPlan& plan, const AttentionScratch& scratch,
                   const uint8_t* queries, const Rows& target) {
  const KVPool& pool = program.pool();
  const Isa isa = program.isa();
  program.add(
      "attention", 1, [=, &plan, &scratch, &pool](const StepRows& step, WorkCounter* counters, const Worker& worker) {
        attention(op, plan, scratch, pool, step, queries, target.values, target.stride, counters[0], worker, isa);
        return true;
      });
}

}  // namespace maitred
