#include "experts.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "elementwise.h"
#include "vec_plain.h"
#include "vector_math.h"

namespace maitred {
namespace {

constexpr int kGatheredAtOnce = 8;

inline float exp_one(float x) { return exp_of(Vec1{x}).x; }
inline float sigmoid(float x) { return 1.0f / (1.0f + exp_one(-x)); }

// Marks the `count` largest values of those that are not marked; of equal ones the first. NaN comes last.
void mark_best(const float* values, int n, int count, float* marks) {
  for (int taken = 0; taken < count; ++taken) {
    int best = -1;
    for (int i = 0; i < n; ++i)
      if (marks[i] == 0.0f && (best < 0 || values[i] > values[best] || values[best] != values[best])) best = i;
    if (best < 0) return;
    marks[best] = 1.0f;
  }
}

void softmax(const float* logits, int n, float* out) {
  float most = logits[0], sum = 0.0f;
  for (int i = 1; i < n; ++i) most = std::max(most, logits[i]);
  for (int i = 0; i < n; ++i) sum += out[i] = exp_one(logits[i] - most);
  for (int i = 0; i < n; ++i) out[i] /= sum;
}

// Takes experts out of the choice that are in none of the best groups.
void leave_groups(const RouteOp& op, float* choice) {
  const int size = op.num_experts / op.num_groups;
  float sums[64], marks[64] = {};
  for (int group = 0; group < op.num_groups; ++group) {
    float best[8];
    std::fill_n(best, op.best_of_group, -std::numeric_limits<float>::infinity());
    for (int i = 0; i < size; ++i) {
      float value = choice[group * size + i];
      for (int place = 0; place < op.best_of_group; ++place)
        if (value > best[place]) std::swap(value, best[place]);
    }
    sums[group] = 0.0f;
    for (int place = 0; place < op.best_of_group; ++place) sums[group] += best[place];
  }
  mark_best(sums, op.num_groups, op.num_active_groups, marks);
  for (int i = 0; i < op.num_experts; ++i)
    if (marks[i / size] == 0.0f) choice[i] = -std::numeric_limits<float>::infinity();
}

}  // namespace

void check(const RouteOp& op) {
  const int groups = op.num_groups;
  if (op.num_experts < 1 || op.num_active < 1 || groups < 1 || groups > 64 || op.num_experts % groups != 0 ||
      op.num_active_groups < 1 || op.num_active_groups > groups || op.best_of_group < 1 || op.best_of_group > 8 ||
      op.num_active > op.num_experts / groups * op.num_active_groups)
    throw std::invalid_argument("a router that chooses " + std::to_string(op.num_active) + " of " +
                                std::to_string(op.num_experts) + " experts in " + std::to_string(groups) + " groups");
}

void route_row(const RouteOp& op, const float* logits, float* scratch, int32_t* experts, float* weights) {
  const int n = op.num_experts;
  float *scores = scratch, *choice = scratch + n, *marks = scratch + 2 * n;
  if (op.scoring == Scoring::softmax)
    softmax(logits, n, scores);
  else
    for (int i = 0; i < n; ++i) scores[i] = op.scoring == Scoring::sigmoid ? sigmoid(logits[i]) : logits[i];
  for (int i = 0; i < n; ++i) choice[i] = op.correction == nullptr ? scores[i] : scores[i] + op.correction[i];
  if (op.num_groups > 1) leave_groups(op, choice);
  std::fill_n(marks, n, 0.0f);
  mark_best(choice, n, op.num_active, marks);
  for (int i = 0, place = 0; i < n; ++i) {
    if (marks[i] == 0.0f) continue;
    experts[place] = i;
    weights[place++] = scores[i];
  }
  if (op.scoring == Scoring::softmax_of_chosen) softmax(weights, op.num_active, weights);
  float sum = 1e-20f;
  for (int i = 0; i < op.num_active; ++i) sum += weights[i];
  for (int i = 0; i < op.num_active; ++i) weights[i] = (op.normalized ? weights[i] / sum : weights[i]) * op.scale;
  for (int i = 0; op.expert_scales != nullptr && i < op.num_active; ++i) weights[i] *= op.expert_scales[experts[i]];
}

ExpertBuffers::ExpertBuffers(Program& program, int num_experts, int num_active, int width, int hidden,
                             const std::vector<LinearShape>& shapes)
    : num_experts_(num_experts),
      num_active_(num_active),
      width_(width),
      hidden_(hidden),
      row_bytes_(64),
      num_sums_(1),
      inner_stride_(odd_lines(width)),
      out_stride_(odd_lines(hidden)) {
  const int64_t most = std::max(program.limits().max_tokens, program.limits().max_logits);
  const int64_t pairs = std::min<int64_t>(most, kTokens) * num_active;
  for (const LinearShape& shape : shapes) {
    row_bytes_ = std::max(row_bytes_, operand_row_bytes(operand_dtype(shape.dtype), shape.k));
    num_sums_ = std::max(num_sums_, int64_t{sums_per_row(shape)});
  }
  constexpr int64_t kFloat = sizeof(float);
  experts_ = static_cast<int32_t*>(program.add_bytes(most * num_active * kFloat));
  weights_ = static_cast<float*>(program.add_bytes(most * num_active * kFloat));
  inner_ = program.add_rows(pairs, inner_stride_);
  outputs_ = program.add_rows(pairs, out_stride_);
  scratch_ = static_cast<float*>(program.add_own_bytes(int64_t{program.num_threads()} * 3 * num_experts * kFloat));
  rows_ = static_cast<uint8_t*>(program.add_own_bytes(pairs * row_bytes_));
  scales_ = static_cast<float*>(program.add_own_bytes(pairs * kFloat));
  sums_ = static_cast<int32_t*>(program.add_own_bytes(pairs * num_sums_ * kFloat));
  counters_ = std::make_unique<WorkCounter[]>(static_cast<size_t>(2 * num_experts + 2));
  pass_.begins.resize(static_cast<size_t>(num_experts) + 1);
  pass_.row_of.resize(static_cast<size_t>(pairs));
  pass_.pair_of.resize(static_cast<size_t>(pairs));
  pass_.touched.reserve(static_cast<size_t>(num_experts));
}

void ExpertBuffers::check(const RouteOp& op) const {
  maitred::check(op);
  if (op.num_experts > num_experts_ || op.num_active > num_active_)
    throw std::invalid_argument("a layer with more experts than there is room for");
}

void ExpertBuffers::check(const ExpertsOp& op, int num_active, int64_t hidden) const {
  const LinearShape &up = op.gate_up.shape, &down = op.down.shape;
  if (!up.gated || down.gated || down.k != op.width || op.first_inner + out_width(up) > op.width || op.width > width_ ||
      num_active > num_active_ || op.first_out + down.n > hidden || hidden > hidden_ ||
      operand_row_bytes(operand_dtype(up.dtype), up.k) > row_bytes_ ||
      operand_row_bytes(operand_dtype(down.dtype), down.k) > row_bytes_ || sums_per_row(up) > num_sums_ ||
      sums_per_row(down) > num_sums_)
    throw std::invalid_argument("experts whose matrices do not fit each other or the room for them");
}

// By one thread of a rank.
void ExpertBuffers::plan(int first, int count, int num_active, int64_t* tokens_of_expert) {
  for (int i = 0; i < 2 * num_experts_ + 2; ++i) counters_[static_cast<size_t>(i)].next.store(0);
  pass_.first = first;
  pass_.count = count;
  pass_.num_pairs = count * num_active;
  std::vector<int>& begins = pass_.begins;
  std::fill(begins.begin(), begins.end(), 0);
  const int32_t* chosen = experts(first);
  for (int row = 0; row < count; ++row, chosen += num_active_)
    for (int i = 0; i < num_active; ++i) ++begins[static_cast<size_t>(chosen[i]) + 1];
  pass_.touched.clear();
  for (int expert = 0; expert < num_experts_; ++expert) {
    const size_t e = static_cast<size_t>(expert);
    if (begins[e + 1] > 0) pass_.touched.push_back(expert);
    if (tokens_of_expert != nullptr && begins[e + 1] > 0) tokens_of_expert[expert] += begins[e + 1];
    begins[e + 1] += begins[e];
  }
  chosen = experts(first);
  for (int row = 0; row < count; ++row, chosen += num_active_)
    for (int i = 0; i < num_active; ++i) {
      const int pair = begins[static_cast<size_t>(chosen[i])]++;
      pass_.row_of[static_cast<size_t>(pair)] = first + row;
      pass_.pair_of[static_cast<size_t>(row * num_active + i)] = pair;
    }
  for (int expert = num_experts_; expert > 0; --expert)
    begins[static_cast<size_t>(expert)] = begins[static_cast<size_t>(expert) - 1];
  begins[0] = 0;
}

// Pairs' rows from pair `first` on, as a linear of this shape reads them.
Operand ExpertBuffers::gathered(const LinearShape& shape, int first) const {
  const DType dtype = operand_dtype(shape.dtype);
  const int64_t stride = operand_row_bytes(dtype, shape.k);
  return Operand{dtype, rows_ + first * stride, stride, scales_ + first, sums_ + int64_t{first} * sums_per_row(shape)};
}

void ExpertBuffers::gather(const Operand& from, int64_t row_bytes, int num_sums, WorkCounter& counter) {
  for (int pair = counter.take() * kGatheredAtOnce; pair < pass_.num_pairs; pair = counter.take() * kGatheredAtOnce)
    for (int i = pair; i < std::min(pair + kGatheredAtOnce, pass_.num_pairs); ++i) {
      const int64_t row = pass_.row_of[static_cast<size_t>(i)];
      std::memcpy(rows_ + i * row_bytes, static_cast<const uint8_t*>(from.rows) + row * from.row_stride,
                  static_cast<size_t>(row_bytes));
      scales_[i] = from.scales[row];
      std::memcpy(sums_ + int64_t{i} * num_sums, from.sums + row * num_sums,
                  static_cast<size_t>(num_sums) * sizeof(int32_t));
    }
}

// Each expert's rows with its weights: shares are tiles of an expert, and threads go on from one expert to the next.
void ExpertBuffers::multiply(const LinearKernels& kernels, const PackedExperts& weights, const LinearOut& out,
                             int channel, WorkCounter* counters, const Worker& worker) const {
  for (int expert : pass_.touched) {
    const int first = pass_.begins[static_cast<size_t>(expert)], end = pass_.begins[static_cast<size_t>(expert) + 1];
    LinearOut to = out;
    to.rows = out.rows + first * out.row_stride + channel;
    kernels.linear(weights[expert], gathered(weights.shape, first), end - first, to, counters[expert], worker);
  }
}

void ExpertBuffers::add_up(const ExpertsOp& op, int num_active, const Rows& target, const Worker& worker) const {
  const int64_t width = target.width;
  for (int row = worker.index; row < pass_.count; row += worker.count) {
    float* to = target.row(pass_.first + row);
    const int* pairs = pass_.pair_of.data() + int64_t{row} * num_active;
    const float* by = weights(pass_.first + row);
    float* sum = outputs_ + pairs[0] * out_stride_;
    scale_row(sum, width, by[0]);
    for (int i = 1; i < num_active; ++i) {
      const float *from = outputs_ + pairs[i] * out_stride_, weight = by[i];
      for (int64_t c = 0; c < width; ++c) sum[c] += weight * from[c];
    }
    for (int64_t c = 0; c < width; ++c) to[c] = op.ending == Ending::add ? to[c] + op.alpha * sum[c] : sum[c];
  }
}

void ExpertBuffers::run(const Program& program, const ExpertsOp& op, int num_active, const OperandBuffers& operands,
                        int num_rows, const Rows& target, int64_t* tokens_of_expert, WorkCounter& counter,
                        const Worker& worker) {
  const LinearKernels& kernels = linear_kernels(program.isa());
  const LinearShape &up = op.gate_up.shape, &down = op.down.shape;
  const int own_threads = program.own_threads(worker);
  LinearOut inner = op.gated, out{outputs_, out_stride_};
  inner.rows = inner_;
  inner.row_stride = inner_stride_;
  inner.ending = Ending::gate;
  const PrepareSource from{inner_, inner_stride_, nullptr, nullptr, 0.0f};
  const auto met = [&worker] {  // not where a rank was lost: the others have not done their parts then
    worker.meet();
    return !worker.barrier->abandoned();
  };
  for (int first = 0; first < num_rows; first += kTokens) {
    // Each of a rank's threads takes once in a pass, and the first of them plans.
    if (counter.take() % own_threads == 0)
      plan(first, std::min(kTokens, num_rows - first), num_active, tokens_of_expert);
    if (!met()) return;
    gather(operands.of(worker, up, num_rows), operand_row_bytes(operand_dtype(up.dtype), up.k), sums_per_row(up),
           counters_[0]);
    if (!met()) return;
    multiply(kernels, op.gate_up, inner, op.first_inner, counters_.get() + 2, worker);
    if (!met()) return;
    prepare_rows(kernels, from, down, pass_.num_pairs, gathered(down, 0), counters_[1], worker);
    if (!met()) return;
    multiply(kernels, op.down, out, op.first_out, counters_.get() + 2 + num_experts_, worker);
    if (!met()) return;
    add_up(op, num_active, target, worker);
    if (!met()) return;
  }
}

void add_route(Program& program, const RouteOp& op, const ExpertBuffers& buffers, const Rows& logits, bool few) {
  program.add("route", 1, [=, &buffers](const StepRows& step, WorkCounter* counters, const Worker& worker) {
    const int num_rows = few ? step.num_logits : step.num_tokens;
    for (int first = counters->take() * kRowsPerShare; first < num_rows; first = counters->take() * kRowsPerShare)
      for (int row = first; row < std::min(first + kRowsPerShare, num_rows); ++row)
        route_row(op, logits.row(row), buffers.scratch(worker), buffers.experts(row), buffers.weights(row));
    return true;
  });
}

void add_experts(Program& program, const ExpertsOp& op, int num_active, ExpertBuffers& buffers,
                 const OperandBuffers& operands, const Rows& target, int64_t* tokens_of_expert,
                 const std::string& name) {
  const Program& running = program;
  const auto body = [=, &running, &buffers, &operands](const StepRows& step, WorkCounter* counters,
                                                       const Worker& worker) {
    const int num_rows = op.few ? step.num_logits : step.num_tokens;
    buffers.run(running, op, num_active, operands, num_rows, target, tokens_of_expert, counters[0], worker);
    return false;  // they met
  };
  program.add(name, 1, body, Program::Shares::own);
}

void add_sigmoid_scale(Program& program, const Rows& values, const Rows& logits, int column, bool few) {
  program.add("sigmoid scale", 1, [=](const StepRows& step, WorkCounter* counters, const Worker&) {
    const int num_rows = few ? step.num_logits : step.num_tokens;
    for (int row = counters->take(); row < num_rows; row = counters->take())
      scale_row(values.row(row), values.width, sigmoid(logits.row(row)[column]));
    return true;
  });
}

}  // namespace maitred
